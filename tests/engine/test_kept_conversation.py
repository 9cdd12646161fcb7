"""Conversations whose attention cache is kept in a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat import Engine, MoechatError, UsageError

PROMPT = "Once upon a time there was a fox. " * 4
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module", params=[16, 8])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with moechat.load("demo", kv_bits=request.param) as loaded:
        yield loaded


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    engine.drop_prompt_cache()
    return engine


def tokens(engine: Engine, prompt: Any) -> list[int]:
    return [step.token_id for step in engine.generate(prompt, **GREEDY)]


def test_a_conversation_goes_on_with_the_same_tokens_and_computes_only_new_ones(
    fresh: Engine, tmp_path: Path
) -> None:
    answer = tokens(fresh, PROMPT)
    held = len(fresh.encode(PROMPT)) + len(answer) - 1
    assert fresh.save_conversation(tmp_path / "state") == held
    going_on = [*fresh.encode(PROMPT), *answer, *fresh.encode(" And then")]
    wanted = tokens(fresh, going_on)
    assert fresh.stats.reused_tokens == held
    with moechat.load("demo", kv_bits=fresh.loaded.cache.bits) as other:
        assert other.load_conversation(tmp_path / "state") == held
        assert tokens(other, going_on) == wanted
        assert other.stats.reused_tokens == held
        # What was read is what was written, bit by bit.
        assert other.save_conversation(tmp_path / "again") > held


def test_the_file_is_private_and_says_what_it_holds(fresh: Engine, tmp_path: Path) -> None:
    path = tmp_path / "state"
    tokens(fresh, PROMPT)
    count = fresh.save_conversation(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with safe_open(path, framework="pt") as file:
        assert len(json.loads(file.metadata()["tokens"])) == count
        assert file.get_tensor("0.keys").shape[2] == count


def test_nothing_is_written_without_a_conversation(fresh: Engine, tmp_path: Path) -> None:
    assert fresh.save_conversation(tmp_path / "state") == 0
    assert not (tmp_path / "state").exists()


def test_files_of_other_models_and_options_are_refused(fresh: Engine, tmp_path: Path) -> None:
    path = tmp_path / "state"
    tokens(fresh, PROMPT)
    fresh.save_conversation(path)
    bits = fresh.loaded.cache.bits
    with moechat.load("demo", kv_bits=24 - bits) as other, pytest.raises(UsageError, match="other options"):
        other.load_conversation(path)
    with (
        moechat.load("demo", kv_bits=bits, ctx=32) as short,
        pytest.raises(UsageError, match="context holds 32"),
    ):
        short.load_conversation(path)


def test_another_model_is_refused_and_so_are_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    with moechat.load("demo") as engine:
        tokens(engine, PROMPT)
        engine.save_conversation(tmp_path / "state")
    for family in ("qwen3_moe", "gpt_oss"):
        config = tiny_config(family, 0)
        config.dtype = torch.bfloat16
        write_tiny_checkpoint(tmp_path / family, config)
        with moechat.load(tmp_path / family) as other:
            with pytest.raises(UsageError, match="another model"):
                other.load_conversation(tmp_path / "state")
            list(other.generate([5, 6, 7, 8], max_new_tokens=3))
            if family == "gpt_oss":
                with pytest.raises(UsageError, match="windows or states"):
                    other.save_conversation(tmp_path / "windows")
            else:
                assert other.save_conversation(tmp_path / "own")


@pytest.mark.parametrize(
    "content", [b"", b"x" * 8, b"\xff" * 100, b'{"tokens": 1}', (10).to_bytes(8, "little") + b"{}"]
)
def test_other_files_are_refused(fresh: Engine, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(UsageError, match="holds no conversation"):
        fresh.load_conversation(tmp_path / "state")
    with pytest.raises(MoechatError, match="cannot be read"):
        fresh.load_conversation(tmp_path / "absent")
    with pytest.raises(MoechatError):
        fresh.load_conversation(tmp_path)
    assert tokens(fresh, PROMPT)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_damaged_files_are_refused_or_read_as_they_are(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "state"
    engine.drop_prompt_cache()
    tokens(engine, "Once upon")
    engine.save_conversation(path)
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["cut", "byte"]))
    place = data.draw(st.integers(0, min(len(content) - 1, 3000)))
    if kind == "cut":
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    engine.drop_prompt_cache()
    with contextlib.suppress(UsageError):
        engine.load_conversation(path)
    assert len(tokens(engine, "Once upon a time")) == 12


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": "[]"},
        {"tokens": "[-1]"},
        {"tokens": '["x"]'},
        {"tokens": "{"},
        {"numbers": "{}"},
        {"numbers": '{"prompt": -1, "answered": 0, "fresh": 0, "marks": []}'},
        {"format": "0"},
    ],
)
def test_files_with_wrong_descriptions_are_refused(
    fresh: Engine, tmp_path: Path, changed: dict[str, str]
) -> None:
    path = tmp_path / "state"
    tokens(fresh, PROMPT)
    fresh.save_conversation(path)
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **changed}
        content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    save_file(content, path, metadata)
    with pytest.raises(UsageError):
        fresh.load_conversation(path)
