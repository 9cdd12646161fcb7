"""Profiles as JSON: the fields of :class:`HardwareProfile`, in bytes, bytes per second and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from moechat.errors import UsageError
from moechat.hardware.profile import (
    LEAST_VALUE,
    MOST_VALUE,
    Figure,
    GpuFigures,
    HardwareProfile,
    LinkFigures,
    Origin,
)

_LINK_KINDS = ("file", "gpu")
_RANGE = ("low", "high")
_FIGURE_KEYS = {field.name for field in fields(Figure)}


def profile_to_json(profile: HardwareProfile) -> dict[str, Any]:
    """The fields of the profile as JSON types: figures as objects, integer keys as strings."""
    found: dict[str, Any] = _plain(asdict(profile))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        # A figure without a range has no keys for it.
        without = _RANGE if value.keys() == _FIGURE_KEYS and value["low"] is None else ()
        return {str(key): _plain(item) for key, item in value.items() if key not in without}
    return value


def profile_from_json(data: Mapping[str, Any]) -> HardwareProfile:
    """Inverse of :func:`profile_to_json`.

    Raises:
        UsageError: A field is missing, unknown, of another type or out of range.
    """
    try:
        known = dict(data)
        known["ram"], known["ram_bandwidth"] = _figure(known["ram"]), _figure(known["ram_bandwidth"])
        known["expert_rate"] = {
            int(bits): _numbered(rates) for bits, rates in dict(known["expert_rate"]).items()
        }
        for name in ("expert_rate_together", "expert_flops"):
            known[name] = _numbered(known[name])
        known["links"] = {kind: _link(kind, link) for kind, link in dict(known["links"]).items()}
        if known.get("clock") is not None:  # missing in profiles of earlier versions
            known["clock"] = _figure(known["clock"])
        if known["gpu"] is not None:
            known["gpu"] = _gpu_of(known["gpu"])
        for name in ("name", "title", "cpu", "isa", "created", "key"):
            if not isinstance(known[name], str):
                raise ValueError(f"{name} is {known[name]!r}")
        _whole("cores", known["cores"])
        return HardwareProfile(**known)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the hardware profile is not readable: {type(error).__name__}: {error}") from error


def _whole(name: str, value: Any, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}")


def _figure(data: Mapping[str, Any], *, least: float = LEAST_VALUE) -> Figure:
    numbers = ("value", *(_RANGE if len(data) == len(_FIGURE_KEYS) else ()))
    if data.keys() != {*numbers, "origin", "source"}:
        raise ValueError(f"a figure has {', '.join(sorted(data))}")
    for name in numbers:
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST_VALUE:
            raise ValueError(f"a figure is {value!r}")
    if data["origin"] not in get_args(Origin) or not isinstance(data["source"], str):
        raise ValueError(f"a figure comes from {data['origin']!r}, {data['source']!r}")
    value, *ends = (float(data[name]) for name in numbers)
    return Figure(value, data["origin"], data["source"], *ends)


def _numbered(data: Mapping[str, Any], *, least: float = LEAST_VALUE) -> dict[int, Figure]:
    return {number: _figure(figure, least=least) for number, figure in _by_number(data).items()}


def _twice_numbered(data: Mapping[str, Any]) -> dict[int, dict[int, Figure]]:
    return {number: _numbered(figures) for number, figures in _by_number(data).items()}


def _by_number(data: Mapping[str, Any]) -> dict[int, Any]:
    found = {int(number): value for number, value in dict(data).items()}
    if found and min(found) < 1:
        raise ValueError(f"there is a figure for {min(found)}")
    return found


def _optional(data: Mapping[str, Any] | None, *, least: float = LEAST_VALUE) -> Figure | None:
    return None if data is None else _figure(data, least=least)


def _link(kind: str, data: Mapping[str, Any]) -> LinkFigures:
    known = dict(data)
    if kind not in _LINK_KINDS or known["kind"] != kind:
        raise ValueError(f"the link {kind} is of kind {known['kind']!r}")
    known["bandwidth"] = _numbered(known["bandwidth"])
    if not known["bandwidth"]:
        raise ValueError(f"the link {kind} has no bandwidth")
    known["latency"] = _figure(known["latency"], least=0.0)
    # Missing in profiles of earlier versions.
    known["latencies"] = _numbered(known.get("latencies", {}), least=0.0)
    known["together"] = None if known["together"] is None else _figure(known["together"])
    # Those of format 2; missing in earlier profiles, which means "not measured".
    known["by_depth"] = _twice_numbered(known.get("by_depth", {}))
    for name in ("back", "staged", "experts"):
        known[name] = _numbered(known.get(name, {}))
    for name in ("back_together", "pinned"):
        known[name] = _optional(known.get(name))
    if not isinstance(known.get("pins_more", False), bool):
        raise ValueError(f"pins_more is {known['pins_more']!r}")
    return LinkFigures(**known)


def _gpu_of(data: Mapping[str, Any]) -> GpuFigures:
    known = dict(data)
    for name in ("vram", "bandwidth", "flops"):
        known[name] = _figure(known[name])
    for name in ("vram_free", "launch"):
        known[name] = _figure(known[name], least=0.0)
    if not isinstance(known["name"], str):
        raise ValueError(f"the GPU is called {known['name']!r}")
    for name in ("pcie_generation", "pcie_lanes"):
        _whole(name, known[name], least=0)
    if known.get("capability") is not None:
        major, minor = known["capability"]
        _whole("capability", major)
        _whole("capability", minor, least=0)
        known["capability"] = (major, minor)
    # Those of format 2.
    for name in ("sms", "l2_bytes"):
        if known.get(name) is not None:
            _whole(name, known[name])
    for name in ("dense_rate", "dense_flops"):
        known[name] = _numbered(known.get(name, {}))
    for name in ("expert_rate", "expert_flops"):
        known[name] = _twice_numbered(known.get(name, {}))
    for name in ("context", "copy"):
        known[name] = _optional(known.get(name))
    for name in ("call", "graph_launch", "graph_node", "sync", "round_trip"):
        known[name] = _optional(known.get(name), least=0.0)
    return GpuFigures(**known)
