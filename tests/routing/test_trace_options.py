"""Optional content of a trace: router weights, tokens, ends of prompts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moechat.errors import UsageError
from moechat.routing import RoutingCounter, Trace, statistics_of_trace


def full(tokens: int = 12) -> Trace:
    generator = np.random.default_rng(0)
    experts = np.argsort(generator.random((tokens, 3, 9)), axis=-1)[..., :2].astype(np.int32)
    return Trace(
        experts,
        np.array([0, 5, 6, tokens]),
        9,
        generator.random(experts.shape).astype(np.float16),
        generator.integers(0, 60_000, tokens).astype(np.int32),
        np.array([4, 0, tokens - 6]),
    )


def assert_same(one: Trace, other: Trace) -> None:
    assert one.num_experts == other.num_experts
    for name in ("experts", "offsets", "weights", "token_ids", "prompt_lengths"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert mine.dtype == theirs.dtype, name
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


def test_a_written_trace_is_read_back_completely(tmp_path: Path) -> None:
    full().write(tmp_path / "trace.npz")
    assert_same(Trace.read(tmp_path / "trace.npz"), full())
    plain = Trace(full().experts, full().offsets, 9)
    plain.write(tmp_path / "trace.npz")
    assert_same(Trace.read(tmp_path / "trace.npz"), plain)


def test_weights_may_be_bytes_or_wider_numbers(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    experts = np.array([[[3, 1]], [[0, 2]]])
    np.savez(path, experts=experts, weights=np.array([[[255, 51]], [[0, 102]]], np.uint8))
    read = Trace.read(path).weights
    assert read is not None
    assert read.dtype == np.float16
    np.testing.assert_allclose(read.ravel(), [1, 0.2, 0, 0.4], rtol=1e-3)
    np.savez(path, experts=experts, weights=np.array([[[0.5, 0.25]], [[1, 0]]], np.float64))
    read = Trace.read(path).weights
    assert read is not None
    assert read.ravel().tolist() == [0.5, 0.25, 1, 0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": np.zeros((12, 3, 1), np.float16)}, r"weights has shape \[12, 3, 1\], not \[12, 3, 2\]"),
        ({"weights": np.full((12, 3, 2), 1e9)}, "not finite"),
        ({"weights": np.full((12, 3, 2), "a")}, "neither floating point nor uint8"),
        ({"weights": np.zeros((12, 3, 2), np.int32)}, "neither floating point nor uint8"),
        ({"tokens": np.zeros(11, np.int32)}, r"tokens has shape \[11\], not \[12\]"),
        ({"tokens": np.full(12, -1)}, "negative"),
        ({"tokens": np.full(12, 1 << 40)}, "tokens holds 1099511627776"),
        ({"tokens": np.zeros(12)}, "tokens has type float64, not integers"),
        ({"prompt_lengths": np.array([1, 1])}, r"prompt_lengths has shape \[2\], not \[3\]"),
        ({"prompt_lengths": np.array([6, 0, 0])}, "more than its sequence has"),
        ({"prompt_lengths": np.array([0, -1, 0])}, "negative"),
    ],
)
def test_contradictory_arrays_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "trace.npz"
    full().write(path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **(arrays | changes))
    with pytest.raises(UsageError, match=reason):
        Trace.read(path)


def test_the_head_keeps_weights_tokens_and_prompts() -> None:
    trace = full()
    head = trace.head(4, first_sequence=1)
    assert head.offsets.tolist() == [0, 1, 4]
    assert head.prompt_lengths is not None
    assert head.prompt_lengths.tolist() == [0, 3]
    assert trace.weights is not None
    assert trace.token_ids is not None
    np.testing.assert_array_equal(head.weights, trace.weights[5:9])
    np.testing.assert_array_equal(head.token_ids, trace.token_ids[5:9])
    assert_same(trace.head(100), trace)


def test_prompts_are_single_passes() -> None:
    assert full().passes().tolist() == [4, 1, 1, 6]
    assert full().head(3).passes().tolist() == [3]
    assert Trace(full().experts, full().offsets, 9).passes().tolist() == [1] * 12
    single = Trace(full().experts, full().offsets, 9, prompt_lengths=np.array([1, 1, 0]))
    assert single.passes().tolist() == [1] * 12


def test_prompts_are_left_out_of_statistics_on_request() -> None:
    trace = full()
    assert statistics_of_trace(trace, "lru").tokens == 12
    without = statistics_of_trace(trace, "lru", prompts=True)
    assert without.tokens == 2
    np.testing.assert_array_equal(without.activations.sum(axis=1), [4, 4, 4])
    from moechat import _native

    counter = RoutingCounter(_native.EvictionPolicy("lru", 3, 9), 2)
    counter.feed(trace.experts, passes=np.array([4, 1, 1, 6]))
    np.testing.assert_array_equal(counter.snapshot().ranks, without.ranks)


def test_entropy_matches_hand_computed_values() -> None:
    def trace(*columns: list[int]) -> Trace:
        return Trace(np.array(columns, np.int32).T[:, :, None], np.array([0, len(columns[0])]), 4)

    assert trace([0, 1, 2, 3]).entropy() == pytest.approx(2)
    assert trace([2, 2, 2, 2]).entropy() == 0
    assert trace([2, 2, 2, 2], [0, 1, 2, 3], [0, 0, 1, 1]).entropy() == pytest.approx(1)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.npz"
    full().write(path)
    before = path.read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", fail)
        with pytest.raises(OSError, match="No space left"):
            full().write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    full(10).write(path)
    assert Trace.read(path).tokens == 10
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.npz").symlink_to(tmp_path / "there" / "real.npz")
    full().write(tmp_path / "link.npz")
    full().write(tmp_path / "link.npz")
    assert (tmp_path / "link.npz").is_symlink()
    assert_same(Trace.read(tmp_path / "there" / "real.npz"), full())


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    full().write(pipe)
    reader.join(20)
    (tmp_path / "trace.npz").write_bytes(received[0])
    assert_same(Trace.read(tmp_path / "trace.npz"), full())


def test_weights_of_published_traces_are_read_by_their_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    experts = np.array([[[3, 1]], [[0, 2]]])
    shares = np.array([[[204, 51]], [[0, 102]]], np.uint8)
    np.savez(path, experts=experts, probs_u8=shares)
    read = Trace.read(path).weights
    assert read is not None
    np.testing.assert_allclose(read.ravel(), [0.8, 0.2, 0, 0.4], rtol=1e-3)
    np.savez(path, experts=experts, probs_u8=shares, weights=shares // 2)
    read = Trace.read(path).weights
    assert read is not None
    np.testing.assert_allclose(read.ravel(), [0.4, 0.098, 0, 0.2], rtol=1e-2)
