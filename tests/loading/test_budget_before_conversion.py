"""A budget that is too small is refused before a conversion, which may take minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_support import save_model, tensors_of, write_gguf

import moechat
from moechat.config import user_paths
from moechat.errors import DoesNotFitError, UnsupportedModelError
from moechat.hub.names import resolve
from moechat.loading import budget_check
from moechat.loading.budget_check import refuse_small_budget
from moechat.loading.stores import open_store
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.gguf_source import opened_gguf
from moechat.options import LoadOptions

MEBI = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_model("qwen3_moe", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def gguf_file(checkpoint: Path, tmp_path: Path) -> Path:
    config = save_model("qwen3_moe", tmp_path / "source")
    path = tmp_path / "m.gguf"
    write_gguf("qwen3_moe", config, tensors_of(checkpoint), path, lambda name, shape: Kind.F32)
    return path


@pytest.mark.parametrize("form", ["checkpoint", "gguf_file"])
def test_small_budget_is_refused_before_the_conversion(form: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(form)
    stages: list[str] = []
    before = set(user_paths().models.rglob("manifest.json"))
    with pytest.raises(
        DoesNotFitError, match="the memory budget is 30 MiB; the least that works is"
    ) as caught:
        moechat.load(path, ram="30M", progress=lambda event: stages.append(event.stage))
    assert caught.value.least_bytes is not None
    assert "convert" not in stages
    assert set(user_paths().models.rglob("manifest.json")) == before
    # The least budget that the refusal names is one that loading takes.
    with moechat.load(path, ram=caught.value.least_bytes + 32 * MEBI) as engine:
        assert engine.describe().memory_budget_given


def test_small_budget_of_graphics_memory_is_refused_from_headers(gguf_file: Path) -> None:
    with opened_gguf(gguf_file) as opened:
        geometry = plan_checkpoint(opened).geometry(4)
        refuse_small_budget(opened, geometry, LoadOptions(vram="8G"))
        with pytest.raises(DoesNotFitError, match="the budget of graphics memory is 64 MiB"):
            refuse_small_budget(opened, geometry, LoadOptions(vram="64M"))


def test_without_outline_the_model_is_converted(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object, **_options: object) -> None:
        raise UnsupportedModelError("no outline")

    monkeypatch.setattr(budget_check, "find_outline", fails)
    store = open_store(resolve(str(gguf_file)), None, lambda _: None, LoadOptions(ram="30M"))
    assert store.geometry.bits == 4


def test_finished_store_is_opened_without_counting(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(resolve(str(gguf_file)), None, lambda _: None).release()

    def fails(*_args: object, **_options: object) -> None:
        raise AssertionError("counted")

    monkeypatch.setattr(budget_check, "find_outline", fails)
    store = open_store(resolve(str(gguf_file)), None, lambda _: None, LoadOptions(ram="30M"))
    assert store.geometry.bits == 4
