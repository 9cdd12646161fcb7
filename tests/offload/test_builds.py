"""Kernels are built by launches that run side by side, and one after the other if that fails."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from moechat.errors import DeviceUnavailableError
from moechat.offload.accelerator import Accelerator


class Builder(Accelerator):
    """Only what building kernels needs of a GPU."""

    def __init__(self) -> None:
        self.waits = 0

    def active(self):
        return nullcontext()

    def finish_stream(self) -> None:
        self.waits += 1


@pytest.fixture(autouse=True)
def _three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)


def test_launches_run_side_by_side() -> None:
    together, builder = threading.Barrier(3, timeout=20), Builder()
    with torch.inference_mode():
        modes = []
        builder.warm([lambda: (together.wait(), modes.append(torch.is_inference_mode_enabled()))] * 3)
    assert modes == [True] * 3
    assert builder.waits == 1


def test_no_launches_are_none() -> None:
    builder = Builder()
    builder.warm([])
    assert builder.waits == 1


def test_what_fails_in_a_thread_is_tried_in_turn() -> None:
    main, done = threading.current_thread(), []

    def launch() -> None:
        if threading.current_thread() is not main:
            raise RuntimeError("not here")
        done.append(1)

    Builder().warm([launch, lambda: done.append(2)])
    assert done[-2:] == [1, 2]


def test_what_fails_in_turn_too_is_an_error_with_its_reason() -> None:
    def launch() -> None:
        raise OSError("no compiler")

    with pytest.raises(
        DeviceUnavailableError, match="cannot build the kernels: OSError: no compiler"
    ) as caught:
        Builder().warm([launch])
    assert "C compiler" in caught.value.hint


def test_lack_of_memory_is_reported_as_it_is() -> None:
    def launch() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Builder().warm([launch])
