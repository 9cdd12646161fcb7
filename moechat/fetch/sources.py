"""Chooses among the repositories and files that a known model can be downloaded from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from moechat.errors import DoesNotFitError
from moechat.fetch.repository import RemoteRepository
from moechat.hub.gguf_parts import gguf_parts
from moechat.hub.known_shapes import find_shape
from moechat.hub.model_ref import ModelRef, parse_hub_name

if TYPE_CHECKING:
    from moechat.hardware.profile import HardwareProfile
    from moechat.planning.expect import Expected

# Fewer bits than the usual ones are proposed only where they make a model at least this many times as fast:
# every bit less costs quality.
WORTH_A_BIT = 1.5
USUAL_BITS, FEWER_BITS = 4, 3
# Bits of a weight by the type in a file's name. K-quants keep several types in one file: means over whole
# models, as llama.cpp states them.
_BITS_OF_TYPE = {
    "F32": 32.0, "BF16": 16.0, "F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.56, "Q5_K_M": 5.7, "Q5_K_S": 5.5,
    "Q5_1": 6.0, "Q5_0": 5.5, "Q4_K_M": 4.85, "Q4_K_S": 4.6, "Q4_1": 5.0, "Q4_0": 4.5, "IQ4_NL": 4.5,
    "IQ4_XS": 4.25, "MXFP4": 4.25, "Q3_K_L": 4.3, "Q3_K_M": 3.9, "Q3_K_S": 3.5, "Q2_K": 3.0,
    "IQ3_M": 3.66, "IQ3_S": 3.44, "IQ3_XS": 3.3, "IQ3_XXS": 3.06, "IQ2_M": 2.7, "IQ2_S": 2.5, "IQ2_XS": 2.31,
    "IQ2_XXS": 2.06, "IQ1_M": 1.75, "IQ1_S": 1.56,
}  # fmt: skip
_MAKERS_BITS = 16.0
# Files with up to so many bits are as small as a store of the usual bits, or nearly.
_MOST_KEPT_BITS = 5.0
_FP8 = re.compile(r"[-_.]fp8($|[-_.])", re.IGNORECASE)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Source:
    """One way to get a model.

    Attributes:
        remote: The repository.
        variant: File name of a GGUF model, its first part; ``None`` for safetensors.
        nbytes: Bytes of weights to download.
        bits: Bits of a weight in these files, for the order of sources; ``None`` if unknown.
        original: Whether they are the maker's own files, in the format the model was released in.
    """

    remote: RemoteRepository
    variant: str | None
    nbytes: int
    bits: float | None
    original: bool

    @property
    def name(self) -> str:
        """Its name for ``moechat download``."""
        return self.remote.repository if self.variant is None else f"{self.remote.repository}:{self.variant}"

    @property
    def ref(self) -> ModelRef:
        """The model that it becomes in the library."""
        return parse_hub_name(self.name)

    @property
    def may_stay(self) -> bool:
        """Whether a store for the CPU may keep the encodings of these files, at about the usual bits: for
        files of others only their headers tell whether it can.
        """
        return self.original or (self.bits is not None and USUAL_BITS < self.bits <= _MOST_KEPT_BITS)

    def keeps(self, store_bits: int, *, stays: bool) -> bool:
        """Whether a store loses hardly anything by being made from these files and not the maker's.

        Args:
            store_bits: Bits of the store.
            stays: The bits are the usual ones, so encodings that a kernel reads are kept.
        """
        if self.original or (stays and self.may_stay):
            return True
        return self.bits is not None and self.bits >= 2 * store_bits - 1


@dataclass(frozen=True)
class Choice:
    """The sources of a model, best first.

    Attributes:
        bits: Bits of an expert weight in the store.
        sources: All sources. Which can be read is known only from the headers of their files: take the first
            one that can.
        why_bits: Why these bits, for people; empty for the usual ones, or those that the user gave.
        stays: Encodings of the files are kept where a kernel reads them.
    """

    bits: int
    sources: tuple[Source, ...]
    why_bits: str
    stays: bool = False

    @property
    def why(self) -> str:
        """Why the first source, for people."""
        keeping = sum(source.keeps(self.bits, stays=self.stays) for source in self.sources)
        if len(self.sources) == 1:
            reason = "the only source"
        elif not self.sources[0].keeps(self.bits, stays=self.stays):
            reason = f"the files with most bits; converting them to {self.bits} bits adds a second loss"
        elif keeping > 1:
            reason = f"the smallest of {keeping} downloads that lose hardly anything at {self.bits} bits"
        else:
            reason = f"the only one of {len(self.sources)} that loses hardly anything at {self.bits} bits"
        return f"{reason}; {self.why_bits}" if self.why_bits else reason


def speeds_by_bits(
    model: str,
    bits: int | None,
    *,
    profile: HardwareProfile | None = None,
    load: Mapping[str, Any] = MappingProxyType({}),
    brief: bool = False,
) -> dict[int, Expected]:
    """Expected speed of a known model on a machine, by bits; bits that do not fit into its memory are absent.

    Fewer than the usual bits are looked at only where the usual ones wait for the disk, or do not fit.

    Args:
        model: Alias, repository or shape; for a model without a shape the result is empty.
        bits: Bits that the user gave; then a model that does not fit is no error.
        profile: The machine; ``None``: this one.
        load: The other options of loading, such as ``ram``.
        brief: See :func:`moechat.planning.expect.expect`.

    Raises:
        DoesNotFitError: No bits fit, and the user gave none.
    """
    shape = find_shape(model)
    return {} if shape is None else speeds_of(shape, bits, profile=profile, load=load, brief=brief)


def speeds_of(
    shape: str | Path,
    bits: int | None,
    *,
    profile: HardwareProfile | None = None,
    load: Mapping[str, Any] = MappingProxyType({}),
    brief: bool = False,
) -> dict[int, Expected]:
    """The same for a shape, or a ``config.json``.

    Raises:
        DoesNotFitError: No bits fit, and the user gave none.
        UnsupportedModelError: moechat cannot run the model.
    """
    # Imported here: sources are listed without it.
    from moechat.planning.expect import expect

    found: dict[int, Expected] = {}
    problem = None
    for candidate in (USUAL_BITS, FEWER_BITS) if bits is None else (bits,):
        try:
            found[candidate] = expect(shape, profile=profile, brief=brief, **{**load, "bits": candidate})
        except DoesNotFitError as error:
            problem = error
            continue
        if not found[candidate].reads_disk:
            break
    if not found and bits is None and problem is not None:
        raise problem
    return found


def list_sources(remote: RemoteRepository, *, original: bool) -> list[Source]:
    """The sources in a repository: its safetensors, and each complete GGUF model.

    Args:
        remote: The repository and its files.
        original: Whether it is the maker's.
    """
    # Imported here: it brings torch, which estimates of known models do without.
    from moechat.fetch.gguf_repository import gguf_models

    found = []
    if remote.files.keys() & {_INDEX, _SINGLE}:
        weights = [file for name, file in remote.files.items() if _is_shard(name)]
        bits = _MAKERS_BITS if original else 8.0 if _FP8.search(remote.repository) else None
        found.append(Source(remote, None, sum(max(0, file.size) for file in weights), bits, original))
    for first, parts in gguf_models(remote).items():
        path = PurePosixPath(first)
        if len(parts) == len(gguf_parts(path.name)):
            nbytes = sum(max(0, file.size) for file in parts)
            found.append(Source(remote, path.name, nbytes, bits_in_name(path.name), False))
    return found


def bits_in_name(name: str) -> float | None:
    """Bits of a weight by the type in the name of a GGUF file; ``None`` if it names none."""
    for kind in sorted(_BITS_OF_TYPE, key=len, reverse=True):
        if re.search(rf"(^|[-._]){kind}($|[-._])", name, re.IGNORECASE):
            return _BITS_OF_TYPE[kind]
    # Mixed forms such as Q4_K_XL.
    match = re.search(r"(?:^|[-._])I?Q([1-8])_", name, re.IGNORECASE)
    return None if match is None else float(match[1]) + 0.5


def choose_source(
    sources: Sequence[Source],
    speeds: Mapping[int, Expected],
    *,
    bits: int | None = None,
) -> Choice:
    """Choose bits for this machine's memory, and order the sources for them.

    Bits: 4, or 3 where 4 wait for the disk and 3 make the model at least :data:`WORTH_A_BIT` times as fast,
    or where only 3 fit. Sources: those from which a store of these bits loses hardly anything come first, the
    smallest download before the others; then the others, those with most bits first.

    Args:
        sources: What the hub offers.
        speeds: Expected speed on this machine by bits; bits that do not fit into its memory are absent.
        bits: Bits that the user gave, or ``None``: then encodings of files with about the usual bits are kept
            where a kernel reads them, so that these files lose nothing.

    Raises:
        DoesNotFitError: No bits fit, or there is no source.
    """
    chosen = bits if bits is not None else choose_bits(speeds)
    if not sources:
        raise DoesNotFitError("none of the repositories has weights that can be read")

    stays = bits is None and chosen == USUAL_BITS

    def order(source: Source) -> tuple[bool, float, int, bool, str]:
        keeps = source.keeps(chosen, stays=stays)
        worse = 0.0 if keeps else -(source.bits or 0.0)
        return not keeps, worse, source.nbytes, not source.original, source.name

    why = "" if bits is not None else _why_bits(chosen, speeds)
    return Choice(chosen, tuple(sorted(sources, key=order)), why, stays)


def choose_bits(speeds: Mapping[int, Expected]) -> int:
    """The bits of :func:`choose_source`.

    Raises:
        DoesNotFitError: No bits fit.
    """
    usual, fewer = speeds.get(USUAL_BITS), speeds.get(FEWER_BITS)
    if usual is None:
        if not speeds:
            raise DoesNotFitError("the model does not fit into the memory of this machine")
        return max(speeds)
    if fewer is not None and usual.reads_disk and fewer.tokens_per_s >= WORTH_A_BIT * usual.tokens_per_s:
        return FEWER_BITS
    return USUAL_BITS


def _why_bits(bits: int, speeds: Mapping[int, Expected]) -> str:
    usual = speeds.get(USUAL_BITS)
    if bits >= USUAL_BITS:
        return ""
    if usual is None:
        return f"{bits} bits, because {USUAL_BITS} do not fit into memory"
    faster = speeds[bits].tokens_per_s / usual.tokens_per_s
    return f"{bits} bits, because {USUAL_BITS} would wait for the disk: {faster:.1f} times as fast"


def _is_shard(name: str) -> bool:
    return "/" not in name and name.startswith("model") and name.endswith(".safetensors")
