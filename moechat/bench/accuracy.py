"""Measures how well a predictor matches the choices of the model's routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat.bench.decode import Bench
from moechat.predict import Predictor


def prediction_accuracy(
    bench: Bench, predictor: Predictor, prompt: Sequence[int], tokens: Sequence[int], *, ahead: int = 1
) -> dict[str, Any]:
    """Decode given tokens and compare each layer's choice with the prediction made ``ahead`` layers before.

    The model's own routers must choose, because the predictor does not predict a replayed trace.

    Args:
        bench: The model.
        predictor: Predictor to measure.
        prompt: Tokens of the prompt; not counted.
        tokens: Tokens to decode one at a time.
        ahead: Layers ahead.

    Returns:
        ``top_k``, ``tokens``, and the mean number of the k chosen experts that were in the predicted top k:
        by layer as ``right_of_top_k`` (``None`` without predictions), and over all layers as ``mean``.
    """
    layers, k = bench.layers, bench.top_k
    predicted: dict[tuple[int, int], npt.NDArray[np.intp]] = {}
    right = np.zeros(layers)
    counted = np.zeros(layers, dtype=np.int64)
    token = -1

    def seen(ordinal: int, hidden: torch.Tensor, index: torch.Tensor) -> None:
        nonlocal token
        if ordinal == 0:
            token += 1
        best = predicted.pop((token, ordinal), None)
        if best is not None and len(hidden) == 1:
            right[ordinal] += len(np.intersect1d(best, index[0].numpy()))
            counted[ordinal] += 1
        scores = predictor.scores(ordinal, ahead, hidden[-1:])
        if scores is not None:
            turns, layer = divmod(ordinal + ahead, layers)
            predicted[token + turns, layer] = np.argsort(-scores, kind="stable")[:k]

    end = bench.watch(seen)
    try:
        _, decoding = bench.start(prompt)
        for value in tokens:
            decoding.feed([value])
    finally:
        end()
    by_layer = [float(right[i] / counted[i]) if counted[i] else None for i in range(layers)]
    known = [value for value in by_layer if value is not None]
    return {
        "ahead": ahead,
        "top_k": k,
        "tokens": len(tokens),
        "right_of_top_k": by_layer,
        "mean": float(np.mean(known)) if known else None,
        "chance": k * k / bench.store.geometry.num_experts,
    }
