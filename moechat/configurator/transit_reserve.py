"""The reserve of pages for blocks in transit, and the uniform division of the others."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moechat.configurator.systems import COMPUTED_FAR, CacheSettings
from moechat.configurator.uniform import same_for_all
from moechat.geometry import ExpertGeometry

_STREAM_SHARE = 0.5  # of a layer's experts
# Reserved of the most pages that blocks in transit can use. They rarely use all, and what is not reserved
# keeps experts. Simulated on six machines with 1/16 to 1/2 of the experts in memory, half takes up to 2 %
# less time than all for recorded routing (1 % more at worst), and up to 10 % less for made routing. With an
# eighth, recorded routing takes up to 20 % more from an SSD.
_RESERVED_SHARE = 0.5


def in_transit(geometry: ExpertGeometry, top_k: int, settings: CacheSettings) -> int:
    """Most pages that blocks in transit can use: one token's experts and the prefetched ones."""
    ahead = 0
    if settings.prefetch == "whole-layer":
        ahead = geometry.num_experts
    elif settings.queues or settings.prefetch == "adaptive":
        ahead = min(settings.ranked_experts(top_k), geometry.num_experts)
    elif settings.ranks:
        ahead = min(settings.ranked_experts(top_k), geometry.num_experts) * settings.lookahead
    return (min(top_k, geometry.num_experts) + ahead) * geometry.blocks_per_expert


def stream_tokens(top_k: int, experts: int) -> int:
    """Tokens from which a pass is expected to need half of a layer; the next layer is then streamed whole."""
    share = min(top_k, experts) / experts
    return max(2, math.ceil(math.log(1 - _STREAM_SHARE) / math.log1p(-share))) if share < 1 else 2


def uniform_targets(
    geometry: ExpertGeometry,
    layers: int,
    pages: int,
    top_k: int,
    settings: CacheSettings,
    *,
    far_computes: bool,
) -> tuple[npt.NDArray[np.int32], int]:
    """Reserve pages for blocks in transit and divide the rest equally among the layers.

    Args:
        geometry: Geometry of the experts.
        layers: Number of expert layers.
        pages: Pages of the slab.
        top_k: Experts per token.
        settings: Gives ``split``, ``keep``, ``miss`` and the prefetch.
        far_computes: Missing experts can be computed where they lie.

    Returns:
        int32 ``[layers, 2]``: experts kept and blocks kept of each; and the reserve in pages.
    """
    if far_computes and settings.miss in COMPUTED_FAR and settings.prefetch == "none":
        reserve = 1  # nothing is ever in transit
    else:
        reserve = max(1, min(int(_RESERVED_SHARE * in_transit(geometry, top_k, settings)), pages // 2))
        everything = layers * geometry.num_experts * geometry.blocks_per_expert
        if pages > everything:
            reserve = min(reserve, pages - everything)
    kept = 0 if settings.allocation == "shared" else int((pages - reserve) * settings.keep)
    targets = same_for_all(
        layers, geometry.num_experts, geometry.blocks_per_expert, kept, settings.first_split
    )
    return targets, reserve
