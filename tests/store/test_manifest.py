from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.errors import StoreDamagedError, StoreFormatError, UnsupportedModelError
from moechat.geometry import ExpertGeometry, Gate, WeightType
from moechat.store.manifest import (
    FORMAT_VERSION,
    FileRecord,
    LayerRecord,
    Manifest,
    Quantisation,
    SourceRecord,
)

GEOMETRY = ExpertGeometry(
    hidden_size=96,
    intermediate_size=100,
    num_experts=4,
    bits=4,
    weight_type=WeightType.FP16,
    gate=Gate(alpha=1.702, limit=7.0, offset=1.0),
    has_bias=True,
)
MANIFEST = Manifest(
    source=SourceRecord("org/näme", "0123abc", "f" * 64, WeightType.FP32),
    created_by={"moechat": "0.1.0", "isa": "avx2"},
    model_type="gpt_oss",
    geometry=GEOMETRY,
    layers=(
        LayerRecord(1, "model.layers.1.mlp.experts", "experts-00001.safetensors"),
        LayerRecord(3, "model.layers.3.mlp.experts", "experts-00003.safetensors"),
    ),
    quantisation=Quantisation("hqq", 32, 1, "native"),
    files={
        "config.json": FileRecord(10, "a" * 64),
        "additional_chat_templates/tools.jinja": FileRecord(0, "b" * 64),
        "experts-00001.safetensors": FileRecord(4096 + GEOMETRY.layer_bytes, "c" * 64),
        "experts-00003.safetensors": FileRecord(4096 + GEOMETRY.layer_bytes, "d" * 64),
    },
)


def resealed(change: Any) -> bytes:
    """The manifest with ``change`` applied to its content and a checksum that fits again."""
    content = json.loads(MANIFEST.to_bytes())
    change(content)
    rest = {name: value for name, value in content.items() if name != "checksum"}
    spelled = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    content["checksum"] = hashlib.sha256(spelled).hexdigest()
    return json.dumps(content).encode()


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(MANIFEST.to_bytes())
    assert Manifest.read(path) == MANIFEST
    without_revision = replace(MANIFEST, source=replace(MANIFEST.source, revision=None))
    assert Manifest.parse(without_revision.to_bytes(), Path("m")) == without_revision


def test_the_same_manifest_gives_the_same_bytes_whatever_the_order_of_its_files() -> None:
    shuffled = replace(MANIFEST, files=dict(reversed(MANIFEST.files.items())))
    assert shuffled.to_bytes() == MANIFEST.to_bytes()


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, len(MANIFEST.to_bytes()) - 1), bit=st.integers(0, 7))
def test_every_flipped_bit_of_a_manifest_is_detected(place: int, bit: int) -> None:
    data = bytearray(MANIFEST.to_bytes())
    data[place] ^= 1 << bit
    with suppress(StoreDamagedError, UnsupportedModelError):
        assert Manifest.parse(bytes(data), Path("m")) == MANIFEST  # another white space at most


def test_a_store_of_a_newer_moechat_is_refused_as_such() -> None:
    data = resealed(lambda content: content.update(format_version=FORMAT_VERSION + 1, novelty=1))
    with pytest.raises(UnsupportedModelError, match=f"format {FORMAT_VERSION}") as caught:
        Manifest.parse(data, Path("m"))
    assert "newer moechat" in (caught.value.hint or "")


