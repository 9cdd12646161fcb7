"""How a near tier is run: which experts are kept, what is fetched ahead, what becomes of a miss.

A published system is a combination of these settings (DESIGN, section 7); :data:`SYSTEMS` names them. The
engine and the simulator read the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from moechat.errors import UsageError

Policy = Literal["forecast", "blend", "lcp", "lru", "lfu", "discount", "two_level_lru", "static", "belady"]
Prefetch = Literal["none", "next-router", "whole-layer", "perfect"]
Allocation = Literal["uniform", "auto", "moepic", "dp", "model", "layers"]
Miss = Literal["fetch", "compute", "both"]


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is none of ``choices``."""
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", hint=f"choose one of: {', '.join(map(str, choices))}")


def within(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Refuse a value outside ``low`` to ``high``; with ``above``, ``low`` itself too."""
    # Written so that NaN fails too.
    if not (low <= value <= high) or (above and value == low):
        raise UsageError(
            f"{name} is {value}; it must be {'above' if above else 'at least'} {low} and at most {high}"
        )


@dataclass(frozen=True)
class CacheSettings:
    """Decisions of the split-expert cache; every combination gives the same tokens, but for
    the last bits where the CPU computes a part for a card.

    Attributes:
        policy: Which experts of a layer are kept: ``forecast`` (ours: those that will be wanted soonest, by
            what it has learned of this use), ``blend`` (ours: rates over three spans of time), ``lcp``
            (MoEpic, section 3.3), ``lru``, ``lfu``, ``discount`` (MELINOE, appendix C), ``two_level_lru``
            (ExpertFlow, section 3.3), ``static`` or ``belady``.
        split: θ: share of an expert's blocks that is kept; the rest is fetched when it is needed. ``None``
            leaves it to the allocation, layer by layer.
        allocation: How the pages are divided among the layers: ``uniform``; ``auto`` (ours) and ``moepic``
            (MoEpic, algorithm 1) minimise the load time that nothing hides; ``dp`` maximises the hits
            (AdapMoE); ``model`` keeps the most popular experts of the whole model; ``layers`` keeps whole
            layers, the first ones.
        keep: Share of the pages, without those reserved for blocks on their way, that protected experts may
            take; 0 keeps nothing between tokens on purpose.
        prefetch: ``next-router`` ranks the next layer's experts with its router (MoEpic, section 3.2);
            ``whole-layer`` queues the whole next layer; ``none`` waits for the router; ``perfect`` knows what
            a replayed trace will choose.
        lookahead: Layers ahead that are predicted, 1 to 8.
        prefetch_experts: Most experts to fetch ahead for a layer; ``None`` is the model's top-k.
        prefetch_bytes: Most bytes to fetch ahead for a layer; ``None`` sets no limit but the pages.
        miss: What becomes of missing blocks: ``fetch`` brings them over the link, ``compute`` computes them
            where they lie, ``both`` shares them by measured rates. Where the far tier cannot compute (an
            SSD), all of them are fetched.
        whole_experts: Compute an expert only when all of it has arrived, as most published systems do.
        omega: ``lcp``: tokens in which an unused expert's priority falls by the factor ``rho``.
        rho: See ``omega``.
        gamma: ``discount``: factor of the counts at each token.

    Raises:
        UsageError: A value is out of range.
    """

    policy: Policy = "lcp"
    split: float | None = 1.0
    allocation: Allocation = "uniform"
    keep: float = 1.0
    prefetch: Prefetch = "next-router"
    lookahead: int = 1
    prefetch_experts: int | None = None
    prefetch_bytes: int | None = None
    miss: Miss = "fetch"
    whole_experts: bool = False
    omega: float = 128.0
    rho: float = 0.25
    gamma: float = 0.9

    def __post_init__(self) -> None:
        one_of("policy", self.policy, get_args(Policy))
        one_of("prefetch", self.prefetch, get_args(Prefetch))
        one_of("allocation", self.allocation, get_args(Allocation))
        one_of("miss", self.miss, get_args(Miss))
        if self.split is not None:
            within("split", self.split, 0.0, 1.0, above=True)
        elif self.allocation not in ("auto", "moepic"):
            raise UsageError(f"the allocation {self.allocation} chooses no split", hint="give split=1")
        within("keep", self.keep, 0.0, 1.0)
        within("lookahead", self.lookahead, 1, 8)
        within("omega", self.omega, 0.0, 1e9, above=True)
        within("rho", self.rho, 0.0, 1.0, above=True)
        within("gamma", self.gamma, 0.0, 1.0, above=True)
        # Larger ones mean nothing, and the native runner counts in 64 bits.
        for name, most in (("prefetch_experts", 1 << 20), ("prefetch_bytes", 1 << 62)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise UsageError(
                    f"{name} is {value!r}; it must be a whole number of at least 0 and at most {most}"
                )

    @property
    def first_split(self) -> float:
        """θ before an allocation has chosen one; MoEpic begins with one half (algorithm 1, line 4)."""
        if self.split is not None:
            return self.split
        return 0.5 if self.allocation == "moepic" else 1.0


_LRU_WHOLE = CacheSettings(policy="lru", whole_experts=True)

SYSTEMS: Mapping[str, CacheSettings] = {
    "auto": CacheSettings(policy="forecast", split=None, allocation="auto", miss="both"),
    "moepic": CacheSettings(policy="lcp", split=None, allocation="moepic"),
    "mixtral-offloading": _LRU_WHOLE,
    "adapmoe": replace(_LRU_WHOLE, allocation="dp"),
    "on-demand": replace(_LRU_WHOLE, prefetch="none"),
    "pregated": replace(_LRU_WHOLE, keep=0.0),
    "deepspeed": replace(_LRU_WHOLE, keep=0.0, prefetch="whole-layer"),
    # What it would fetch ahead by its counts over the whole model is what it keeps anyway (MoE-Infinity,
    # sections 5.1 and 5.2).
    "brainstorm": replace(_LRU_WHOLE, policy="lfu", allocation="model", prefetch="none"),
    "fiddler": CacheSettings(policy="static", allocation="model", prefetch="none", miss="compute"),
    "static": CacheSettings(policy="static", allocation="layers", prefetch="none", miss="compute"),
    "oracle": CacheSettings(policy="belady", prefetch="perfect", miss="both"),
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
        if isinstance(sample, float) or key == "split":
            return None if (key, value) == ("split", "auto") else float(value)
        if isinstance(sample, int) or sample is None:
            return int(value)
    except (KeyError, ValueError):
        raise UsageError(f"{key} is {value!r}, which is no value for it") from None
    return value
