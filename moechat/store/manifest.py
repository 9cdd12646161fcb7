"""``manifest.json``: the description of a store.

It is written last, so a directory with a manifest is a complete store. It holds the SHA-256 of every other
file and, as ``checksum``, one of its own content, so every altered byte of a store can be detected.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import moechat
from moechat.config import active_isa, user_paths
from moechat.errors import StoreDamagedError, StoreFormatError, UnsupportedModelError, UsageError
from moechat.geometry import CHECKPOINT_ENCODINGS, ExpertGeometry, WeightType, scale_columns
from moechat.store.safetensors_file import strict_json

# Stores whose experts keep the encodings of their source, have no gate projection, or gates that differ by
# layer, have format 3, all others 2.
# Stores with dense weights in the encodings of GGUF files have format 4; stores with any weights in those of
# quantised checkpoints have format 5. Stores with experts of 6 bits have format 6, whatever their dense
# weights.
FORMAT_VERSION = 6
_CHECKPOINT_FORMAT = 5
_DENSE_FORMAT = 4
_EXPERTS_FORMAT = 3
_QUANTISED_FORMAT = 2
# Format 1 had other scales for weights of 2 to 4 bits; at 8 and 16 bits the formats are the same.
_SAME_FROM_BITS = 8
MANIFEST_NAME = "manifest.json"
# File with the experts of the head for multi-token prediction, and the number of the expert layer whose
# encodings they have. A store need not have one, and versions that do not know it leave it alone.
_MTP_EXPERTS = re.compile(r"experts-mtp-(\d{5})\.safetensors")
MAX_MANIFEST_BYTES = 16 << 20
MAX_LAYERS = 100_000
_ROOT_FIELDS = ["format_version", "source", "created_by", "model_type", "geometry", "layers"]
_ROOT_FIELDS += ["neuron_order", "quantisation", "files", "checksum"]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PACKAGE = Path(__file__).resolve().parents[1]


def mtp_file(ordinal: int) -> str:
    """Name of the file with the experts of a head that have the encodings of expert layer ``ordinal``."""
    return f"experts-mtp-{ordinal:05d}.safetensors"


def mtp_ordinal(name: str) -> int | None:
    """The number in a name of :func:`mtp_file`; ``None``: it is another file."""
    match = _MTP_EXPERTS.fullmatch(name)
    return None if match is None else int(match[1])


def damage_hint(store: Path, *, repairable: bool = False) -> str:
    """The next step for a damaged store, which depends on where the store is.

    Args:
        store: Its directory.
        repairable: Its manifest is whole, so parts of it can be made again.
    """
    if repairable and _in_library(store):
        name = shlex.quote(store.absolute().name)
        return (
            f"`moechat verify {name} --repair` makes its damaged files again; or remove the store and run "
            f"the same command again: {_remove(store)}"
        )
    again = "copy it here again, or run the checkpoint that it was made from"
    return _owner_hint(store) or f"remove the store ({_remove(store)}) and {again}"


def _old_format_hint(store: Path) -> str:
    return _owner_hint(store) or "run the checkpoint that it was made from, which converts it again"


def _owner_hint(store: Path) -> str | None:
    """The next step if the store belongs to the package or the library."""
    path = store.absolute()
    if path.resolve().is_relative_to(_PACKAGE):
        return "install moechat again: this model is a part of it"
    if _in_library(store):
        return f"remove the store and run the same command again, which creates it again: {_remove(store)}"
    return None


def _in_library(store: Path) -> bool:
    path = store.absolute()
    if path.resolve().is_relative_to(_PACKAGE):
        return False
    try:
        return path.is_relative_to(user_paths().models)
    except UsageError:
        return False


def _remove(store: Path) -> str:
    return f"rm -r {shlex.quote(str(store.absolute()))}"


def build_versions() -> dict[str, str]:
    """Versions of moechat, transformers and torch, and the instruction set of the native code."""
    return {
        "moechat": moechat.__version__,
        "transformers": metadata.version("transformers"),
        "torch": metadata.version("torch"),
        "isa": active_isa(),
    }


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 (hexadecimal) of one file of a store."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One expert layer: decoder layer index, name of the experts module in transformers, file."""

    layer: int
    module: str
    file: str


