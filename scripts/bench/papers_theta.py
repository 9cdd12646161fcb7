"""Does it pay to cache parts of more experts? MoEpic's split θ, swept with prefetching at every θ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from made_routing import MadeRouting
from papers_player import Setting, table

from moechat.configurator.costs import Costs
from moechat.configurator.estimate import Near, costs_of
from moechat.hardware.profile import HardwareProfile
from moechat.routing.trace import Trace
from moechat.simulate.run import SimulatedRun
from moechat.simulate.simulated_model import SimulatedModel, model_for
from moechat.simulate.timing import Launch

# Splits that are tried. With 1 whole experts are kept; prefetching stays on.
SPLITS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FEW_SPLITS = (0.25, 0.5, 0.75, 0.9, 1.0)
# MoEpic: Qwen1.5-MoE takes 57 ms on an A6000 that holds it all, and 165 ms to load the experts of a token
# (sections 2.2 and 4.3). How a layer's 57 / 24 ms divide is not said.
QWEN_TOKEN, QWEN_LOAD, QWEN_HEAD_SHARE = 57e-3, 165e-3, 0.05
QWEN_MOE_SHARES = (0.3, 0.6, 0.8)
# Popularity and repetition that come nearest to table 1 of MoEpic (`papers moepic-hits`).
QWEN_ROUTING = MadeRouting(24, 60, 4, 0.35, 0.1)
MIXTRAL_ROUTING = MadeRouting(32, 8, 2, 0.1, 0.3)
TOKENS, TIMED = 650, 150
# Loads of the missing experts of a layer by the time in which they can be hidden.
LOADS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0)


def split_system(split: float, system: str = "moepic") -> str:
    """A system with one split and the same pages in each layer."""
    return f"{system}:allocation=uniform,split={split:g}"


CACHE_ONLY = "moepic:allocation=uniform,split=1,prefetch=none"
PREFETCH_ONLY = "moepic:allocation=uniform,split=1,keep=0"


def qwen_costs(moe_share: float) -> Costs:
    """MoEpic's own times of Qwen1.5-MoE in 16 bits on an A6000."""
    layer = (1 - QWEN_HEAD_SHARE) * QWEN_TOKEN / 24
    return Costs(
        attention=(1 - moe_share) * layer,
        moe=moe_share * layer,
        head=QWEN_HEAD_SHARE * QWEN_TOKEN,
        load=QWEN_LOAD / 96,
    )


def qwen(moe_share: float = 0.6, tokens: int = TOKENS, seed: int = 0) -> Setting:
    """MoEpic's Qwen1.5-MoE: 12 experts a layer are figure 4(b), a share of 0.2."""
    trace = QWEN_ROUTING.trace(tokens, seed=seed)
    model = model_for("qwen1.5-moe-a2.7b", trace, 16)
    return Setting(model, trace, qwen_costs(moe_share), accuracy=0.68, timed=200, seed=seed)


def figure_4b(quick: bool, seed: int) -> None:
    """The sweep of MoEpic's figure 4(b), over what the paper leaves open."""
    rows = []
    cases: list[tuple[float, Launch, bool]] = [
        (0.6, "card", True),
        (0.6, "card", False),
        (0.6, "host", True),
        (0.3, "card", True),
        (0.8, "host", False),
    ]
    splits = FEW_SPLITS if quick else SPLITS
    for moe_share, launch, ordered in cases[: 2 if quick else None]:
        setting = replace(qwen(moe_share, seed=seed), launch=launch, ordered=ordered, _shared={})
        times = [1000 * setting.run(split_system(split), 0.2).tpot for split in splits]
        more = [1000 * setting.run(name, 0.2).tpot for name in ("moepic", CACHE_ONLY, PREFETCH_ONLY)]
        rows.append(
            [
                f"experts {moe_share:g} of a layer, "
                f"{'as they arrive' if launch == 'host' else 'after all copies'}, "
                f"{'calibrated' if ordered else 'random order'}",
                *(f"{time:.1f}" for time in (*times, *more)),
            ]
        )
    table(
        "MoEpic, figure 4(b): ms a token by split, Qwen1.5-MoE, 16 bits, 12 of 60 experts a layer, the "
        "paper's times",
        [
            "computing, predictions",
            *(f"{split:g}" for split in splits),
            "moepic",
            "cache only",
            "prefetch only",
        ],
        rows,
        "Paper: best at 0.4, 38 to 49 % below `cache only` (called θ = 1) and `prefetch only` (θ = 0). "
        "It has no θ = 1 with prefetching, which is the column 1 here.",
    )


@dataclass(frozen=True)
class Cell:
    """Times of one machine, model and share.

    Attributes:
        whole: θ = 1.
        splits: Other θ, by it.
        own: What the system plans itself: θ and pages of each layer.
    """

    whole: SimulatedRun
    splits: dict[float, SimulatedRun]
    own: SimulatedRun

    @property
    def best(self) -> float:
        """The fastest θ below 1."""
        return min(self.splits, key=lambda split: self.splits[split].tpot)

    @property
    def gain(self) -> float:
        """Share of a token that the fastest θ below 1 saves."""
        return 1 - self.splits[self.best].tpot / self.whole.tpot


