"""Computes one token of each of several conversations in one pass through a whole model.

Answers that are decoded at the same time would each read all dense weights and their own experts. Here dense
weights are read once for all tokens, and each expert that any of them chose once. Each token has an attention
cache of its own, so only attention is computed for one after the other.

The results of a token are those of a pass of its own, bit by bit: native products, norms and routers do not
depend on other tokens of the call. A trial compares both ways when the first such pass is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.decode.layer_check import layer_kind, stub_experts
from moechat.models.decode.layers import NativeStep
from moechat.models.decode.probe import probing
from moechat.models.linear import PackedLinear, SplitLinear, StoredLinear
from moechat.models.skeleton import EXPERTS_RUNNER
from moechat.models.threads import thread_invariant_pass

# The result for all tokens of each other's products: those of other modules may depend on the other tokens.
_ROWS_ALONE = (StoredLinear, PackedLinear, SplitLinear)
# Tokens that each conversation of the trial has before the passes that are compared, and such passes.
_TRIAL_HELD = (4, 1, 2, 3, 1)
_TRIAL_PASSES = 2

MOST_TOKENS = _native.MOST_STEP_TOKENS

# (hidden states [1, tokens, hidden], layers of the caches, cosines, sines) -> hidden states.
_DecodeEach = Callable[[torch.Tensor, list[Any], torch.Tensor, torch.Tensor], "torch.Tensor | None"]


class TogetherPass:
    """Passes of one token for each of several attention caches. REQUIRES: inference mode, one thread at a time.

    Args:
        model: A causal language model whose layers all have native steps.
        pairs: Its layers and their steps.
        supports: Whether an attention cache has layers that native steps take.
        new_cache: Makes an attention cache for the trial, for a number of tokens.
    """

    def __init__(
        self,
        model: Any,
        pairs: Sequence[tuple[Any, NativeStep]],
        supports: Callable[[Any], bool],
        new_cache: Callable[[int], Any],
    ) -> None:
        self._model = model
        self._pairs = [(layer, step, _decode_each(step)) for layer, step in pairs]
        self._supports = supports
        self._new_cache = new_cache
        self._usable: bool | None = None

    def run(self, tokens: Sequence[int], caches: Sequence[Any]) -> torch.Tensor | None:
        """Compute a token of each cache.

        Args:
            tokens: Their ids, at most :data:`MOST_TOKENS`.
            caches: Their attention caches; none twice; changed in place.

        Returns:
            Logits ``[tokens, vocabulary]``; ``None``, without any change, if the model or a cache cannot be
            computed so.

        Raises:
            Exception: Any error of an expert layer. The layers of a cache may differ by a token then.
        """
        if not 1 <= len(tokens) == len(caches) <= MOST_TOKENS or not all(map(self._supports, caches)):
            return None
        if self._usable is None:
            self._usable = self._agrees()
        return self._logits(tokens, caches, self._pairs) if self._usable else None

    def _logits(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        pairs: Sequence[tuple[Any, NativeStep, _DecodeEach]],
    ) -> torch.Tensor | None:
        base, head = self._model.model, self._model.lm_head
        hidden = base.embed_tokens(torch.tensor([list(tokens)]))
        each = [base.rotary_emb(hidden, torch.tensor([[cache.get_seq_length()]])) for cache in caches]
        if any(type(angles) is not tuple or len(angles) != 2 for angles in each):
            return None
        cos, sin = (torch.cat(rows, dim=1).contiguous() for rows in zip(*each, strict=True))
        hidden = hidden.contiguous()
        if not pairs[0][1].takes(hidden[:, :1], each[0]) or hidden.dtype is not cos.dtype:
            return None
        with thread_invariant_pass(len(tokens)):
            for number, (layer, _, decode) in enumerate(pairs):
                out = decode(hidden, [cache.layers[number] for cache in caches], cos, sin)
                if out is None:
                    out = torch.cat(
                        [
                            layer(
                                hidden[:, row : row + 1].contiguous(),
                                past_key_values=cache,
                                position_embeddings=(cos[:, row : row + 1], sin[:, row : row + 1]),
                                use_cache=True,
                            )
                            for row, cache in enumerate(caches)
                        ],
                        dim=1,
                    )
                hidden = out
            normed = base.norm(hidden)
            if isinstance(head, _ROWS_ALONE):
                logits: torch.Tensor = head(normed)[0]
                return logits
            return torch.cat([head(normed[:, row : row + 1])[0] for row in range(len(tokens))])

    def _agrees(self) -> bool:
        """Whether both ways give the same logits and caches, bit by bit, for random tokens, with stub experts
        and the first layers: so many that each kind of layer is among them.
        """
        kinds = [layer_kind(layer) for layer, _, _ in self._pairs]
        pairs = self._pairs[: max(map(kinds.index, kinds)) + 1]
        base = self._model.model
        before = base.layers
        with stub_experts(self._model), probing() as generator:
            base.layers = nn.ModuleList([layer for layer, _, _ in pairs])
            try:
                return self._same(pairs, generator)
            except Exception:  # the family's code needs more than the trial has
                return False
            finally:
                base.layers = before

    def _same(
        self, pairs: Sequence[tuple[Any, NativeStep, _DecodeEach]], generator: torch.Generator
    ) -> bool:
        vocabulary = self._model.get_input_embeddings().num_embeddings
        ids = torch.randint(
            vocabulary, (len(_TRIAL_HELD), max(_TRIAL_HELD) + _TRIAL_PASSES), generator=generator
        ).tolist()

        def alone(token: int, cache: Any) -> torch.Tensor:
            out = self._model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            logits: torch.Tensor = out.logits[0]
            return logits

        ours, theirs = ([self._new_cache(len(row)) for row in ids] for _ in range(2))
        for row, held, pair in zip(ids, _TRIAL_HELD, zip(ours, theirs, strict=True), strict=True):
            for cache in pair:
                cache.layers = cache.layers[: len(pairs)]
                for token in row[:held]:
                    alone(token, cache)
        for step in range(_TRIAL_PASSES):
            tokens = [row[held + step] for row, held in zip(ids, _TRIAL_HELD, strict=True)]
            found = self._logits(tokens, ours, pairs)
            wanted = torch.cat(list(map(alone, tokens, theirs)))
            if found is None or not torch.equal(found, wanted):
                return False
        layers = [
            (mine, other)
            for pair in zip(ours, theirs, strict=True)
            for mine, other in zip(*(cache.layers for cache in pair), strict=True)
        ]
        return all(
            torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)
            for mine, other in layers
        )


def _decode_each(native: NativeStep) -> _DecodeEach:
    """As :attr:`NativeStep.decode`, for a token of each of several caches."""
    parts, step = native.parts, native.step
    route, normalise, add = step.run.route_each, step.run.normalise_each, step.run.add
    dtype, hidden_size, kv_heads, dim = step.dtype, step.hidden_size, step.kv_heads, step.dim
    mlp, experts = parts.mlp, parts.experts
    chosen = 0 if parts.router is None else vars(parts.router)["forward"].chosen
    empty = torch.empty
    with torch.inference_mode(False):
        x = empty((MOST_TOKENS, hidden_size), dtype=torch.float32)
        top_k_index = empty((MOST_TOKENS, chosen), dtype=torch.int64)
        top_k_weights = empty((MOST_TOKENS, chosen), dtype=torch.float32)
    chosen_at = (x.data_ptr(), top_k_index.data_ptr(), top_k_weights.data_ptr())

    def decode(hidden: torch.Tensor, slots: list[Any], cos: torch.Tensor, sin: torch.Tensor) -> Any:
        if not all(
            type(slot) in (ReservedLayer, WindowLayer) and slot.takes_token(kv_heads, dim, dtype)
            for slot in slots
        ):
            return None
        places = [slot.append_place(kv_heads, dim, dtype) for slot in slots]
        tokens = len(places)
        residual = empty((1, tokens, hidden_size), dtype=dtype)
        at = (hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), places, residual.data_ptr())
        if experts is None:
            normed = empty((1, tokens, hidden_size), dtype=dtype)
            normalise(*at, normed.data_ptr())
            out = mlp(normed)
            return residual + (out[0] if isinstance(out, tuple) else out)
        route(*at, *chosen_at)
        summed = vars(experts)[EXPERTS_RUNNER].forward(
            x[:tokens], top_k_index[:tokens], top_k_weights[:tokens]
        )
        add(summed.data_ptr(), residual.data_ptr(), tokens)
        return residual

    return decode