REFUSALS: dict[str, Any] = {
    "no version": lambda c: c.pop("format_version"),
    "version as text": lambda c: c.update(format_version="1"),
    "version as boolean": lambda c: c.update(format_version=True),
    "version zero": lambda c: c.update(format_version=0),
    "unknown field": lambda c: c.update(more=1),
    "missing field": lambda c: c.pop("model_type"),
    "source not an object": lambda c: c.update(source="x"),
    "source name not text": lambda c: c["source"].update(name=3),
    "unknown weight type": lambda c: c["source"].update(weight_type="fp8"),
    "negative size": lambda c: c["geometry"].update(hidden_size=-1),
    "huge size": lambda c: c["geometry"].update(hidden_size=1 << 40),
    "fractional size": lambda c: c["geometry"].update(num_experts=4.0),
    "five bits": lambda c: c["geometry"].update(bits=5),
    "unknown activation": lambda c: c["geometry"].update(activation="relu"),
    "alpha as text": lambda c: c["geometry"].update(alpha="1"),
    "huge alpha": lambda c: c["geometry"].update(alpha=1e300),
    "bias as number": lambda c: c["geometry"].update(has_bias=1),
    "unknown geometry field": lambda c: c["geometry"].update(more=1),
    "no layers": lambda c: c.update(layers=[]),
    "layers descending": lambda c: c["layers"].reverse(),
    "negative layer": lambda c: c["layers"][0].update(layer=-1),
    "two layers in a file": lambda c: c["layers"][1].update(file=c["layers"][0]["file"]),
    "layer file not listed": lambda c: c["layers"][1].update(file="experts-00009.safetensors"),
    "layer file too small": lambda c: c["files"]["experts-00001.safetensors"].update(bytes=4096),
    "no config": lambda c: c["files"].pop("config.json"),
    "neuron order": lambda c: c.update(neuron_order=[1, 0]),
    "method does not fit bits": lambda c: c["quantisation"].update(method="none"),
    "group size": lambda c: c["quantisation"].update(group_size=64),
    "unknown solver": lambda c: c["quantisation"].update(solver="gptq"),
    "negative bytes": lambda c: c["files"]["config.json"].update(bytes=-1),
    "short hash": lambda c: c["files"]["config.json"].update(sha256="ab"),
    "hash in capitals": lambda c: c["files"]["config.json"].update(sha256="A" * 64),
    "file outside": lambda c: c["files"].update({"../x": {"bytes": 1, "sha256": "a" * 64}}),
    "absolute file": lambda c: c["files"].update({"/etc/passwd": {"bytes": 1, "sha256": "a" * 64}}),
    "file with a dot": lambda c: c["files"].update({"a/./b": {"bytes": 1, "sha256": "a" * 64}}),
    "file without name": lambda c: c["files"].update({"": {"bytes": 1, "sha256": "a" * 64}}),
    "file with a null": lambda c: c["files"].update({"a\0b": {"bytes": 1, "sha256": "a" * 64}}),
    "itself": lambda c: c["files"].update({"manifest.json": {"bytes": 1, "sha256": "a" * 64}}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_manifest_with_a_wrong_field_is_refused_by_name(case: str) -> None:
    with pytest.raises(StoreDamagedError, match=r"here/manifest\.json is damaged"):
        Manifest.parse(resealed(REFUSALS[case]), Path("here/manifest.json"))


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{", b"\xff", b'{"format_version":1,"format_version":1}', b"[" * 100_000]
)
def test_content_that_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(StoreDamagedError):
        Manifest.parse(data, Path("m"))


json_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
json_values |= st.lists(json_values, max_size=2) | st.dictionaries(
    st.text(max_size=5), json_values, max_size=2
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_field_of_a_wrong_type_raises_only_damage_errors(data: st.DataObject) -> None:
    def change(content: dict[str, Any]) -> None:
        node: Any = content
        while True:
            keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
                node = node[key]
                continue
            node[key] = data.draw(json_values)
            return

    with suppress(StoreDamagedError, UnsupportedModelError):
        Manifest.parse(resealed(change), Path("m"))


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_stores_of_format_1_below_8_bits_are_refused(bits: int) -> None:
    def older(content: dict[str, Any]) -> None:
        content.update(format_version=1)
        content["geometry"].update(bits=bits)
        content["quantisation"].update(group_size=64)

    with pytest.raises(StoreFormatError, match="format 1; this moechat reads format 2") as refused:
        Manifest.parse(resealed(older), Path("stores/mine/manifest.json"))
    assert "run the checkpoint that it was made from" in str(refused.value.hint)


@pytest.mark.parametrize(("bits", "method", "group"), [(8, "hqq", 64), (16, "none", 0)])
def test_stores_of_format_1_with_8_or_16_bits_are_read(bits: int, method: str, group: int) -> None:
    def older(content: dict[str, Any]) -> None:
        content.update(format_version=1)
        content["geometry"].update(bits=bits)
        solver = "none" if bits == 16 else "native"
        content["quantisation"].update(method=method, group_size=group, axis=int(bits == 8), solver=solver)
        for number in (1, 3):
            content["files"][f"experts-0000{number}.safetensors"].update(bytes=1 << 30)

    assert Manifest.parse(resealed(older), Path("m")).geometry.bits == bits


def test_experts_of_6_bits_have_format_6_and_others_do_not() -> None:
    def of_six_bits(content: dict[str, Any], version: int) -> None:
        content.update(format_version=version)
        content["geometry"].update(bits=6)
        content["quantisation"].update(group_size=64)
        for number in (1, 3):
            content["files"][f"experts-0000{number}.safetensors"].update(bytes=1 << 30)

    made = Manifest.parse(resealed(partial(of_six_bits, version=6)), Path("m"))
    assert json.loads(made.to_bytes())["format_version"] == 6
    for version in (2, 3, 4, 5):
        with pytest.raises(StoreDamagedError, match="format does not fit its experts"):
            Manifest.parse(resealed(partial(of_six_bits, version=version)), Path("m"))
    with pytest.raises(StoreDamagedError, match="format does not fit its experts"):
        Manifest.parse(resealed(lambda content: content.update(format_version=6)), Path("m"))


def test_a_missing_or_oversized_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreDamagedError, match="cannot be read"):
        Manifest.read(tmp_path / "manifest.json")
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(StoreDamagedError, match="larger"):
        Manifest.read(tmp_path / "manifest.json")