def cell_of(setting: Setting, system: str, share: float, splits: Sequence[float]) -> Cell:
    """Simulate every split below 1, whole experts, and the system's own plan."""
    own = "moepic" if system == "moepic" else f"{system}:split=auto"
    return Cell(
        setting.run(split_system(1.0, system), share),
        {split: setting.run(split_system(split, system), share) for split in splits if split < 1},
        setting.run(own, share),
    )


def machines(
    profiles: Sequence[HardwareProfile],
    models: Sequence[tuple[SimulatedModel, Trace]],
    shares: Sequence[float],
    system: str,
    *,
    ordered: bool,
    seed: int = 0,
) -> None:
    """Print the times of every machine and model.

    Args:
        profiles: Machines.
        models: Models with routing of their shape.
        shares: Shares of the experts in the near tier.
        system: ``moepic`` fetches what is missing; ``auto`` divides it between link and CPU.
        ordered: As :class:`papers_player.Setting`.
        seed: Of the predictions.
    """
    rows, gains = [], []
    for profile in profiles:
        near: Near = "gpu" if profile.gpu is not None else "ram"
        for model, trace in models:
            placed = model.on(near)
            setting = Setting(
                placed,
                trace,
                costs_of(profile, placed.shape, near=near),
                timed=TIMED,
                launch="card" if near == "gpu" else "host",
                ordered=ordered,
                seed=seed,
            )
            row = [f"{profile.name}, {model.name}"]
            for share in shares:
                cell = cell_of(setting, system, share, FEW_SPLITS)
                gains.append(cell.gain)
                row += [
                    f"{1000 * cell.whole.tpot:.1f}",
                    f"{cell.best:g}",
                    f"{-100 * cell.gain:+.1f}",
                    f"{100 * (cell.own.tpot / cell.whole.tpot - 1):+.1f}",
                ]
            rows.append(row)
    columns = ["machine, model"]
    for share in shares:
        columns += [f"{share:g}: θ=1 ms", "best θ<1", "%", "own %"]
    table(
        f"{system} on machines, {'calibrated predictions' if ordered else 'predictions in random order'}",
        columns,
        rows,
        f"A θ below 1 is faster in {sum(gain > 0 for gain in gains)} of {len(gains)} cells, by "
        f"{100 * max(gains):.1f} % at most; where it is slower, by {-100 * min(gains):.1f} % at most. "
        f"Median of all: {-100 * float(np.median(gains)):+.1f} %.",
    )


def windows(name: str, base: Setting, share: float, quick: bool) -> None:
    """Print a sweep of the load of a layer, from far below to far above the time that can hide it."""
    # Experts of a token and layer that are not in the cache, with nothing fetched ahead.
    missing = base.model.shape.top_k * (1 - base.run(CACHE_ONLY, share).hits["full"])
    window = base.costs.attention + base.costs.moe
    rows = []
    for factor in LOADS[1::3] if quick else LOADS:
        load = factor * window / missing
        setting = replace(
            base, costs=replace(base.costs, load=load, load_together=None), _shared=base._shared
        )
        cell = cell_of(setting, "moepic", share, FEW_SPLITS)
        by_stall = min(cell.splits, key=lambda split: cell.splits[split].stall.mean())
        least, whole = cell.splits[by_stall], cell.whole
        before, after = 1000 * whole.stall.mean(), 1000 * least.stall.mean()
        rows.append(
            [
                f"{factor:g}",
                f"{1000 * whole.tpot:.2f}",
                f"{before:.2f}",
                f"{by_stall:g}",
                f"{after:.2f}",
                f"{100 * (after / max(before, 1e-9) - 1):+.0f}",
                f"{-100 * cell.gain:+.2f}",
            ]
        )
    table(
        f"{name}, {share:g} of the experts: loads of a layer's missing experts by the time that can hide "
        "them",
        [
            "load / window",
            "θ=1 ms",
            "stall ms",
            "θ of least stall",
            "its stall ms",
            "%",
            "token at the best θ<1, %",
        ],
        rows,
        "The window is a layer's attention and experts.",
    )


def report(
    profiles: Sequence[HardwareProfile],
    models: Sequence[tuple[SimulatedModel, Trace]],
    *,
    quick: bool,
    seed: int,
) -> None:
    """Print all of it."""
    figure_4b(quick, seed)
    windows("Qwen1.5-MoE, made routing, the paper's times", qwen(seed=seed), 0.2, quick)
    fast = profiles[-1]
    for model, trace in models[: 1 if quick else 2]:
        placed = model.on("gpu")
        base = Setting(placed, trace, costs_of(fast, placed.shape, near="gpu"), timed=TIMED, seed=seed)
        windows(f"{model.name}, {fast.name} with other links", base, 0.25, quick)
    shares = (0.25,) if quick else (0.125, 0.25, 0.5)
    machines(profiles, models, shares, "moepic", ordered=True, seed=seed)
    if not quick:
        machines(profiles, models, shares, "moepic", ordered=False, seed=seed)
        machines(profiles, models, shares, "auto", ordered=True, seed=seed)
