"""Measures the memory of passes of models, in its own process: CONTEXT [[FAMILY, TYPE, KV_BITS, SIZES], ...].

Prints a list for each: [tokens in the pass, tokens in the cache, measured bytes, estimated bytes], ...
The last entry is a wave that fills the context.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import moechat  # noqa: F401 - first, for what it has to say before torch is loaded
from moechat.models.cache_argument import CACHE

# isort: split
import torch
from transformers import AutoConfig

from moechat.hardware.memory import give_back_unused, peak_resident_bytes, resident_bytes
from moechat.models.attention_cache import cache_shape, new_cache
from moechat.models.live_bytes import part_of_prompt
from moechat.models.skeleton import Skeleton, build_skeleton
from moechat.models.waves import Waves
from moechat.offload.experts import IMPLEMENTATION, attach, register
from moechat.sizes.cache_shape import CacheShape
from moechat.sizes.footprint import PassSizes, counted_bytes, prefill_chunk, wave_bytes, workspace_bytes

Figures = tuple[int, int, int, int]


class Experts:
    """Allocates like an expert layer, without its experts."""

    def forward(self, hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        x = hidden.to(torch.float32).contiguous()
        return torch.zeros_like(x).to(hidden.dtype)


def measure(family: str, dtype: torch.dtype, bits: int, sizes: dict[str, Any], context: int) -> list[Figures]:
    config = AutoConfig.for_model(
        family,
        vocab_size=1000,
        num_hidden_layers=2,
        max_position_embeddings=8192,
        eos_token_id=None,
        pad_token_id=0,
        **sizes,
    )
    skeleton = build_skeleton(config, dtype, IMPLEMENTATION)
    model = skeleton.model
    for entry in skeleton.experts:
        attach(entry.module, Experts())  # type: ignore[arg-type]
    shape = cache_shape(model, model.config, dtype, bits=bits)
    of_pass = PassSizes.of(model.config)
    chunk, live = prefill_chunk(of_pass), 0
    if shape.has_states:
        chunk, live = part_of_prompt(skeleton, chunk, in_parts=True)
        assert shape.unlimited

    def estimate(tokens: int, held: int) -> int:
        counted = counted_bytes(of_pass, live * tokens // chunk) if live else 0
        return max(workspace_bytes(of_pass, dtype.itemsize, tokens, held), counted)

    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(0.01)
    figures: list[Figures] = []
    with torch.inference_mode():
        cache = new_cache(shape, model.config, context)
        ids = torch.ones((1, 64), dtype=torch.int64)
        model(input_ids=ids, use_cache=True, **{CACHE: cache}, logits_to_keep=1)
        give_back_unused()
        before, held = resident_bytes() - shape.nbytes(64), 64
        while held < context:
            tokens = min(chunk, context - held)
            ids = torch.ones((1, tokens), dtype=torch.int64)
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
            model(input_ids=ids, use_cache=True, **{CACHE: cache}, logits_to_keep=1)
            held += tokens
            measured = peak_resident_bytes() - before - shape.nbytes(held)
            figures.append((tokens, held, measured, estimate(tokens, held)))
        figures.append(measure_wave(skeleton, shape, dtype, context, chunk, estimate(chunk, context)))
    return figures


def measure_wave(
    skeleton: Skeleton, shape: CacheShape, dtype: torch.dtype, context: int, chunk: int, of_pass: int
) -> Figures:
    model, config = skeleton.model, skeleton.model.config
    waves = Waves(model, skeleton.layers_name, [entry.module for entry in skeleton.experts])
    assert waves.usable(lambda tokens: new_cache(shape, config, tokens), torch.device("cpu"))
    cache = new_cache(shape, config, context)
    give_back_unused()
    before = resident_bytes()
    chunks = list(torch.split(torch.ones((1, context), dtype=torch.int64), chunk, dim=1))  # type: ignore[no-untyped-call]
    Path("/proc/self/clear_refs").write_text("5")
    waves.run(chunks, cache, logits_to_keep=1)
    measured = peak_resident_bytes() - before - shape.nbytes(context)
    wave = wave_bytes(PassSizes.of(config), dtype.itemsize, context, context, top_k=2, on_gpu=False)
    return context, context, measured, of_pass + wave


def main() -> None:
    context, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    register()
    torch.set_num_threads(2)
    print(
        json.dumps(
            [measure(name, getattr(torch, kind), bits, sizes, context) for name, kind, bits, sizes in cases]
        )
    )


if __name__ == "__main__":
    main()
