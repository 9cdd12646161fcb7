"""Settings of a near tier: eviction policy, prefetching, and handling of misses.

A published system is a combination of these settings; :data:`SYSTEMS` has their names. Engine and simulator
use the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from moechat.errors import UsageError
from moechat.validation import require_choice, require_number, require_whole

Policy = Literal[
    "forecast",
    "blend",
    "lcp",
    "lru",
    "lfu",
    "discount",
    "two_level_lru",
    "request",
    "map",
    "static",
    "belady",
]
Prefetch = Literal[
    "none", "prompts", "next-router", "adaptive", "eamc", "expert-map", "whole-layer", "perfect"
]
Allocation = Literal["uniform", "shared", "auto", "moepic", "dp", "model", "layers"]
Admit = Literal["key", "always", "best"]
Victims = Literal["farthest", "lowest"]
Match = Literal["prefix", "full"]
# Most layers ahead that anything predicts.
MOST_LOOKAHEAD = 8
Miss = Literal["fetch", "compute", "both", "cpu", "seldom", "stay"]
# The far tier computes what is missing, and the link seldom or never brings it.
COMPUTED_FAR: frozenset[Miss] = frozenset({"compute", "cpu", "seldom", "stay"})


@dataclass(frozen=True)
class RequestForm:
    """Optional parts of what an expert layer on a GPU requests.

    Attributes:
        ahead: Layers ahead whose scores it has; 0: none.
        inputs: It has the layer's inputs, for the CPU.
    """

    ahead: int
    inputs: bool

    def serves(self, other: RequestForm) -> bool:
        """Whether a request of this form has all that one of the other form has."""
        return self.ahead >= other.ahead and self.inputs >= other.inputs

    def union(self, other: RequestForm) -> RequestForm:
        """The smallest form that serves both."""
        return RequestForm(max(self.ahead, other.ahead), self.inputs or other.inputs)


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the split-expert cache. All combinations give the same tokens, except for the last bits
    when the CPU computes a part for a GPU.

    Attributes:
        policy: Eviction policy: ``forecast`` (moechat's: keeps the experts expected to be needed soonest, by
            learned rates), ``blend`` (moechat's: rates over three time spans), ``lcp`` (MoEpic, section 3.3),
            ``lru``, ``lfu``, ``discount`` (MELINOE, appendix C), ``two_level_lru`` (ExpertFlow, section 3.3),
            ``request`` (MoE-Infinity, section 5.3: counts of the running request), ``map`` (FineMoE, section
            4.5), ``static`` or ``belady``.
        split: θ: share of an expert's blocks that is cached; the rest is fetched when needed. ``None``:
            chosen by the allocation for each layer.
        allocation: Division of the pages among the layers: ``uniform``; ``auto`` (moechat's) and ``moepic``
            (MoEpic, algorithm 1) minimise the exposed load time; ``dp`` maximises the hits (AdapMoE);
            ``model`` keeps the most popular experts of the whole model; ``layers`` keeps the first layers
            completely; ``shared`` protects no expert: all layers share one pool.
        keep: Share of the pages, without the reserve for blocks in transit, for protected experts; 0: no
            experts are kept between tokens deliberately.
        prefetch: ``next-router`` ranks the next layer's experts with its router (MoEpic, section 3.2);
            ``whole-layer`` queues the whole next layer; ``none`` does not prefetch; ``prompts`` only
            the next layer of long prompts; ``perfect`` uses the future of a replayed trace. ``adaptive``
            predicts with routers too, at a distance that follows link and layers (ExpertFlow, section 3.2);
            ``eamc`` and ``expert-map`` learn from earlier requests and tokens (MoE-Infinity, section 5;
            FineMoE, section 4).
        lookahead: Layers ahead that are predicted, 1 to 8; with ``adaptive`` the most.
        prefetch_experts: Most experts to prefetch per layer; ``None``: the model's top-k.
        prefetch_bytes: Most bytes to prefetch per layer; ``None``: limited only by the pages.
        miss: Handling of missing blocks: ``fetch`` transfers them, ``compute`` computes them in the far tier
            and transfers meanwhile what is worth keeping, ``both`` divides them by measured rates, ``cpu``
            computes them in the far tier and transfers none, ``seldom`` computes them there too and transfers
            an expert only into free pages, or where the policy ``forecast`` expects it clearly sooner than
            the one that it replaces. ``stay`` does so only where it expects it very much sooner; the experts
            that are used most in the long run are loaded while nothing is done, in place of others. All are
            fetched if the far tier (an SSD) cannot compute.
        whole_experts: Compute an expert only after all of it has arrived, as most published systems do.
        admit: Which experts are protected once used: ``key``, those with the highest keys; ``always``, the
            one that was just used, in place of the lowest (MoEpic, section 3.3); ``best``, as the one of
            these two that has had more hits in a layer lately.
        victims: Where pages are taken from: ``farthest``, the layer whose turn is farthest away; ``lowest``,
            the lowest key of all layers.
        entries: ``eamc`` and ``expert-map``: most requests or tokens that are remembered.
        match: ``eamc``: compares the layers so far (``prefix``) or whole requests (``full``).
        distance: ``expert-map``: layers from the one that is compared to the one that is predicted.
        layer_factor: ``request``: counts of early layers weigh more, as they are predicted worst.
        token_lookup: With ``next-router`` the first layer is fetched by the token, where that has been right
            more often than the prediction.
        per_request: ``discount`` and ``lfu``: counts begin anew with each request (MELINOE, section 3.3).
        omega: ``lcp``: number of tokens in which an unused expert's priority falls by the factor ``rho``.
        rho: See ``omega``.
        gamma: ``discount``: factor of the counts at each token.
        choose: The settings are a start: the fastest of a few variations is chosen by simulation, for the
            machine, the model and the budget (:mod:`moechat.simulate.choice`).

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
    admit: Admit = "key"
    victims: Victims = "farthest"
    entries: int = 1000
    match: Match = "prefix"
    distance: int = 3
    layer_factor: bool = True
    token_lookup: bool = False
    per_request: bool = False
    omega: float = 128.0
    rho: float = 0.25
    gamma: float = 0.9
    choose: bool = False

    def __post_init__(self) -> None:
        require_choice("policy", self.policy, get_args(Policy))
        require_choice("prefetch", self.prefetch, get_args(Prefetch))
        require_choice("allocation", self.allocation, get_args(Allocation))
        require_choice("miss", self.miss, get_args(Miss))
        require_choice("admit", self.admit, get_args(Admit))
        require_choice("victims", self.victims, get_args(Victims))
        require_choice("match", self.match, get_args(Match))
        require_whole("entries", self.entries, 1, 100_000)
        require_whole("distance", self.distance, 1, 1 << 10)
        if self.split is not None:
            require_number("split", self.split, 0, 1, above=True)
        elif self.allocation not in ("auto", "moepic"):
            raise UsageError(f"the allocation {self.allocation} chooses no split", hint="give split=1")
        require_number("keep", self.keep, 0, 1)
        require_whole("lookahead", self.lookahead, 1, MOST_LOOKAHEAD)
        require_number("omega", self.omega, 0, 1e9, above=True)
        require_number("rho", self.rho, 0, 1, above=True)
        require_number("gamma", self.gamma, 0, 1, above=True)
        # Larger values have no effect and would overflow the native runner's 64-bit counters.
        for name, most in (("prefetch_experts", 1 << 20), ("prefetch_bytes", 1 << 62)):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), 0, most)

    @property
    def ahead(self) -> str:
        """Name of the prefetches in native code; ``ranked``: by scores."""
        if self.queues:
            return "queued"
        return self.prefetch if self.prefetch in ("none", "prompts", "whole-layer", "adaptive") else "ranked"

    @property
    def ranks(self) -> bool:
        """Whether the prefetches follow a ranking of experts, which may be wrong or perfect."""
        return self.ahead in ("ranked", "adaptive")

    @property
    def queues(self) -> bool:
        """Whether a predictor that learns from requests orders the experts of all later layers."""
        return self.prefetch in ("eamc", "expert-map")

    def learned_bytes(self, layers: int, experts: int, hidden: int) -> int:
        """Most bytes that a predictor that learns from requests takes, in the memory of the process.

        Args:
            layers: Expert layers.
            experts: Experts of a layer.
            hidden: Elements of an embedding.
        """
        if not self.queues:
            return 0
        # Arrays grow by a copy into larger ones, one at a time, and a file is written from a copy in float16.
        if self.prefetch == "eamc":  # float32, twice, and half of one more or that copy
            return self.entries * layers * (experts + 1) * 10
        return self.entries * (layers * (experts + 2) + hidden) * 4  # float16, and that copy

    @property
    def looks_up(self) -> bool:
        """Whether the first layer may be fetched by the token."""
        return self.token_lookup and self.prefetch == "next-router"

    def adaptive_experts(self, top_k: int) -> float:
        """Experts that an adaptive step fetches for a layer; 0: the step is not adaptive."""
        return float(self.ranked_experts(top_k)) if self.prefetch == "adaptive" else 0.0

    @property
    def loads_most_used(self) -> bool:
        """Whether the most used experts are loaded between answers in place of others, not only at first."""
        return self.miss == "stay"

    @property
    def keeps_experts(self) -> bool:
        """Whether more memory for experts is of use: not to a system that keeps none."""
        return self.keep > 0

    @property
    def allocates(self) -> bool:
        """Whether a plan divides the pages among the layers, by statistics."""
        return self.allocation not in ("uniform", "shared")

    @property
    def predicts(self) -> bool:
        """Whether a predictor ranks the experts, from the hidden states of the model."""
        return self.ranks and self.prefetch != "perfect"

    @property
    def predicted_layers(self) -> int:
        """Layers ahead for which a predictor ranks the experts; 0: none."""
        return self.lookahead if self.predicts else 0

    def request_form(self, *, predicts: bool, far_computes: bool) -> RequestForm:
        """What a layer needs from a GPU when a token decodes.

        Args:
            predicts: The model has routers that can predict.
            far_computes: Missing experts can be computed where they lie.
        """
        return RequestForm(self.predicted_layers if predicts else 0, far_computes and self.miss != "fetch")

    @property
    def needs_future(self) -> bool:
        """Whether the settings need the routing of later tokens, which only a replayed trace has."""
        return self.policy == "belady" or self.prefetch == "perfect"

    def fetching_nothing_ahead(self) -> CacheSettings:
        """These settings, but nothing is fetched ahead of a token; long prompts are still streamed."""
        return replace(self, prefetch="prompts", prefetch_experts=None)

    def keeping_whole_experts(self) -> CacheSettings:
        """These settings, but every layer keeps as many whole experts."""
        return replace(self, allocation="uniform", split=1.0)

    def ranked_experts(self, top_k: int) -> int:
        """Most experts that are prefetched for one layer by a ranking."""
        return top_k if self.prefetch_experts is None else self.prefetch_experts

    @property
    def first_split(self) -> float:
        """θ before an allocation has chosen one; MoEpic starts with 0.5 (algorithm 1, line 4)."""
        if self.split is not None:
            return self.split
        return 0.5 if self.allocation == "moepic" else 1.0


_LRU_WHOLE = CacheSettings(policy="lru", whole_experts=True)
# One pool of pages for all layers, whole experts: the caches of systems whose keys order the whole model.
_SHARED = CacheSettings(whole_experts=True, allocation="shared", victims="lowest")

SYSTEMS: Mapping[str, CacheSettings] = {
    "auto": CacheSettings(
        policy="forecast",
        split=None,
        allocation="auto",
        miss="both",
        admit="best",
        token_lookup=True,
        choose=True,
    ),
    "moepic": CacheSettings(policy="lcp", split=None, allocation="moepic", admit="always"),
    "mixtral-offloading": _LRU_WHOLE,
    "adapmoe": replace(_LRU_WHOLE, allocation="dp"),
    "on-demand": replace(_LRU_WHOLE, prefetch="none"),
    "pregated": replace(_LRU_WHOLE, keep=0.0),
    "deepspeed": replace(_LRU_WHOLE, keep=0.0, prefetch="whole-layer"),
    # No prefetching: by its counts over the whole model it would prefetch the experts that it keeps
    # (MoE-Infinity, sections 5.1 and 5.2).
    "brainstorm": replace(_LRU_WHOLE, policy="lfu", allocation="model", prefetch="none", admit="always"),
    "moe-infinity": replace(_SHARED, policy="request", prefetch="eamc"),
    "finemoe": replace(_SHARED, policy="map", prefetch="expert-map"),
    "expertflow": replace(_SHARED, policy="two_level_lru", prefetch="adaptive", lookahead=MOST_LOOKAHEAD),
    # Counts of the running request; what the tuned checkpoint's predictor names is loaded beside the prompt.
    "melinoe": CacheSettings(
        policy="discount",
        gamma=1.0,
        per_request=True,
        whole_experts=True,
        prefetch="none",
        admit="always",
    ),
    "fiddler": CacheSettings(policy="static", allocation="model", prefetch="none", miss="compute"),
    "static": CacheSettings(policy="static", allocation="layers", prefetch="none", miss="compute"),
    "oracle": CacheSettings(policy="belady", prefetch="perfect", miss="both", choose=True),
}


def settings_of(system: str) -> CacheSettings:
    """Settings of a named system.

    Raises:
        UsageError: The system is unknown.
    """
    if system not in SYSTEMS:
        raise UsageError(f"system {system!r} is not known", hint=f"choose one of: {', '.join(SYSTEMS)}")
    return SYSTEMS[system]


def parse_settings(text: str) -> CacheSettings:
    """Parse ``NAME`` or ``NAME:key=value,key=value``, for benchmarks and experiments.

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
    if changes:
        changes.setdefault("choose", False)  # settings that are given are not to be changed
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
        raise UsageError(f"{key} is {value!r}, which is not a valid value") from None
    return value
