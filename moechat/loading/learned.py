"""Predictors that learn from requests, as a model is loaded with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moechat.configurator.systems import CacheSettings
from moechat.models.router_search import ExpertLayer, find_routers
from moechat.offload.requests import Requests
from moechat.predict.learned_file import learned_path, load_learned
from moechat.predict.preload import PreloadPredictor
from moechat.routing.statistics_file import model_key
from moechat.simulate.request_queues import request_predictor
from moechat.store.store import Store


def requests_for(
    store: Store,
    model: nn.Module,
    experts_modules: Iterable[ExpertLayer],
    settings: CacheSettings,
    top_k: int,
    *,
    on_gpu: bool,
    warn: Callable[[str], None],
) -> Requests | None:
    """The predictors of a model, with what earlier runs have learned; ``None``: there is none.

    Settings whose counts begin anew with each request take the predictor by the prompt that a tuned
    checkpoint has (``moechat tune``).

    Args:
        store: The model.
        model: With its dense weights.
        experts_modules: Its expert layers, in order.
        settings: Settings of the near tier.
        top_k: Experts that a router chooses.
        on_gpu: The hidden states lie in a GPU's memory: of a router only the chosen experts' weights are
            known, and a token's embedding is not.
        warn: Called with a sentence if what was kept cannot be used.
    """
    layers, experts = len(store.layers), store.geometry.num_experts

    embedding: Any = cast(Any, model).get_input_embeddings()

    def embed(token: int) -> npt.NDArray[np.float32] | None:
        with torch.inference_mode():
            found = embedding(torch.tensor([token]))[0]
        values: npt.NDArray[np.float32] = found.float().numpy()
        return values

    predictor = request_predictor(
        settings, layers, experts, top_k, embed=(lambda _: None) if on_gpu else embed
    )
    if predictor is None:
        return _by_prompt(store, embedding, layers, experts) if settings.per_request else None
    key = model_key(store.manifest.source.fingerprint, layers=layers, experts=experts, top_k=top_k)
    load_learned(learned_path(settings.prefetch, key), predictor, warn)
    routers = find_routers(model, experts_modules) if predictor.needs_gates and not on_gpu else ()
    return Requests(layers, experts, predictor=predictor, routers=routers)


def _by_prompt(store: Store, embedding: Any, layers: int, experts: int) -> Requests | None:
    weight = getattr(embedding, "weight", None)
    device = weight.device if isinstance(weight, torch.Tensor) else torch.device("cpu")

    def embed(ids: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = embedding(ids.to(device)).float().cpu()
        return values

    found = PreloadPredictor.load(store.path, layers=layers, experts=experts, embed=embed)
    return None if found is None else Requests(layers, experts, prompts=found)
