"""The plans that are timed against the computed one.

All of them use the same native runner: pages, policy and link stay, so that they can take turns on one near
tier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moechat.configurator.systems import CacheSettings

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


def candidates(settings: CacheSettings, top_k: int, *, may_map: bool) -> list[Candidate]:
    """The computed plan, the plain one, and variations, most promising first.

    Args:
        settings: Of the near tier as it was loaded.
        top_k: Experts a token.
        may_map: No budget was given, so the store may be mapped, and the mapped store is the plain plan. Else
            the plain plan fetches whole experts when they are needed.

    Returns:
        The first is :data:`DEFAULT`, the second :data:`MAPPED` or :data:`PLAIN`.
    """
    found = [Candidate(DEFAULT, "the computed plan", settings)]
    nothing_ahead = replace(settings, allocation="uniform", split=1.0, prefetch="none")
    plain = Candidate(PLAIN, "whole experts, nothing fetched ahead", nothing_ahead)
    if may_map:
        found.append(Candidate(MAPPED, "the store mapped, kept by the page cache", None))
    found.append(plain)
    found.append(
        Candidate(
            "uniform",
            "whole experts, as many in each layer",
            replace(nothing_ahead, prefetch=settings.prefetch),
        )
    )
    if settings.predicts:
        found.append(
            Candidate(
                "nothing-ahead",
                "the computed plan, nothing fetched ahead",
                replace(settings, prefetch="none"),
            )
        )
        usual = settings.ranked_experts(top_k)
        if usual > 1:
            half = replace(settings, prefetch_experts=-(-usual // 2))
            found.append(Candidate("half-ahead", "the computed plan, half as much fetched ahead", half))
        if settings.lookahead == 1:
            found.append(
                Candidate(
                    "two-ahead", "the computed plan, fetched two layers ahead", replace(settings, lookahead=2)
                )
            )
    found.append(
        Candidate(
            "dp",
            "whole experts, most hits (dynamic programming)",
            replace(settings, allocation="dp", split=1.0),
        )
    )
    found.append(
        Candidate(
            "halves", "half of twice as many experts", replace(settings, allocation="uniform", split=0.5)
        )
    )
    return found
