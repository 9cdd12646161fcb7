"""How the near tier is run: which experts are kept, what is fetched ahead, over which link.

A published system is a combination of these settings (DESIGN, section 7); :data:`SYSTEMS` names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from moechat.errors import UsageError

Policy = Literal["blend", "lcp", "lru", "lfu", "discount", "two_level_lru", "static", "belady"]
Prefetch = Literal["none", "next-router", "whole-layer"]
LinkIo = Literal["auto", "uring", "threads"]


def _one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", hint=f"choose one of: {', '.join(map(str, choices))}")


def _within(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    # Written so that NaN fails too.
    if not (low <= value <= high) or (above and value == low):
        raise UsageError(
            f"{name} is {value}; it must be {'above' if above else 'at least'} {low} and at most {high}"
        )


@dataclass(frozen=True)
class CacheSettings:
    """Decisions of the split-expert cache; every combination gives the same tokens.

    Attributes:
        policy: Which experts of a layer are kept: ``blend`` (ours: rates over three spans of time), ``lcp``
            (MoEpic, section 3.3), ``lru``, ``lfu``, ``discount`` (MELINOE, appendix C), ``two_level_lru``
            (ExpertFlow, section 3.3), ``static`` or ``belady``.
        split: θ: share of an expert's blocks that is kept; the rest is fetched when it is needed.
        keep: Share of the pages, without those reserved for blocks on their way, that protected experts may
            take; 0 keeps nothing between tokens on purpose.
        prefetch: ``next-router`` ranks the next layer's experts with its router (MoEpic, section 3.2);
            ``whole-layer`` queues the whole next layer; ``none`` waits for the router.
        lookahead: Layers ahead that are predicted, 1 to 8.
        prefetch_experts: Most experts to fetch ahead for a layer; ``None`` is the model's top-k.
        prefetch_bytes: Most bytes to fetch ahead for a layer; ``None`` sets no limit but the pages.
        whole_experts: Compute an expert only when all of it has arrived, as most published systems do.
        omega: ``lcp``: tokens in which an unused expert's priority falls by the factor ``rho``.
        rho: See ``omega``.
        gamma: ``discount``: factor of the counts at each token.

    Raises:
        UsageError: A value is out of range.
    """

    policy: Policy = "lcp"
    split: float = 1.0
    keep: float = 1.0
    prefetch: Prefetch = "next-router"
    lookahead: int = 1
    prefetch_experts: int | None = None
    prefetch_bytes: int | None = None
    whole_experts: bool = False
    omega: float = 128.0
    rho: float = 0.25
    gamma: float = 0.9

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, get_args(Policy))
        _one_of("prefetch", self.prefetch, get_args(Prefetch))
        _within("split", self.split, 0.0, 1.0, above=True)
        _within("keep", self.keep, 0.0, 1.0)
        _within("lookahead", self.lookahead, 1, 8)
        _within("omega", self.omega, 0.0, 1e9, above=True)
        _within("rho", self.rho, 0.0, 1.0, above=True)
        _within("gamma", self.gamma, 0.0, 1.0, above=True)
        # Larger ones mean nothing, and the native runner counts in 64 bits.
        for name, most in (("prefetch_experts", 1 << 20), ("prefetch_bytes", 1 << 62)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise UsageError(
                    f"{name} is {value!r}; it must be a whole number of at least 0 and at most {most}"
                )


@dataclass(frozen=True)
class LinkSettings:
    """The link between the store and the near tier.

    Attributes:
        kind: ``file`` reads the store; ``sim`` moves records out of memory at a programmed speed.
        io: ``file``: ``uring``, ``threads``, or the better one that works.
        direct: ``file``: past the page cache where the file system allows it.
        in_flight_bytes: Most bytes in flight; 0 takes the link's default.
        stall_seconds: Seconds without any arrival after which waiting ends with an error.
        bandwidth: ``sim``: bytes a second; 0 is as fast as memory.
        latency: ``sim``: seconds from the start of a transfer to its first byte.
        jitter: ``sim``: up to that many more seconds for each transfer.
        seed: ``sim``: of the drawn delays.
        reorder: ``sim``: so many started transfers finish in a drawn order.
        copy: ``sim``: ``False`` lets the time pass without moving the bytes; for measurements on random
            weights.
    """

    kind: Literal["file", "sim"] = "file"
    io: LinkIo = "auto"
    direct: bool = True
    in_flight_bytes: int = 0
    stall_seconds: float = 30.0
    bandwidth: float = 0.0
    latency: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    reorder: int = 1
    copy: bool = True

    def __post_init__(self) -> None:
        _one_of("link", self.kind, ("file", "sim"))
        _one_of("io", self.io, get_args(LinkIo))
        _within("stall_seconds", self.stall_seconds, 0.0, 1e6, above=True)
        for name in ("in_flight_bytes", "bandwidth", "latency", "jitter", "seed"):
            _within(name, getattr(self, name), 0, float(1 << 62))
        _within("reorder", self.reorder, 1, 1024)


@dataclass(frozen=True)
class OffloadOptions:
    """What an engine can be told about its near tier beyond a budget and a system; for measurements.

    Attributes:
        cache: Settings in place of those of the named system.
        link: The link.
        pages: Pages of the near tier in place of what the budget leaves for them; 0 maps the store instead.
        predictor: A :class:`moechat.predict.Predictor` in place of the next layer's router.
        replay: A :class:`moechat.routing.Replay` that chooses the experts in place of the routers.
    """

    cache: CacheSettings | None = None
    link: LinkSettings = field(default_factory=LinkSettings)
    pages: int | None = None
    predictor: Any = None
    replay: Any = None


_LRU_WHOLE = CacheSettings(policy="lru", split=1.0, whole_experts=True)

SYSTEMS: Mapping[str, CacheSettings] = {
    "auto": CacheSettings(policy="blend"),
    "moepic": CacheSettings(policy="lcp", split=0.5),
    "mixtral-offloading": _LRU_WHOLE,
    "on-demand": replace(_LRU_WHOLE, prefetch="none"),
    "pregated": replace(_LRU_WHOLE, keep=0.0),
    "deepspeed": replace(_LRU_WHOLE, keep=0.0, prefetch="whole-layer"),
}


def settings_of(system: str) -> CacheSettings:
    """Settings of a named system.

    Raises:
        UsageError: There is no such system.
    """
    if system not in SYSTEMS:
        raise UsageError(f"system {system!r} is not known", hint=f"choose one of: {', '.join(SYSTEMS)}")
    return SYSTEMS[system]


def parse_settings(text: str) -> CacheSettings:
    """Settings of ``NAME`` or ``NAME:key=value,key=value``; for benchmarks and experiments.

    Raises:
        UsageError: Unknown system, unknown key, or a value out of range.
    """
    name, _, tail = text.partition(":")
    settings = settings_of(name)
    types = {entry.name: getattr(settings, entry.name) for entry in fields(settings)}
    changes: dict[str, object] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if key not in types or not equals:
            raise UsageError(
                f"{item!r} is not a setting", hint=f"write KEY=VALUE with one of: {', '.join(types)}"
            )
        changes[key] = _parsed(key, value, types[key])
    return replace(settings, **changes)  # type: ignore[arg-type]


def _parsed(key: str, value: str, sample: object) -> object:
    try:
        if isinstance(sample, bool):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        if isinstance(sample, float):
            return float(value)
        if isinstance(sample, int) or sample is None:
            return int(value)
    except (KeyError, ValueError):
        raise UsageError(f"{key} is {value!r}, which is no value for it") from None
    return value
