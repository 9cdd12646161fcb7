"""Pages that blocks on their way need, and the same share of the others for every layer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moechat.configurator.systems import CacheSettings
from moechat.configurator.uniform import same_for_all
from moechat.geometry import ExpertGeometry


def in_transit(geometry: ExpertGeometry, top_k: int, settings: CacheSettings) -> int:
    """Pages that blocks on their way can use: one token's experts, and those fetched ahead."""
    ahead = 0
    if settings.prefetch == "whole-layer":
        ahead = geometry.num_experts
    elif settings.prefetch in ("next-router", "perfect"):
        per_layer = top_k if settings.prefetch_experts is None else settings.prefetch_experts
        ahead = min(per_layer, geometry.num_experts) * settings.lookahead
    return (min(top_k, geometry.num_experts) + ahead) * geometry.blocks_per_expert


def uniform_targets(
    geometry: ExpertGeometry, layers: int, pages: int, top_k: int, settings: CacheSettings
) -> tuple[npt.NDArray[np.int32], int]:
    """A reserve for blocks on their way, and of the rest the same for every layer.

    Args:
        geometry: Of the experts.
        layers: Expert layers.
        pages: Of the slab.
        top_k: Experts a token.
        settings: For ``split`` and ``keep``.

    Returns:
        int32 ``[layers, 2]``: experts kept and blocks kept of each; and the pages left for blocks on their
        way.
    """
    everything = layers * geometry.num_experts * geometry.blocks_per_expert
    reserve = max(1, min(in_transit(geometry, top_k, settings), pages // 2))
    if pages >= everything + 1:
        reserve = min(reserve, pages - everything)
    kept = int((pages - reserve) * settings.keep)
    targets = same_for_all(
        layers, geometry.num_experts, geometry.blocks_per_expert, kept, settings.first_split
    )
    return targets, reserve
