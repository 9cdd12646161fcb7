"""Results of trial passes that are kept: the same outlines, without a pass, and no harm from other files."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config

from moechat.hub.known_shapes import shape_names
from moechat.models import kept_trials, model_outline
from moechat.models.kept_trials import read_trial, trial_key
from moechat.models.model_outline import ModelOutline, known_config, outline_model
from moechat.models.skeleton import build_skeleton

# Configuration and modules are objects without an equality of values.
PLAIN = [field.name for field in fields(ModelOutline) if field.name not in ("config", "experts")]


def outlined(config: Any, trials: Path | None, **options: Any) -> ModelOutline:
    return outline_model(config, torch.bfloat16, dense_bits="auto", trials=trials, **options)


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "gpt-oss-20b", pytest.param("qwen3.6-35b-a3b", marks=pytest.mark.slow)]
)
def test_an_outline_from_kept_results_is_the_same_and_runs_no_pass(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in shape_names()
    fresh = outlined(known_config(name), None)
    outlined(known_config(name), tmp_path)
    for function in ("cache_shape", "part_of_prompt"):
        monkeypatch.setattr(model_outline, function, lambda *_, **__: pytest.fail("a trial was run"))
    kept = outlined(known_config(name), tmp_path)
    for field in PLAIN:
        assert getattr(kept, field) == getattr(fresh, field), field
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.fixture
def key(tmp_path: Path) -> str:
    outlined(tiny_config("mixtral", 0), tmp_path)
    return trial_key(tiny_config("mixtral", 0), torch.bfloat16, 16)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["cache"].update(fixed_bytes=-1),
        lambda content: content["cache"].update(appendable=1.5),
        lambda content: content["cache"].update(growing=[[1]]),
        lambda content: content["cache"].update(in_one_pass=None),
        lambda content: content["cache"].update(more=1),
        lambda content: content["cache"].pop("bits"),
        lambda content: content.pop("cache"),
        lambda content: content.update(chunk=0),
        lambda content: content.update(top_k=True),
        lambda content: content.update(reads=["model.nowhere"]),
        lambda content: content.update(reads=5),
    ],
)
def test_a_damaged_file_counts_as_missing_and_is_replaced(tmp_path: Path, key: str, change: Any) -> None:
    model = build_skeleton(tiny_config("mixtral", 0), torch.bfloat16).model
    (path,) = tmp_path.iterdir()
    assert path.name == f"{key}.json"
    whole = path.read_bytes()
    assert read_trial(tmp_path, key, model) is not None
    content = json.loads(whole)
    change(content)
    for damaged in (json.dumps(content).encode(), whole[:-9], b"", b"\xff", b"[" * 100_000):
        path.write_bytes(damaged)
        assert read_trial(tmp_path, key, model) is None
    outlined(tiny_config("mixtral", 0), tmp_path)
    assert path.read_bytes() == whole


def test_other_inputs_and_other_code_have_other_results(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {
        trial_key(tiny_config("mixtral", 1), torch.bfloat16, 16),
        trial_key(tiny_config("mixtral", 0), torch.float32, 16),
        trial_key(tiny_config("mixtral", 0), torch.bfloat16, 8),
    }
    monkeypatch.setattr(kept_trials.transformers, "__version__", "9.9")
    others.add(trial_key(tiny_config("mixtral", 0), torch.bfloat16, 16))
    monkeypatch.undo()
    monkeypatch.setattr(kept_trials, "_own_code", lambda: [("changed.py", 1, 1)])
    others.add(trial_key(tiny_config("mixtral", 0), torch.bfloat16, 16))
    assert len(others | {key}) == 6


def test_a_directory_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert outlined(tiny_config("mixtral", 0), tmp_path / "file").top_k == 2


def test_only_the_newest_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_trials, "_MOST_FILES", 2)
    for number in range(3):
        (tmp_path / f"{number}.json").write_text("{}")
    outlined(tiny_config("mixtral", 0), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert (tmp_path / f"{trial_key(tiny_config('mixtral', 0), torch.bfloat16, 16)}.json").exists()
