"""Native steps of a model's layers beside the parts that they replace."""

from __future__ import annotations

from typing import Any

import torch

from moechat.models.cache_states import tensors_of

TOKENS = [5, 17, 3, 80, 44, 9, 21, 70]
PROMPT = 4


def layers_of(engine: Any) -> list[Any]:
    return list(engine.loaded.model.model.layers)


def decode(engine: Any) -> list[torch.Tensor]:
    """Logits behind a prompt and some tokens, and what the attention cache holds then."""
    cache, rows = engine.decoder.new_cache(), []
    for part in [TOKENS[:PROMPT], *([token] for token in TOKENS[PROMPT:])]:
        out = engine.passes.run(torch.tensor([part]), cache)
        rows.append(out.logits[0, -1].clone())
    return [*rows, *(tensor.clone() for layer in cache.layers for tensor in tensors_of(layer))]


def assert_steps_equal_their_parts(engine: Any, kinds: list[type]) -> None:
    """Whole passes, native steps of these kinds and the parts alone have the same bits. Removes the steps."""
    assert engine.loaded.native_modules.whole
    assert [type(vars(layer)["forward"].kept.run) for layer in layers_of(engine)] == kinds
    joined = decode(engine)
    del vars(engine.loaded.model)["forward"]
    assert all(map(torch.equal, joined, decode(engine))), "layer by layer"
    for layer in layers_of(engine):
        del vars(layer)["forward"]
    assert all(map(torch.equal, joined, decode(engine))), "part by part"
