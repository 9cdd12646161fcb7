from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import write_safetensors

from moechat.errors import CheckpointError, StoreDamagedError
from moechat.store.safetensors_file import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    PlannedTensor,
    SafetensorsFile,
    build_header,
)

NUMPY_DTYPES = ("bool", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "f8", "i8", "u8", "c8")


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[object], start: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, np.ndarray]:
    names = draw(st.lists(st.text(min_size=1, max_size=8).filter(_valid_name), max_size=6, unique=True))
    result = {}
    for name in names:
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
        count = int(np.prod(shape))
        data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        if dtype == np.bool_:
            data = bytes(b & 1 for b in data)
        result[name] = np.frombuffer(data, dtype=dtype).reshape(shape)
    return result


def _valid_name(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name != "__metadata__"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=arrays())
def test_valid_files_are_read_exactly_as_the_safetensors_library_reads_them(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    file = SafetensorsFile.open(path)
    assert dict(file.metadata) == {"format": "pt"}
    with safetensors.safe_open(path, "numpy") as reference:
        assert set(file.tensors) == set(reference.keys())
        for name in file.tensors:
            ours, theirs = file.array(name), reference.get_tensor(name)
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes() == b"".join(file.chunks(name))
            assert not ours.flags.writeable


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_element_type_is_written_so_that_the_safetensors_library_reads_it(
    tmp_path: Path, dtype: str
) -> None:
    tensor = PlannedTensor("t", dtype, (2, 8))
    path = tmp_path / "x.safetensors"
    path.write_bytes(build_header([tensor], alignment=4096) + bytes(range(tensor.nbytes)))
    [(name, fields)] = safetensors.deserialize(path.read_bytes())
    assert (name, fields["dtype"], bytes(fields["data"])) == ("t", dtype, bytes(range(tensor.nbytes)))
    file = SafetensorsFile.open(path)
    assert file.data_start == 4096
    assert file.array("t").tobytes() == bytes(range(tensor.nbytes))


def test_a_tensor_that_is_not_aligned_in_the_file_is_still_read_exactly(tmp_path: Path) -> None:
    values = np.arange(5, dtype="<f4")
    header = json.dumps({"a": entry("U8", [1], 0, 1), "b": entry("F32", [5], 1, 21)}).encode()
    path = raw_file(tmp_path / "x", header + b" " * (-len(header) % 8), b"\x07" + values.tobytes())
    assert SafetensorsFile.open(path).array("b").tolist() == values.tolist()


HEADER_REFUSALS = {
    "starts with a space": (b' {"a":1}', b""),
    "not JSON": (b"{nope", b""),
    "not an object": (b"[]", b""),
    "not UTF-8": (b'{"\xff":1}', b""),
    "UTF-16": ('{"a":1}'.encode("utf-16"), b""),
    "duplicate tensor": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "duplicate field": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "nested too deeply": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""),
    "a huge integer": (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', b"x"),
    "NaN": (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x"),
    "metadata not strings": ({"__metadata__": {"a": 1}}, b""),
    "metadata not an object": ({"__metadata__": "a"}, b""),
    "missing field": ({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
    "extra field": ({"a": {**entry("U8", [1], 0, 1), "more": 0}}, b"x"),
    "entry not an object": ({"a": 1}, b""),
    "unknown dtype": ({"a": entry("Q7", [1], 0, 1)}, b"x"),
    "dtype not a string": ({"a": {**entry("U8", [1], 0, 1), "dtype": ["U8"]}}, b"x"),
    "negative dimension": ({"a": entry("U8", [-1], 0, 1)}, b"x"),
    "two negative dimensions": ({"a": entry("U8", [-1, -1], 0, 1)}, b"x"),
    "float dimension": ({"a": entry("U8", [1.0], 0, 1)}, b"x"),
    "boolean dimension": ({"a": entry("U8", [True], 0, 1)}, b"x"),
    "string shape": ({"a": {**entry("U8", [1], 0, 1), "shape": "1"}}, b"x"),
    "product wraps to the right size": ({"a": entry("U8", [1 << 32, 1 << 32], 0, 0)}, b""),
    "overflow hidden behind a zero": ({"a": entry("F32", [1 << 40, 0, 1 << 40], 0, 0)}, b""),
    "too many dimensions": ({"a": entry("U8", [1] * 33, 0, 1)}, b"x"),
    "half a byte": ({"a": entry("F4", [1], 0, 0)}, b""),
    "negative offset": ({"a": entry("U8", [1], -1, 0)}, b"x"),
    "reversed offsets": ({"a": entry("U8", [1], 1, 0)}, b"x"),
    "offset beyond the file": ({"a": entry("U8", [5], 0, 5)}, b"x"),
    "huge offset": ({"a": entry("U8", [1], 1 << 70, (1 << 70) + 1)}, b"x"),
    "float offset": ({"a": entry("U8", [1], 0.0, 1.0)}, b"x"),
    "three offsets": ({"a": {**entry("U8", [1], 0, 1), "data_offsets": [0, 1, 1]}}, b"x"),
    "span too large": ({"a": entry("U8", [1], 0, 2)}, b"xx"),
    "span too small": ({"a": entry("F32", [2], 0, 4)}, b"xxxx"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xxx"),
    "hole": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"xxx"),
    "bytes left over": ({"a": entry("U8", [1], 0, 1)}, b"xx"),
    "data without tensors": ({}, b"x"),
    "name that is not text": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
}


@pytest.mark.parametrize("case", HEADER_REFUSALS)
@pytest.mark.parametrize("error", [CheckpointError, StoreDamagedError])
def test_a_malformed_header_is_refused_with_the_name_of_the_file(
    tmp_path: Path, case: str, error: type[Exception]
) -> None:
    header, data = HEADER_REFUSALS[case]
    path = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(error, match=r"bad\.safetensors"):
        SafetensorsFile.open(path, error=error)  # type: ignore[arg-type]


def test_a_header_whose_length_looks_like_a_web_page_is_read(tmp_path: Path) -> None:
    header = json.dumps({"x": entry("F32", [1], 0, 4)})
    path = raw_file(tmp_path / "x", header.ljust(0x3C20).encode(), bytes(4))
    assert path.read_bytes()[:2] == b" <"
    assert list(SafetensorsFile.open(path).tensors) == ["x"]


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100, 3])
def test_a_header_length_beyond_the_file_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "x", b"{}", length=length)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"claims {length} bytes"):
            SafetensorsFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_inside_the_file_but_larger_than_the_limit_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 1 << 33))
        file.truncate(1 << 34)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"more than {MAX_HEADER_BYTES}"):
            SafetensorsFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_tensor_that_claims_terabytes_is_refused_without_allocating_them(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x", {"a": entry("F32", [1 << 40], 0, 1 << 42)}, b"x" * 16)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="16 data bytes"):
            SafetensorsFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_special_files_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="regular file"):
            SafetensorsFile.open(path)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        SafetensorsFile.open(tmp_path / "absent")


