"""Trace files: written files read back, malformed files are refused with the reason."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moechat.errors import UsageError
from moechat.routing import Trace


def example(tokens: int = 50, layers: int = 3, experts: int = 12, k: int = 4, seed: int = 0) -> Trace:
    generator = np.random.default_rng(seed)
    chosen = generator.random((tokens, layers, experts)).argsort(axis=-1)[..., :k].astype(np.int32)
    return Trace(chosen, np.array([0, tokens // 3, tokens]), experts)


def test_written_traces_are_read_back(tmp_path: Path) -> None:
    trace = example()
    trace.write(tmp_path / "a.npz")
    again = Trace.read(tmp_path / "a.npz")
    assert np.array_equal(again.experts, trace.experts)
    assert np.array_equal(again.offsets, trace.offsets)
    assert (again.tokens, again.layers, again.top_k, again.sequences) == (50, 3, 4, 2)
    assert again.num_experts == 12
    assert (again.experts.dtype, again.offsets.dtype) == (np.int32, np.int64)


def test_published_layout_without_expert_count_and_with_other_arrays_is_read(tmp_path: Path) -> None:
    trace = example()
    np.savez(
        tmp_path / "a.npz",
        experts=trace.experts.astype(np.uint8),
        offsets=trace.offsets.astype(np.int32),
        domain_names=np.array(["law", "summary"]),
    )
    again = Trace.read(tmp_path / "a.npz")
    assert np.array_equal(again.experts, trace.experts)
    assert again.num_experts == trace.experts.max() + 1


def test_without_offsets_there_is_one_sequence(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", experts=example().experts)
    assert Trace.read(tmp_path / "a.npz").offsets.tolist() == [0, 50]


GOOD: dict[str, Any] = {"experts": example().experts, "offsets": np.array([0, 50])}


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"offsets": np.array([0, 50])}, "no array 'experts'"),
        ({"experts": GOOD["experts"].astype(np.float32)}, "experts has type float32"),
        ({"experts": GOOD["experts"][0]}, r"shape \[3, 4\]"),
        ({"experts": GOOD["experts"][:0]}, r"shape \[0, 3, 4\]"),
        ({"experts": GOOD["experts"] - 1}, "runs from -1"),
        ({"experts": GOOD["experts"].astype(np.int64) + (1 << 33)}, "possible are 0 to"),
        ({"experts": GOOD["experts"] * 0}, "names expert 0 twice in layer 0"),
        ({**GOOD, "offsets": np.array([0, 49])}, "does not run from 0 to the number of tokens, 50"),
        ({**GOOD, "offsets": np.array([0, 51])}, "offsets ends at 51; there are 50 tokens"),
        ({**GOOD, "offsets": np.array([1, 50])}, "does not run from 0"),
        ({**GOOD, "offsets": np.array([0, 30, 30, 50])}, "not strictly ascending"),
        ({**GOOD, "offsets": np.array([0, 30, 20, 50])}, "not strictly ascending"),
        ({**GOOD, "offsets": np.array([[0, 50]])}, "does not run"),
        ({**GOOD, "offsets": np.array([0.0, 50.0])}, "offsets has type float64"),
        ({**GOOD, "num_experts": np.int64(5)}, "there are 5 experts"),
        ({**GOOD, "num_experts": np.array([5, 6])}, "num_experts is not one number"),
        ({**GOOD, "num_experts": np.int64(1 << 40)}, "num_experts is"),
    ],
)
def test_malformed_traces_are_refused(tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UsageError, match=reason) as caught:
        Trace.read(tmp_path / "a.npz")
    assert str(tmp_path / "a.npz") in str(caught.value)
    assert caught.value.hint is not None


def test_pickled_arrays_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", experts=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UsageError, match="is not a routing trace"):
        Trace.read(tmp_path / "a.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and then nothing", b"experts"])
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UsageError, match="is not a routing trace"):
        Trace.read(tmp_path / "a.npz")


def test_a_plain_array_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "a.npz", "wb") as file:
        np.save(file, example().experts)
    with pytest.raises(UsageError, match=r"it is not an \.npz file"):
        Trace.read(tmp_path / "a.npz")


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    example().write(tmp_path / "a.npz")
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(UsageError, match="is not a routing trace"):
        Trace.read(tmp_path / "a.npz")


def test_an_archive_that_would_unpack_to_too_much_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("num_experts.npy", bytes(1 << 20))
        archive.writestr("experts.npy", b"")
    with pytest.raises(UsageError, match=r"num_experts.npy would unpack to 1048576 bytes"):
        Trace.read(tmp_path / "a.npz")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no trace .*none\.npz"):
        Trace.read(tmp_path / "none.npz")


def test_locality_counts_pairs_inside_sequences_only() -> None:
    experts = np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[1, 2]]], dtype=np.int32)
    assert Trace(experts, np.array([0, 4]), 3).locality() == pytest.approx((1 + 2 + 2) / 6)
    assert Trace(experts, np.array([0, 1, 3, 4]), 3).locality() == pytest.approx(1.0)
    assert np.isnan(Trace(experts, np.arange(5), 3).locality())


def test_counts_are_by_layer_and_expert() -> None:
    experts = np.array([[[0, 1], [2, 0]], [[1, 2], [0, 2]]], dtype=np.int32)
    assert Trace(experts, np.array([0, 2]), 4).counts().tolist() == [[1, 2, 1, 0], [2, 0, 2, 0]]


def test_head_begins_with_a_sequence_and_keeps_the_borders() -> None:
    trace = example()
    head = trace.head(20)
    assert head.offsets.tolist() == [0, 16, 20]
    assert np.array_equal(head.experts, trace.experts[:20])
    tail = trace.head(1000, first_sequence=1)
    assert tail.offsets.tolist() == [0, 34]
    assert np.array_equal(tail.experts, trace.experts[16:])
    with pytest.raises(UsageError):
        trace.head(5, first_sequence=2)
