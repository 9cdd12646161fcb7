"""Divides the pages of a near tier among the layers, by any of the methods."""

from __future__ import annotations

import numpy as np

from moechat.configurator.allocation import Allocation
from moechat.configurator.costs import Costs
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.dynamic import fewest_loads
from moechat.configurator.exposure import EngineModel, PaperModel
from moechat.configurator.hybrid import Search, minimise
from moechat.configurator.moepic import vram_allocation
from moechat.configurator.rounding import filled, rounded_down
from moechat.configurator.systems import CacheSettings
from moechat.configurator.targets import Evaluation, Targets, evaluate, pages_of
from moechat.configurator.uniform import first_layers, most_popular, same_for_all
from moechat.routing.statistics import RoutingStatistics


def allocate(
    settings: CacheSettings,
    statistics: RoutingStatistics,
    costs: Costs,
    *,
    blocks: int,
    pages: int,
    top_k: int,
) -> Allocation:
    """Divide pages among the layers by the method in the settings.

    ``loaded`` and ``exposed`` are computed for this engine under these settings
    (:class:`moechat.configurator.exposure.EngineModel`), so that methods can be compared; ``moepic`` itself
    searches with the paper's times.

    Args:
        settings: ``allocation`` is the method; ``split``, if set, θ of every layer; ``prefetch``,
            ``prefetch_experts``, ``miss`` and ``whole_experts`` determine a layer's times.
        statistics: Routing statistics for the policy of the settings.
        costs: Costs of the machine and the model.
        blocks: B, blocks per expert.
        pages: Most pages of the targets: the slab without its reserve, times ``keep``.
        top_k: K, experts per token.

    Returns:
        Targets with at most ``pages`` pages. Methods for whole experts leave less than an expert unused; the
        others leave pages that fit no further step, or bring no gain.

    Raises:
        ValueError: ``blocks`` or ``top_k`` is below 1, or ``pages`` is negative.
    """
    if blocks < 1 or pages < 0:
        raise ValueError(f"{blocks} blocks, {pages} pages: at least 1 block and 0 pages are needed")
    curves = RoutingCurves.of(statistics, settings, top_k)
    model = EngineModel.of(settings, costs, curves.top_k, blocks)
    moves = 0
    if settings.allocation == "auto":
        targets, found, moves = _auto(settings, statistics, curves, model, blocks, pages)
    else:
        targets, moves = _targets(settings, statistics, curves, model, blocks, pages)
        found = evaluate(targets, curves, model, blocks)
    return Allocation(settings.allocation, targets, found.loaded, found.exposed, moves)


def _targets(
    settings: CacheSettings,
    statistics: RoutingStatistics,
    curves: RoutingCurves,
    model: EngineModel,
    blocks: int,
    pages: int,
) -> tuple[Targets, int]:
    """Targets of every method but ``auto``, and the number of moves."""
    layers, experts = statistics.layers, statistics.experts
    if settings.allocation == "moepic":
        return moepic_targets(curves, model.costs, blocks, pages, settings.split)
    split = settings.first_split
    if settings.allocation == "dp":
        return fewest_loads(curves, blocks, pages, split), 0
    if settings.allocation == "model":
        return most_popular(statistics.activations, blocks, pages, split), 0
    if settings.allocation == "layers":
        return first_layers(layers, experts, blocks, pages, split), 0
    return same_for_all(layers, experts, blocks, pages, split), 0


def moepic_targets(
    curves: RoutingCurves, costs: Costs, blocks: int, pages: int, split: float | None = None
) -> tuple[Targets, int]:
    """Algorithm 1 of MoEpic, with its volumes rounded down to pages and the rest filled up.

    Returns:
        Targets and moves.
    """
    paper = PaperModel(costs, curves.top_k)
    found = vram_allocation(curves, paper, pages / blocks, split=split)
    targets = rounded_down(found.volumes, found.experts, blocks, pages, split)
    windows = evaluate(targets, curves, paper, blocks).windows
    return filled(targets, curves, windows / costs.load, blocks, pages, split), found.moves


def _auto(
    settings: CacheSettings,
    statistics: RoutingStatistics,
    curves: RoutingCurves,
    model: EngineModel,
    blocks: int,
    pages: int,
) -> tuple[Targets, Evaluation, int]:
    """The method ``auto``: a search that starts from the results of the other methods."""
    split = settings.split
    layers, experts = curves.layers, curves.experts
    starts = [same_for_all(layers, experts, blocks, pages, 1.0 if split is None else split)]
    if split is None:
        starts += [same_for_all(layers, experts, blocks, pages, share) for share in (0.5, 0.25)]
    starts.append(fewest_loads(curves, blocks, pages, 1.0 if split is None else split))
    starts.append(moepic_targets(curves, model.costs, blocks, pages, split)[0])
    search = Search(curves, model, blocks, pages, split)
    targets, found, moves = minimise(search, starts)
    more = filled(targets, curves, found.windows / model.costs.load, blocks, pages, split, 0.0)
    if pages_of(more) > pages_of(targets):
        better = search.evaluate(more)
        if better.score <= found.score or np.isclose(better.total, found.total, rtol=1e-9, atol=0.0):
            targets, found = more, better
    return targets, found, moves
