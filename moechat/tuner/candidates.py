"""The plans that are timed against the computed one.

All of them use the same native runner: pages, policy and link stay, so that they can take turns on one near
tier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moechat.configurator.systems import CacheSettings
from moechat.simulate.strategy import SELDOM, SELDOM_TITLE, uploading_seldom

DEFAULT = "computed"
PLAIN = "plain"
MAPPED = "mapped"


@dataclass(frozen=True)
class Candidate:
    """One plan.

    Attributes:
        name: Short and stable; choices are remembered by it.
        title: For people.
        settings: Settings of the near tier; ``None``: the store is mapped, and the page cache decides which
            experts stay in memory.
    """

    name: str
    title: str
    settings: CacheSettings | None


def candidates(
    settings: CacheSettings, top_k: int, *, may_map: bool, far_computes: bool = False
) -> list[Candidate]:
    """The computed plan, the plain one, and others that run in another way, most promising first.

    Args:
        settings: Of the near tier as it was loaded.
        top_k: Experts a token.
        may_map: No budget was given, so the store may be mapped, and the mapped store is the plain plan. Else
            the plain plan is a reactive cache: it fetches whole experts when they are needed.
        far_computes: Missing experts can be computed where they lie.

    Returns:
        The first is :data:`DEFAULT`, the second :data:`MAPPED` or :data:`PLAIN`.
    """
    found = [Candidate(DEFAULT, "the computed plan", settings)]
    if may_map:
        found.append(Candidate(MAPPED, "the store mapped, kept by the page cache", None))

    def add(name: str, title: str, start: CacheSettings = settings, **changes: Any) -> None:
        found.append(Candidate(name, title, replace(start, **changes)))

    quiet, whole = settings.fetching_nothing_ahead(), settings.keeping_whole_experts()
    add(PLAIN, "whole experts, nothing fetched ahead", whole.fetching_nothing_ahead())
    add("nothing-ahead", "the computed plan, nothing fetched ahead", quiet)
    if settings.prefetch in ("none", "prompts"):
        add("ahead", "the computed plan, fetched one layer ahead", prefetch="next-router")
    if far_computes:
        add("cpu", "the CPU computes what is missing", quiet, miss="compute")
        add("cpu-alone", "the CPU computes all that is missing, nothing is uploaded", quiet, miss="cpu")
        add(SELDOM, SELDOM_TITLE, uploading_seldom(settings))
        add("link", "everything is fetched", miss="fetch")
        add("both", "link and CPU share what is missing", miss="both")
    if settings.predicts:
        usual = settings.ranked_experts(top_k)
        other = 2 if settings.lookahead == 1 else 1
        layers = {1: "one layer", 2: "two layers"}[other]
        add(f"ahead-{other}", f"the computed plan, fetched {layers} ahead", lookahead=other)
        if usual > 1:
            add(
                "half-ahead", "the computed plan, half as much fetched ahead", prefetch_experts=-(-usual // 2)
            )
    add("uniform", "whole experts, as many in each layer", whole)
    add("dp", "whole experts, most hits (dynamic programming)", allocation="dp", split=1.0)
    add("halves", "half of twice as many experts", allocation="uniform", split=0.5)
    return found