@pytest.mark.parametrize("size", [0, 7, 8, 9])
def test_files_too_short_for_a_header_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match="too few"):
        SafetensorsFile.open(path)


def test_a_file_truncated_after_opening_is_an_error_in_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("U8", np.zeros(10_000, np.uint8))})
    file = SafetensorsFile.open(path)
    os.truncate(path, 5_000)
    with pytest.raises(CheckpointError, match="ends at byte 5000"):
        b"".join(file.chunks("a"))


def seed_file() -> bytes:
    return safetensors.numpy.save(
        {
            "weight": np.arange(12, dtype="f4").reshape(3, 4),
            "bias": np.arange(3, dtype="f2"),
            "none": np.zeros(0),
        },
        metadata={"format": "pt"},
    )


mutations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 400), st.integers(0, 255)),
        st.tuples(st.just("flip"), st.integers(0, 400), st.integers(0, 7)),
        st.tuples(st.just("insert"), st.integers(0, 400), st.binary(min_size=1, max_size=6)),
        st.tuples(st.just("delete"), st.integers(0, 400), st.integers(1, 20)),
        st.tuples(st.just("digit"), st.integers(0, 40), st.sampled_from(list("0123456789-.eE"))),
        st.tuples(st.just("cut"), st.integers(0, 400), st.just(0)),
        st.tuples(st.just("length"), st.integers(0, (1 << 64) - 1), st.just(0)),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, steps: list[tuple[str, int, object]]) -> bytes:
    content = bytearray(data)
    for kind, place, value in steps:
        at = place % max(len(content), 1)
        if kind == "length":
            content[:8] = struct.pack("<Q", place)
        elif kind == "digit":
            digits = [i for i, b in enumerate(content) if 48 <= b <= 57]
            if digits:
                content[digits[place % len(digits)]] = ord(str(value))
        elif kind == "cut":
            del content[at:]
        elif not content:
            continue
        elif kind == "set":
            content[at] = int(value)  # type: ignore[call-overload]
        elif kind == "flip":
            content[at] ^= 1 << int(value)  # type: ignore[call-overload]
        elif kind == "insert":
            content[at:at] = value  # type: ignore[assignment]
        else:
            del content[at : at + int(value)]  # type: ignore[call-overload]
    return bytes(content)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=mutations)
def test_a_mutated_file_is_refused_or_read_inside_its_bounds_and_never_allocates_much(
    tmp_path: Path, steps: list[tuple[str, int, object]]
) -> None:
    path = tmp_path / "x.safetensors"
    content = mutate(seed_file(), steps)
    path.write_bytes(content)
    tracemalloc.start()
    try:
        file = SafetensorsFile.open(path)
    except CheckpointError:
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
    for name, item in file.tensors.items():
        assert file.data_start <= item.start <= item.end <= len(content)
        assert file.array(name).tobytes() == content[item.start : item.end]
    # Whatever we accept, the reference reader accepts too, with the same bytes.
    reference = {name: bytes(fields["data"]) for name, fields in safetensors.deserialize(content)}
    assert reference == {name: content[item.start : item.end] for name, item in file.tensors.items()}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*sorted(DTYPE_BITS), "F5"]) | json_values,
        "shape": st.lists(st.integers(-2, 6) | st.integers(), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-2, 40) | st.integers(), min_size=2, max_size=2) | json_values,
    }
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(st.text(max_size=5), entries | json_values, max_size=3),
    data=st.binary(max_size=40),
)
def test_a_header_of_arbitrary_json_is_refused_or_describes_exactly_the_bytes_there(
    tmp_path: Path, header: dict[str, object], data: bytes
) -> None:
    path = raw_file(tmp_path / "x.safetensors", header, data)
    try:
        file = SafetensorsFile.open(path)
    except CheckpointError:
        return
    assert sum(item.nbytes for item in file.tensors.values()) == len(data)
