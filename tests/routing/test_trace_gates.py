"""Distributions of routers in trace files: written, read back, cut, and refused where they are none."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.errors import UsageError
from moechat.routing import Trace
from moechat.routing.trace_gates import TraceGates

TOKENS, LAYERS, EXPERTS, K = 30, 3, 8, 2


def gates(seed: int = 0) -> TraceGates:
    generator = np.random.default_rng(seed)
    raw = generator.random((TOKENS, LAYERS, EXPERTS)) ** 3
    return TraceGates(
        (raw / raw.sum(axis=-1, keepdims=True)).astype(np.float16),
        np.array([2, 5, 900], dtype=np.int32),
        generator.standard_normal((3, 16)).astype(np.float16),
    )


def example() -> Trace:
    found = gates()
    chosen = np.argsort(-found.gates, axis=-1, kind="stable")[..., :K].astype(np.int32)
    offsets = np.array([0, 10, TOKENS])
    return Trace(chosen, offsets, EXPERTS, token_ids=np.full(TOKENS, 5, dtype=np.int32), gates=found)


def test_gates_and_embeddings_are_read_back(tmp_path: Path) -> None:
    trace = example()
    trace.write(tmp_path / "a.npz")
    again = Trace.read(tmp_path / "a.npz", gates=True).gates
    assert trace.gates is not None
    assert again is not None
    for name, array in trace.gates.arrays().items():
        assert np.array_equal(getattr(again, name), array)
        assert getattr(again, name).dtype == array.dtype


def test_a_trace_is_read_without_its_gates_by_default(tmp_path: Path) -> None:
    example().write(tmp_path / "a.npz")
    assert Trace.read(tmp_path / "a.npz").gates is None


def test_a_small_file_with_very_many_gates_is_refused_by_its_shape(tmp_path: Path) -> None:
    experts = np.zeros((2, 1, 1), dtype=np.int32)
    np.savez_compressed(
        tmp_path / "a.npz", experts=experts, gates=np.zeros((1 << 22, 1, 1), dtype=np.float16)
    )
    with pytest.raises(UsageError, match=r"\[4194304, 1, 1\], not \[2, 1, 1\]"):
        Trace.read(tmp_path / "a.npz", gates=True)


def test_a_cut_trace_has_the_gates_of_its_tokens() -> None:
    trace = example()
    assert trace.gates is not None
    head = trace.head(7, first_sequence=1)
    assert head.gates is not None
    assert np.array_equal(head.gates.gates, trace.gates.gates[10:17])
    assert np.array_equal(head.gates.embeddings, trace.gates.embeddings)


def test_gates_without_embeddings_are_enough(tmp_path: Path) -> None:
    trace = example()
    assert trace.gates is not None
    np.savez(
        tmp_path / "a.npz", experts=trace.experts, num_experts=EXPERTS, gates=trace.gates.gates.astype("f4")
    )
    again = Trace.read(tmp_path / "a.npz", gates=True).gates
    assert again is not None
    assert np.array_equal(again.gates, trace.gates.gates)
    assert again.embeddings.shape == (0, 0)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gates", lambda a: a[1:], r"not \[30, 3, 8\]"),
        ("gates", lambda a: a[0], r"\[3, 8\], not \[30, 3, 8\]"),
        ("gates", lambda a: a * 2, "no distribution"),
        ("gates", lambda a: np.where(a == a.max(), np.nan, a), "no distribution"),
        ("gates", lambda a: -a, "no distribution"),
        ("gates", lambda a: (100 * a).astype(int), "not floating point"),
        ("embedding_ids", lambda a: a[:2], "embedding_ids"),
        ("embedding_ids", lambda a: a[::-1], "ascending"),
        ("embedding_ids", lambda a: a - 9, "int32 from 0 on"),
        ("embedding_ids", lambda a: a.astype("f4"), "embedding_ids has type"),
        ("embedding_ids", lambda a: a.astype("i8") << 40, "int32 from 0 on"),
        ("embedding_ids", lambda a: a.astype("i8") - 2**32, "int32 from 0 on"),
        ("embedding_ids", lambda a: a[0], r"shape \[\]"),
        ("embeddings", lambda a: a.astype("f4") * 1e9, "not finite"),
        ("embeddings", lambda a: a.astype(bool), "not floating point"),
    ],
)
def test_a_file_with_others_is_refused_with_the_reason(
    tmp_path: Path, name: str, change: Any, reason: str
) -> None:
    trace = example()
    assert trace.gates is not None
    arrays = {"experts": trace.experts, "num_experts": np.array(EXPERTS), **trace.gates.arrays()}
    np.savez(tmp_path / "a.npz", **(arrays | {name: change(arrays[name])}))
    with pytest.raises(UsageError, match=reason):
        Trace.read(tmp_path / "a.npz", gates=True)


@given(st.binary(max_size=300), st.sampled_from(["gates", "embedding_ids", "embeddings"]))
def test_no_bytes_in_an_array_do_worse_than_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    path = tmp_path_factory.mktemp("gates") / "a.npz"
    example().write(path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    entries[f"{name}.npy"] = entries[f"{name}.npy"][: len(content) % 128] + content
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)
    with suppress(UsageError):
        assert Trace.read(path, gates=True).gates is not None
