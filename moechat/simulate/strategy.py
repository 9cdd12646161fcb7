"""The strategies that ``auto`` chooses from: settings that one native runner can switch between.

Prefetching, targets and the division of missing blocks each pay on some machines and cost on others;
:mod:`moechat.simulate.choice` finds the fastest for a machine, a model and a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moechat.configurator.systems import CacheSettings
from moechat.simulate.run import Watched
from moechat.trials import Watch

# Most layers ahead that a candidate predicts, unless the settings look further.
LOOKAHEAD = 2
# Name of the strategy for a near tier that is too small for a cache.
CPU_ALONE = "cpu-alone"
# Name of the strategy that hardly uploads for decoded tokens.
SELDOM = "seldom"
SELDOM_TITLE = "experts stay and are seldom replaced, the CPU computes what is missing"
# Name of the strategy that keeps the most used experts.
STAY = "stay"
STAY_TITLE = "the most used experts stay, the CPU computes what is missing"
# Name of the strategy that keeps parts of experts as the paper plans them; it is none where they are whole.
PARTS = "parts"
# Names of the strategies that only lack what others fetch ahead.
_NOTHING_AHEAD = ("nothing-ahead", "whole-nothing-ahead", "cpu-nothing-ahead")
# Share by which SELDOM and STAY must be faster. Simulations know the routing of one kind of text. Where
# another follows, as in recorded routing of several tasks, they take up to 5 % longer than the fastest of the
# others.
SELDOM_GAIN = 0.01
# The share for those that fetch nothing ahead. Where the simulated text asks for few missing experts, what is
# fetched ahead seems to earn nothing; another text asked for more, and then they took up to 2.4 % longer.
NOTHING_AHEAD_GAIN = 0.005
# A plan that keeps parts of experts must be faster by this share. Its cache settles over more tokens than a
# choice simulates: it takes up to 3 % longer than the choice expects.
PARTS_GAIN = 0.005


@dataclass(frozen=True)
class Strategy:
    """One way to run a near tier.

    Attributes:
        name: Short and stable.
        title: For people.
        settings: Settings of the near tier.
    """

    name: str
    title: str
    settings: CacheSettings


@dataclass(frozen=True)
class Chosen:
    """The fastest strategy.

    Attributes:
        strategy: It.
        seconds: Simulated seconds of a token, by name of the strategy. Strategies that were clearly slower
            ran fewer tokens, and theirs are scaled: see :func:`moechat.simulate.race.race`.
    """

    strategy: Strategy
    seconds: dict[str, float]

    @property
    def seconds_of_choice(self) -> float:
        """Simulated seconds of a token with the strategy."""
        return self.seconds[self.strategy.name]


def strategies(settings: CacheSettings, *, far_computes: bool) -> list[Strategy]:
    """The candidates, most promising first; the first has the settings as they are.

    Args:
        settings: Settings with ``choose``.
        far_computes: Missing experts can be computed where they lie.
    """
    fixed = replace(settings, choose=False)
    if settings.needs_future:
        return _with_the_future(fixed, far_computes=far_computes)
    whole = fixed.keeping_whole_experts()
    nothing_ahead, whole_nothing_ahead, cpu_nothing_ahead = _NOTHING_AHEAD
    found = [
        Strategy("computed", "the computed plan", fixed),
        Strategy("whole", "whole experts, as many in each layer", whole),
        Strategy("dp", "whole experts, most hits", replace(whole, allocation="dp")),
    ]
    if fixed.ranks and fixed.lookahead < LOOKAHEAD:
        found.append(Strategy("two-ahead", "fetched two layers ahead", replace(fixed, lookahead=LOOKAHEAD)))
    if fixed.ranks:
        found += [
            Strategy(nothing_ahead, "nothing fetched ahead", fixed.fetching_nothing_ahead()),
            Strategy(
                whole_nothing_ahead,
                "whole experts, nothing fetched ahead",
                whole.fetching_nothing_ahead(),
            ),
        ]
    if not far_computes:
        # Where a link moves all that is missing, parts of more experts keep it busier.
        parts = replace(fixed, allocation="moepic", split=None)
        found.append(Strategy(PARTS, "parts of experts, a share in each layer", parts))
    if far_computes and fixed.miss == "both":
        found += [
            Strategy("cpu", "the CPU computes what is missing", replace(fixed, miss="compute")),
            Strategy(
                cpu_nothing_ahead,
                "the CPU computes what is missing, nothing fetched ahead",
                replace(fixed, miss="compute").fetching_nothing_ahead(),
            ),
            Strategy(SELDOM, SELDOM_TITLE, uploading_seldom(fixed)),
            Strategy(STAY, STAY_TITLE, staying(fixed)),
            Strategy("link", "everything is fetched", replace(fixed, miss="fetch")),
            Strategy("whole-link", "whole experts, everything is fetched", replace(whole, miss="fetch")),
            Strategy(CPU_ALONE, "the CPU computes every expert where it lies", cpu_alone(fixed)),
        ]
    return found


def uploading_seldom(settings: CacheSettings) -> CacheSettings:
    """These settings with whole experts that stay, and hardly any uploads for decoded tokens."""
    return replace(settings.keeping_whole_experts(), miss="seldom").fetching_nothing_ahead()


def staying(settings: CacheSettings) -> CacheSettings:
    """These settings with the most used experts of the whole model, which answers hardly ever replace."""
    return replace(settings, allocation="model", split=1.0, miss="stay").fetching_nothing_ahead()


def cpu_alone(settings: CacheSettings) -> CacheSettings:
    """These settings without a cache: nothing is kept, fetched ahead or moved for a decoded token."""
    alone = replace(settings.keeping_whole_experts(), miss="cpu", keep=0.0)
    return alone.fetching_nothing_ahead()


def too_small_for_a_cache(chosen: Chosen, pages: int, block_bytes: int) -> str | None:
    """Why a choice keeps no experts, with the figures; ``None`` if it does keep some."""
    if chosen.strategy.name != CPU_ALONE:
        return None
    cached = 1000 * min(seconds for name, seconds in chosen.seconds.items() if name != CPU_ALONE)
    return (
        f"{pages * block_bytes / 2**20:,.0f} MiB are too little for a cache of experts: a token would take "
        f"{cached:,.1f} ms with one and takes {1000 * chosen.seconds_of_choice:,.1f} ms where the CPU "
        "computes every expert in RAM; the memory serves prompts"
    )


def loadings(settings: CacheSettings, *, far_computes: bool) -> list[Strategy]:
    """The candidates with the targets of the first; between these an engine can change at every token."""
    found = strategies(settings, far_computes=far_computes)
    first = found[0].settings
    return [each for each in found if replace(each.settings, **_loading(first)) == first]


def loads_as(settings: CacheSettings, loading: CacheSettings) -> CacheSettings:
    """Settings that load missing experts as ``loading`` does, and are else as ``settings``."""
    return replace(settings, **_loading(loading))


def watched(
    settings: CacheSettings,
    chosen: Chosen | None,
    at_work: CacheSettings,
    *,
    far_computes: bool,
    may_take_turns: Callable[[CacheSettings, CacheSettings], bool] = lambda one, other: True,
) -> Watched | None:
    """A watch over the loadings of settings that leave a choice; ``None``: there is nothing to watch.

    Args:
        settings: Settings with ``choose``.
        chosen: What was chosen for them: expected times; ``None``: all are taken to be equal.
        at_work: The settings at work.
        far_computes: Missing experts can be computed where they lie.
        may_take_turns: Whether an engine that was planned for the first settings can change to the second
            ones, and back, at any token.
    """
    if not settings.choose or settings.needs_future:
        return None
    ways: dict[str, CacheSettings] = {}
    expected: dict[str, float] = {}
    name = None
    for each in loadings(settings, far_computes=far_computes):
        way = loads_as(at_work, each.settings)
        if way == at_work:
            name = each.name
        elif not may_take_turns(at_work, way):
            continue
        ways[each.name] = way
        if chosen is not None:
            alike = [
                chosen.seconds[other.name]
                for other in strategies(settings, far_computes=far_computes)
                if _loading(other.settings) == _loading(each.settings) and other.name in chosen.seconds
            ]
            expected |= {each.name: min(alike)} if alike else {}
    if name is None and (name := _resting(at_work)) is not None:
        # It is no rival of the others: in the few tokens of a trial it would profit from what they have just
        # uploaded, at no cost of its own.
        ways[name] = at_work
        if chosen is not None and name in chosen.seconds:
            expected[name] = chosen.seconds[name]
    if name is None or len(ways) < 2:
        return None
    return Watched(Watch(list(ways), name, expected), ways)


def _resting(settings: CacheSettings) -> str | None:
    """The strategy that hardly uploads and has these settings; ``None``: neither has."""
    for name, way in ((SELDOM, uploading_seldom(settings)), (STAY, staying(settings))):
        if loads_as(settings, way) == settings:
            return name
    return None


def handicap(name: str, *, in_parts: bool) -> float:
    """Factor of the simulated times of a strategy where they are compared: see :data:`SELDOM_GAIN`,
    :data:`NOTHING_AHEAD_GAIN` and :data:`PARTS_GAIN`.

    Args:
        name: The strategy.
        in_parts: Its targets keep parts of experts.
    """
    factor = 1 / (1 - PARTS_GAIN) if in_parts else 1.0
    if name in (SELDOM, STAY):
        factor /= 1 - SELDOM_GAIN
    if name in _NOTHING_AHEAD:
        factor /= 1 - NOTHING_AHEAD_GAIN
    return factor


def fastest(found: list[Strategy], seconds: Mapping[str, float], in_parts: Collection[str] = ()) -> Strategy:
    """The fastest of those that have times, each with its :func:`handicap`.

    Args:
        found: Strategies.
        seconds: Of a token, by name.
        in_parts: Names of those whose targets keep parts of experts.
    """
    found = [each for each in found if each.name in seconds]
    return min(
        found, key=lambda each: handicap(each.name, in_parts=each.name in in_parts) * seconds[each.name]
    )


def _loading(settings: CacheSettings) -> dict[str, Any]:
    """The settings of how missing experts are loaded or computed."""
    return {
        name: getattr(settings, name)
        for name in ("prefetch", "lookahead", "prefetch_experts", "prefetch_bytes", "miss")
    }


def _with_the_future(fixed: CacheSettings, *, far_computes: bool) -> list[Strategy]:
    """Candidates of the oracle: whole experts or parts, fetched ahead or not, and the CPU alone."""
    parts = replace(fixed, allocation="auto", split=None)
    found = [
        Strategy("computed", "the computed plan", fixed),
        Strategy("parts", "parts of experts", parts),
        Strategy("nothing-kept", "all pages for what is fetched", replace(fixed, keep=0.0)),
        Strategy("nothing-ahead", "nothing fetched ahead", replace(fixed, prefetch="none")),
        Strategy("parts-nothing-ahead", "parts, nothing fetched ahead", replace(parts, prefetch="none")),
    ]
    if far_computes:
        found += [
            Strategy(
                f"{each.name}-cpu", "the CPU computes what is missing", replace(each.settings, miss="compute")
            )
            for each in found[-2:]
        ]
    return found