_LEAST_SQUARES_SOLVERS = ("least-squares", "calibrated")
_HQQ_SOLVERS = ("native", "hqq")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the experts were quantised.

    Attributes:
        method: ``least-squares``, ``hqq``, ``none`` for 16 bits, or ``kept``: the source's own encodings.
        group_size: Columns that share scale and zero; 0 for ``none`` and ``kept``.
        axis: 1, groups along the columns; 0 for ``none`` and ``kept``.
        solver: Of least squares ``least-squares`` (by the weights alone) or ``calibrated`` (with measured
            inputs); of HQQ ``native`` or ``hqq`` (the package); else ``none``.
    """

    method: str
    group_size: int
    axis: int
    solver: str

    @classmethod
    def of(cls, geometry: ExpertGeometry, solver: str) -> Quantisation:
        """The record for experts that ``solver`` has made."""
        if geometry.kept or geometry.bits == 16:
            return cls("kept" if geometry.kept else "none", 0, 0, "none")
        method = "hqq" if solver in _HQQ_SOLVERS else "least-squares"
        return cls(method, scale_columns(geometry.bits), 1, solver)


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Origin of the weights.

    Attributes:
        name: Hub id or directory, for display.
        revision: Commit of the hub repository, if any.
        fingerprint: :meth:`Checkpoint.fingerprint` of the source.
        weight_type: Element type of the expert weights in the source.
    """

    name: str
    revision: str | None
    fingerprint: str
    weight_type: WeightType


@dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``.

    Attributes:
        source: Origin of the weights.
        created_by: :func:`build_versions` at the time of conversion, and remarks of the caller.
        model_type: ``config.model_type``.
        geometry: Shape and encoding of the experts.
        layers: Expert layers, ascending.
        quantisation: How the experts were quantised.
        files: Every file of the store except the manifest.
        dense_format: The format that the dense files need, see :func:`dense_format`; 0: that of the experts.
        neuron_order: Reserved for a permutation of neurons inside the experts; always ``None`` in format 1.
    """

    source: SourceRecord
    created_by: Mapping[str, str]
    model_type: str
    geometry: ExpertGeometry
    layers: tuple[LayerRecord, ...]
    quantisation: Quantisation
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    dense_format: int = 0
    neuron_order: None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all files that the manifest lists."""
        return sum(record.bytes for record in self.files.values())

    @property
    def mtp(self) -> LayerRecord | None:
        """The experts of the head for multi-token prediction, as another layer behind the last one."""
        file = next((name for name in self.files if mtp_ordinal(name) is not None), None)
        if file is None:
            return None
        last = self.layers[-1]
        return LayerRecord(last.layer + 1, last.module, file)

    @property
    def mtp_ordinal(self) -> int:
        """Number of the expert layer whose encodings :attr:`mtp` has."""
        return 0 if self.mtp is None else mtp_ordinal(self.mtp.file) or 0

    @property
    def stored_layers(self) -> tuple[LayerRecord, ...]:
        """``layers``, then :attr:`mtp`, if there is one."""
        return self.layers if self.mtp is None else (*self.layers, self.mtp)

    def to_bytes(self) -> bytes:
        """The file content; the same manifest always gives the same bytes."""
        content: dict[str, Any] = {
            "format_version": max(self.dense_format, _format_of(self.geometry)),
            "source": asdict(self.source),
            "created_by": dict(self.created_by),
            "model_type": self.model_type,
            "geometry": self.geometry.to_json(),
            "layers": [asdict(layer) for layer in self.layers],
            "neuron_order": self.neuron_order,
            "quantisation": asdict(self.quantisation),
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
        }
        content["checksum"] = _checksum(content)
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8")

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a manifest file.

        Raises:
            StoreDamagedError: It is missing, unreadable, too large, or malformed (:meth:`parse`).
            UnsupportedModelError: A newer moechat wrote it.
        """
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise StoreDamagedError(
                    f"{path} is larger than {MAX_MANIFEST_BYTES} bytes", hint=damage_hint(path.parent)
                )
            data = path.read_bytes()
        except OSError as problem:
            raise StoreDamagedError(
                f"{path} cannot be read: {problem.strerror}", hint=damage_hint(path.parent)
            ) from problem
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes, where: Path) -> Manifest:
        """Check the content of a manifest: types, ranges, names, and that layers and files agree.

        Args:
            data: The content.
            where: The file, for messages.

        Raises:
            StoreDamagedError: A field is not as :meth:`to_bytes` writes it; the message names it.
            StoreFormatError: An older moechat wrote it, in a format that is no longer read.
            UnsupportedModelError: A newer moechat wrote it.
        """
        try:
            root = _Reader(strict_json(data), "the manifest")
            version = root.integer("format_version", 1)
            if version > FORMAT_VERSION:
                raise UnsupportedModelError(
                    f"{where} has format {version}; this moechat reads format {FORMAT_VERSION}",
                    hint="the store was written by a newer moechat; upgrade, or convert the model again",
                )
            if version < _QUANTISED_FORMAT and _geometry(root.object("geometry")).bits < _SAME_FROM_BITS:
                raise StoreFormatError(
                    f"{where} has format {version}; this moechat reads format {_QUANTISED_FORMAT}, "
                    "whose scales are finer",
                    hint=_old_format_hint(where.parent),
                )
            return cls._from_reader(root)
        except (ValueError, UsageError) as problem:
            raise StoreDamagedError(
                f"{where} is damaged: {problem}", hint=damage_hint(where.parent)
            ) from None

    @classmethod
    def _from_reader(cls, root: _Reader) -> Manifest:
        root.exactly(_ROOT_FIELDS)
        if root.string("checksum") != _checksum(root.content):
            raise ValueError("its content does not fit its checksum")
        source = root.object("source")
        source.exactly(["name", "revision", "fingerprint", "weight_type"])
        created_by = root.object("created_by")
        if root.content["neuron_order"] is not None:
            raise ValueError("neuron_order is not null")
        geometry = _geometry(root.object("geometry"))
        version = root.integer("format_version", 1)
        of_experts = _format_of(geometry)
        needed = max(version, _QUANTISED_FORMAT)
        if needed != of_experts and not max(of_experts, _DENSE_FORMAT) <= version <= _CHECKPOINT_FORMAT:
            raise ValueError("its format does not fit its experts")
        quantisation = root.object("quantisation")
        quantisation.exactly(["method", "group_size", "axis", "solver"])
        manifest = cls(
            source=SourceRecord(
                name=source.string("name"),
                revision=None if source.content["revision"] is None else source.string("revision"),
                fingerprint=source.string("fingerprint"),
                weight_type=WeightType(source.string("weight_type")),
            ),
            created_by={name: created_by.string(name) for name in created_by.content},
            model_type=root.string("model_type"),
            geometry=geometry,
            layers=tuple(_layer(item) for item in root.objects("layers", MAX_LAYERS)),
            quantisation=Quantisation(
                quantisation.string("method"),
                quantisation.integer("group_size", 0),
                quantisation.integer("axis", 0),
                quantisation.string("solver"),
            ),
            files={name: _file(name, item) for name, item in root.object("files").objects_by_name()},
            dense_format=version if version > max(of_experts, _EXPERTS_FORMAT) else 0,
        )
        manifest._check_consistency()
        return manifest

    def _check_consistency(self) -> None:
        indices = [item.layer for item in self.layers]
        if not indices or any(a >= b for a, b in pairwise(indices)):
            raise ValueError(f"the expert layers {indices[:8]} are not ascending")
        if self.quantisation != Quantisation.of(self.geometry, self.quantisation.solver):
            raise ValueError(f"quantisation {self.quantisation} does not fit {self.geometry.title}")
        known = (*_LEAST_SQUARES_SOLVERS, *_HQQ_SOLVERS)
        if self.quantisation.group_size and self.quantisation.solver not in known:
            raise ValueError(f"the solver {self.quantisation.solver!r} is unknown")
        if self.geometry.kept and len(self.geometry.kept) != len(self.layers):
            raise ValueError(f"kept has {len(self.geometry.kept)} layers of {len(self.layers)}")
        if self.geometry.layer_gates and len(self.geometry.layer_gates) != len(self.layers):
            raise ValueError(f"layer_gates has {len(self.geometry.layer_gates)} layers of {len(self.layers)}")
        heads = [name for name in self.files if mtp_ordinal(name) is not None]
        if len(heads) > 1 or self.mtp_ordinal >= len(self.layers):
            raise ValueError(f"the files {heads[:2]} are not those of one head")
        names = [item.file for item in self.stored_layers]
        if len(set(names)) != len(names):
            raise ValueError("two layers share a file")
        for name in ("config.json", *names):
            if name not in self.files:
                raise ValueError(f"{name} is not in the list of files")
        for name in names:
            if self.files[name].bytes <= self.geometry.layer_bytes:
                raise ValueError(f"{name} has {self.files[name].bytes} bytes, too few for a layer of experts")


def _checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest without its checksum, independent of white space and field order."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class _Reader:
    """One JSON object with typed access; every error is a ``ValueError`` that names the field."""

    def __init__(self, content: Any, name: str) -> None:
        if not isinstance(content, dict):
            raise ValueError(f"{name} is not an object")
        self.content: dict[str, Any] = content
        self.name = name

    def exactly(self, names: list[str]) -> None:
        if self.content.keys() != set(names):
            odd = sorted(self.content.keys() ^ set(names))
            raise ValueError(f"{self.name} lacks or does not know {', '.join(name[:60] for name in odd[:5])}")

    def _get(self, key: str) -> Any:
        if key not in self.content:
            raise ValueError(f"{self.name} lacks {key}")
        return self.content[key]

    def integer(self, key: str, least: int) -> int:
        value = self._get(key)
        if type(value) is not int or not least <= value < 1 << 62:
            raise ValueError(f"{key} of {self.name} is not an integer of at least {least}")
        return value

    def number(self, key: str) -> float:
        value = self._get(key)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise ValueError(f"{key} of {self.name} is not a number")
        return float(value)

    def string(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str) or len(value) > 4096:
            raise ValueError(f"{key} of {self.name} is not a string")
        return value

    def boolean(self, key: str) -> bool:
        value = self._get(key)
        if not isinstance(value, bool):
            raise ValueError(f"{key} of {self.name} is not true or false")
        return value

    def object(self, key: str) -> _Reader:
        return _Reader(self._get(key), key)

    def objects(self, key: str, most: int) -> list[_Reader]:
        value = self._get(key)
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"{key} of {self.name} is not a list")
        return [_Reader(item, f"an entry of {key}") for item in value]

    def objects_by_name(self) -> list[tuple[str, _Reader]]:
        return [(name, _Reader(item, f"{self.name}[{name[:100]!r}]")) for name, item in self.content.items()]


def _geometry(reader: _Reader) -> ExpertGeometry:
    integers = ("hidden_size", "intermediate_size", "num_experts", "bits")
    values: dict[str, Any] = {name: reader.integer(name, 1) for name in integers}
    values["weight_type"] = reader.string("weight_type")
    values["has_bias"] = reader.boolean("has_bias")
    if "gate" in reader.content:
        values["gate"] = _gate(reader.object("gate"))
    else:  # of versions that did not compose gates
        values["activation"] = reader.string("activation")
        values |= {name: reader.number(name) for name in ("alpha", "limit")}
    if "kept" in reader.content:
        values["kept"] = _kept(reader.content["kept"])
    if "layer_gates" in reader.content:
        values["layer_gates"] = [_gate(gate) for gate in reader.objects("layer_gates", MAX_LAYERS)]
    reader.exactly(list(values))
    return ExpertGeometry.from_json(values)


def _gate(gate: _Reader) -> dict[str, Any]:
    read = {"activation": gate.string("activation"), "clamps_result": gate.boolean("clamps_result")}
    read |= {name: gate.number(name) for name in ("alpha", "offset")}
    read["limit"] = None if gate.content.get("limit", 0) is None else gate.number("limit")
    if "gated" in gate.content:
        read["gated"] = gate.boolean("gated")
    gate.exactly(list(read))
    return read


def _format_of(geometry: ExpertGeometry) -> int:
    """The format that experts need."""
    if geometry.bits == 6:
        return FORMAT_VERSION
    if any(not CHECKPOINT_ENCODINGS.isdisjoint(pair) for pair in geometry.kept):
        return _CHECKPOINT_FORMAT
    newer = geometry.kept or geometry.layer_gates or not geometry.gate.gated
    return _EXPERTS_FORMAT if newer else _QUANTISED_FORMAT


def dense_format(encodings: Iterable[str]) -> int:
    """The format that dense files with these encodings need; 0 without any."""
    found = set(encodings)
    if not found:
        return 0
    return _DENSE_FORMAT if found.isdisjoint(CHECKPOINT_ENCODINGS) else _CHECKPOINT_FORMAT


def _kept(pairs: Any) -> list[list[str]]:
    from moechat import _native

    known = _native.kept_encodings()
    if not isinstance(pairs, list) or not 0 < len(pairs) <= MAX_LAYERS:
        raise ValueError("kept is not a list of encodings")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(name in known for name in pair):
            raise ValueError(f"kept has {str(pair)[:80]}, not two encodings")
    return pairs


def _layer(reader: _Reader) -> LayerRecord:
    reader.exactly(["layer", "module", "file"])
    return LayerRecord(reader.integer("layer", 0), reader.string("module"), reader.string("file"))


def _file(name: str, reader: _Reader) -> FileRecord:
    reader.exactly(["bytes", "sha256"])
    path = PurePosixPath(name)
    safe = (
        name and not path.is_absolute() and ".." not in path.parts and "\0" not in name and str(path) == name
    )
    if not safe or name in (".", MANIFEST_NAME):
        raise ValueError(f"{name[:200]!r} is not a file name inside the store")
    digest = reader.string("sha256")
    if not _SHA256.fullmatch(digest):
        raise ValueError(f"the SHA-256 of {name[:200]!r} is not 64 hexadecimal digits")
    return FileRecord(reader.integer("bytes", 0), digest)
