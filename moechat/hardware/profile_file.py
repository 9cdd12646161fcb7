"""Profiles in files: TOML for reference machines (``profiles/``), JSON for measured ones.

In the TOML form each figure has the unit in its key's name, an origin and a source; ``profiles/README.md``
describes it. Parsing is strict: unknown keys, missing sources and impossible values are errors that name file
and key, so that no plan is based on a typing error.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal

from moechat.errors import UsageError
from moechat.hardware.measured_file import load_measured
from moechat.hardware.profile import Figure, GpuFigures, HardwareProfile, LinkFigures
from moechat.hardware.profile_json import profile_from_json, profile_to_json
from moechat.hardware.strict_table import StrictTable

__all__ = [
    "load_measured",
    "profile_from_json",
    "profile_to_json",
    "read_profile",
    "reference_names",
    "reference_profile",
]

# Names in native/src/kernels/isa/dispatch.cc.
_INSTRUCTION_SETS = ("portable", "avx2", "avx2-vnni", "avx512", "avx512-vnni", "amx")
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*", re.ASCII)
_SIZE = re.compile(r"([1-9][0-9]{0,5})(KiB|MiB|GiB)", re.ASCII)
_BITS = re.compile(r"(2|3|4|8|16)bit", re.ASCII)
_THREADS = re.compile(r"([1-9][0-9]{0,3})threads?", re.ASCII)
_CAPABILITY = re.compile(r"([1-9][0-9]?)\.([0-9])", re.ASCII)
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_GIGA = 1e9
_MOST_FILE_BYTES = 1 << 20


def read_profile(path: str | Path) -> HardwareProfile:
    """Read a TOML profile; its name is the file's.

    Raises:
        UsageError: The file does not exist or is malformed; the message names file and key.
    """
    path = Path(path)
    if not _NAME.fullmatch(path.stem) or path.suffix != ".toml":
        raise UsageError(
            f"{path} is not a valid profile name", hint="use lower-case letters, digits, dashes and .toml"
        )
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            hint="name a file of the form of profiles/README.md, or a reference machine "
            "(`moechat plan --list-gpus`)",
        ) from error
    if len(content) > _MOST_FILE_BYTES:
        raise UsageError(f"{path} has more than {_MOST_FILE_BYTES} bytes")
    try:
        values = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, or not UTF-8
        raise UsageError(f"{path} is not TOML: {error}") from error
    return _profile(path, values)


def _profile(path: Path, values: Mapping[str, Any]) -> HardwareProfile:
    named = StrictTable(path, "", values, {}).optional("sources")
    sources = {} if named is None else {name: named.text(name) for name in named.values}
    root = StrictTable(path, "", values, sources)
    root.optional("sources")
    title, created = root.text("title"), root.text("created")
    try:
        date.fromisoformat(created)
    except ValueError:
        raise root.error("created", f"is {created!r}, not a date like 2026-01-31") from None

    cpu = root.table("cpu")
    cpu.cited("source")
    model, isa = cpu.text("model"), cpu.text("isa")
    if isa not in _INSTRUCTION_SETS:
        raise cpu.error("isa", f"is {isa!r}", hint=f"choose one of: {', '.join(_INSTRUCTION_SETS)}")
    cores = cpu.number("cores", range(1, 1025))
    clock = cpu.figure("clock_ghz", _GIGA) if "clock_ghz" in cpu.values else None
    by_bits = cpu.table("expert_gb_per_s")
    rates = {bits: _by_threads(by_bits.table(key), cores) for bits, key in _bits(by_bits)}
    together = _by_bits(cpu.optional("expert_together_gb_per_s"), rates)
    flops = _by_bits(cpu.optional("expert_gflop_per_s"), rates)
    cpu.finish()

    memory = root.table("ram")
    ram, ram_bandwidth = memory.figure("size_gib", 1 << 30), memory.figure("bandwidth_gb_per_s", _GIGA)
    memory.finish()

    gpu = _gpu(root.optional("gpu"))
    links = _links(root.table("link"), gpu is not None)
    root.finish()
    # An unused source usually means that a figure cites the wrong one.
    unused = sources.keys() - _cited(values)
    if unused and named is not None:
        raise named.error(min(unused), "is cited by no figure")
    return HardwareProfile(
        name=path.stem,
        title=title,
        cpu=model,
        cores=cores,
        isa=isa,
        ram=ram,
        ram_bandwidth=ram_bandwidth,
        expert_rate=rates,
        expert_rate_together=together,
        expert_flops=flops,
        links=links,
        gpu=gpu,
        created=created,
        clock=clock,
    )


def _bits(table: StrictTable) -> list[tuple[int, str]]:
    return table.keyed(_BITS, "4bit", lambda match: int(match[1]))


def _by_threads(table: StrictTable, cores: int) -> dict[int, Figure]:
    keys = table.keyed(_THREADS, "6threads", lambda match: int(match[1]))
    for threads, key in keys:
        if threads > cores:
            raise table.error(key, f"is more than the {cores} cores")
    if keys[-1][0] != cores:
        raise table.error(f"{cores}threads", "is missing: the rate of all cores")
    return {threads: table.figure(key, _GIGA) for threads, key in keys}


def _by_bits(table: StrictTable | None, rates: Mapping[int, object]) -> dict[int, Figure]:
    if table is None:
        return {}
    keys = _bits(table)
    for bits, key in keys:
        if bits not in rates:
            raise table.error(key, "has no counterpart in cpu.expert_gb_per_s")
    return {bits: table.figure(key, _GIGA) for bits, key in keys}


def _links(table: StrictTable, with_gpu: bool) -> dict[str, LinkFigures]:
    file, gpu = _link(table.optional("file"), "file"), _link(table.optional("gpu"), "gpu")
    table.finish()
    if file is None:
        raise table.error("file", "is missing")
    if with_gpu != (gpu is not None):
        raise table.error("gpu", "is missing" if with_gpu else "is here, but there is no [gpu]")
    return {link.kind: link for link in (file, gpu) if link is not None}


def _link(table: StrictTable | None, kind: Literal["file", "gpu"]) -> LinkFigures | None:
    if table is None:
        return None
    sizes = table.table("gb_per_s")
    keys = sizes.keyed(_SIZE, "256KiB or 16MiB", lambda match: int(match[1]) * _BINARY[match[2]])
    together = "together_gb_per_s"
    link = LinkFigures(
        kind=kind,
        bandwidth={nbytes: sizes.figure(key, _GIGA) for nbytes, key in keys},
        latency=table.figure("latency_us", 1e-6),
        together=table.figure(together, _GIGA) if together in table.values else None,
    )
    table.finish()
    return link


def _gpu(table: StrictTable | None) -> GpuFigures | None:
    if table is None:
        return None
    table.cited("source")
    vram = table.figure("vram_mib", 1 << 20)
    capability = None
    if "compute_capability" in table.values:
        stated = table.text("compute_capability")
        match = _CAPABILITY.fullmatch(stated)
        if match is None:
            raise table.error("compute_capability", f"is {stated!r}, not a text like '8.6'")
        capability = int(match[1]), int(match[2])
    gpu = GpuFigures(
        name=table.text("name"),
        vram=vram,
        vram_free=vram,
        bandwidth=table.figure("bandwidth_gb_per_s", _GIGA),
        flops=table.figure("tflop_per_s", 1e12),
        launch=table.figure("launch_us", 1e-6),
        pcie_generation=table.number("pcie_generation", range(1, 8)),
        pcie_lanes=table.number("pcie_lanes", (1, 2, 4, 8, 16)),
        capability=capability,
        sms=table.number("sms", range(1, 1025)) if "sms" in table.values else None,
        l2_bytes=table.number("l2_mib", range(1, 1025)) << 20 if "l2_mib" in table.values else None,
    )
    table.finish()
    return gpu


def _cited(value: object) -> set[str]:
    """Names of all sources cited anywhere in ``value``."""
    if isinstance(value, dict):
        return set().union(*(_cited(item) for item in value.values()))
    return {value[1:].partition(" ")[0]} if isinstance(value, str) and value.startswith("@") else set()


def _directory() -> Path:
    """Directory of the reference profiles: inside an installed package, or next to the package in a clone.

    Found relative to this file, because an editable install has an older copy in site-packages.
    """
    package = Path(__file__).resolve().parent.parent
    installed = package / "profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def reference_names() -> list[str]:
    """Names of the reference profiles, sorted."""
    return sorted(path.stem for path in _directory().glob("*.toml"))


def reference_profile(name: str) -> HardwareProfile:
    """Profile of a reference machine.

    Args:
        name: One of :func:`reference_names`; case is ignored, spaces and underscores count as dashes.

    Raises:
        UsageError: The profile does not exist; the hint lists similar names, else all.
    """
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower())
    names = reference_names()
    if wanted not in names:
        near = _similar(wanted, names)
        hint = f"do you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names) or 'none'}"
        raise UsageError(f"there is no hardware profile {name!r}", hint=hint)
    return read_profile(_directory() / f"{wanted}.toml")


def _similar(wanted: str, names: list[str]) -> list[str]:
    """Names with the same GPU model number, such as 4090; else those with a small edit distance."""
    numbers = re.findall(r"[0-9]{4}", wanted)
    same_gpu = [name for name in names if any(number in name for number in numbers)]
    return same_gpu or difflib.get_close_matches(wanted, names, n=3)
