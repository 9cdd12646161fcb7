"""The systems and shares of memory that a comparison has, systems that come to the same thing as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from moechat.bench.options import parse_fractions, parse_systems
from moechat.configurator.systems import SYSTEMS, CacheSettings, parse_settings
from moechat.errors import UsageError

DEFAULT_FRACTIONS = (0.125, 0.25, 0.5)
_UNUSED = CacheSettings()


@dataclass(frozen=True)
class Entry:
    """One line of a comparison.

    Attributes:
        system: Name, with its settings if it was written with any.
        also: Other systems that come to the same thing here.
    """

    system: str
    also: tuple[str, ...] = ()


def systems_to_compare(text: str | None) -> tuple[str, ...]:
    """Names of systems, in the order in which they were written.

    Args:
        text: As for :func:`moechat.bench.options.parse_systems`; ``None``: all that need no later tokens.

    Raises:
        UsageError: A system is unknown, named twice or needs later tokens, or a value is out of range.
    """
    if text is None:
        return tuple(name for name, settings in SYSTEMS.items() if not settings.needs_future)
    systems = parse_systems(text)
    if not systems:
        raise UsageError("there is no system to compare")
    if len({system.name for system in systems}) < len(systems):
        raise UsageError(f"a system is named twice in {text}")
    for system in systems:
        if system.settings.needs_future:
            raise UsageError(
                f"{system.name} needs the routing of later tokens",
                hint="`moechat simulate` and `moechat bench --routing` replay a recorded trace",
            )
    return tuple(system.name for system in systems)


def shares_to_compare(text: str | None) -> tuple[float, ...]:
    """Shares of the experts, ascending.

    Args:
        text: As for :func:`moechat.bench.options.parse_fractions`; ``None``: the usual ones.

    Raises:
        UsageError: A part is not a number.
    """
    return DEFAULT_FRACTIONS if text is None else tuple(sorted(parse_fractions(text)))


def entries_of(names: Iterable[str], *, far_computes: bool) -> tuple[Entry, ...]:
    """The systems, those that come to the same thing as one entry.

    Args:
        names: Systems, each with settings or without.
        far_computes: Whether missing experts can be computed where they lie.

    Raises:
        UsageError: A system or setting is unknown.
    """
    found: dict[CacheSettings, list[str]] = {}
    for name in names:
        found.setdefault(effective(parse_settings(name), far_computes=far_computes), []).append(name)
    return tuple(Entry(first, tuple(others)) for first, *others in found.values())


def effective(settings: CacheSettings, *, far_computes: bool) -> CacheSettings:
    """The settings, with the usual values for those that have no effect.

    Args:
        settings: Of a system.
        far_computes: As for :func:`entries_of`.
    """
    unused: dict[str, Any] = {}
    if not far_computes:
        unused["miss"] = "fetch"
    if settings.policy != "lcp":
        unused |= {"omega": _UNUSED.omega, "rho": _UNUSED.rho}
    if settings.policy != "discount":
        unused["gamma"] = _UNUSED.gamma
    if settings.prefetch in ("none", "prompts", "whole-layer"):
        unused |= {"lookahead": _UNUSED.lookahead, "prefetch_experts": None}
    if not settings.queues:
        unused |= {name: getattr(_UNUSED, name) for name in ("entries", "match", "distance")}
    if settings.policy != "request":
        unused["layer_factor"] = _UNUSED.layer_factor
    if settings.policy not in ("discount", "lfu"):
        unused["per_request"] = _UNUSED.per_request
    if not settings.looks_up:
        unused["token_lookup"] = _UNUSED.token_lookup
    return replace(settings, **unused)
