"""Computes several tokens in one pass through a whole model: one of each of several conversations, or
successive ones of one.

In passes of their own, each token would read all dense weights and its own experts. Here dense weights are
read once for all tokens, and each expert that any of them chose once. Attention and states are computed cache
by cache.

The results of a token are those of a pass of its own, bit by bit: native products, norms and routers do not
depend on other tokens of the call. A trial compares both ways when the first such pass is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import starmap
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.cache_argument import CACHE
from moechat.models.cache_rollback import make_room
from moechat.models.cache_states import tensors_of
from moechat.models.decode.ends import ModelEnds
from moechat.models.decode.layer_check import stub_experts
from moechat.models.decode.layer_kind import layer_kind
from moechat.models.decode.native_pass import NativePass
from moechat.models.decode.native_step import NativeStep, layer_angles, native_part
from moechat.models.decode.probe import FEW_TOKENS, probing
from moechat.models.skeleton import base_of
from moechat.models.state_layer import CopiedStates

# Numbers of tokens in the passes of the trial, and most tokens that a conversation has before them.
_TRIAL_TOKENS = (2, 3, 5, FEW_TOKENS, _native.MOST_STEP_TOKENS)
_TRIAL_HELD = 4

Copies = Mapping[int, CopiedStates]  # by the number of the layer


class TogetherPass:
    """Passes of one token for each of several attention caches, or of successive tokens of one.

    REQUIRES: inference mode, one thread at a time.

    Args:
        model: A causal language model whose layers all have native steps.
        pairs: Its layers and their steps.
        native: All its layers.
        supports: Whether an attention cache has layers that native steps take.
        new_cache: Makes an attention cache for the trial, for a number of tokens.

    Attributes:
        most: Most tokens of a pass.
    """

    def __init__(
        self,
        model: Any,
        pairs: Sequence[tuple[Any, NativeStep]],
        native: NativePass,
        supports: Callable[[Any], bool],
        new_cache: Callable[[int], Any],
    ) -> None:
        self._model = model
        self._pairs = list(pairs)
        self._supports = supports
        self._new_cache = new_cache
        # The family's own code of a feed-forward part has native routers for few tokens only.
        plain = all(
            step.feed.experts is not None
            or step.feed.ends
            or isinstance(native_part(step.feed.mlp), _native.Mlp)
            for _, step in pairs
        )
        self.most: int = _native.MOST_STEP_TOKENS if plain else FEW_TOKENS
        self._ends = ModelEnds(model, [step for _, step in pairs])
        self._native = native
        self._usable: bool | None = None
        self._usable_successive: bool | None = None
        self._divided_products = False
        self._by_rows = False  # other products compute each token on its own

    def run(self, tokens: Sequence[int], caches: Sequence[Any]) -> torch.Tensor | None:
        """Compute a token of each cache.

        Args:
            tokens: Their ids, at most :attr:`most`.
            caches: Their attention caches; none twice; changed in place.

        Returns:
            Logits ``[tokens, vocabulary]``; ``None``, without any change, if the model or a cache cannot be
            computed so.

        Raises:
            Exception: Any error of an expert layer. The layers of a cache may differ by a token then.
        """
        if not 1 <= len(tokens) == len(caches) <= self.most or not all(map(self._supports, caches)):
            return None
        if self._ends.media_ids.intersection(tokens):
            return None
        if self._usable is None:
            self._divide_products()
            self._usable = self._agrees(self._same)
        if not self._usable:
            return None
        positions = [cache.get_seq_length() for cache in caches]
        return self._logits(tokens, caches, positions, self._pairs, self._ends)

    @property
    def most_successive(self) -> int:
        """Most tokens of :meth:`run_successive`; 0: the trial has failed."""
        return 0 if self._usable_successive is False else self.most

    def try_successive(self) -> bool:
        """Whether :meth:`run_successive` gives the logits of single passes; the first call tries it out."""
        if self._usable_successive is None:
            self._divide_products()
            self._usable_successive = self._agrees(self._same_successive)
        return self._usable_successive

    def run_successive(
        self, tokens: Sequence[int], cache: Any, copies: Sequence[Copies] = ()
    ) -> torch.Tensor | None:
        """Compute successive tokens of one cache, as passes of their own would.

        REQUIRES: the layers of the cache have room for them.

        Args:
            tokens: Their ids, at most :attr:`most`.
            copies: For the last tokens, where states of layers are copied before each.
            cache: As for :meth:`run`, and so are the result and errors. After an error, each layer may have
                some of the tokens.
        """
        if not 1 <= len(tokens) <= self.most or not self._supports(cache):
            return None
        if self._ends.media_ids.intersection(tokens):
            return None
        if not self.try_successive():
            return None
        first = cache.get_seq_length()
        positions = range(first, first + len(tokens))
        return self._logits(tokens, [cache] * len(tokens), positions, self._pairs, self._ends, copies)

    def _logits(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        positions: Sequence[int],
        pairs: Sequence[tuple[Any, NativeStep]],
        ends: ModelEnds,
        copies: Sequence[Copies] = (),
    ) -> torch.Tensor | None:
        hidden = ends.embed(torch.tensor([list(tokens)])).contiguous()
        each = [ends.angles(hidden, position) for position in positions]
        if not ends.takes(hidden[:, :1], each[0]):
            return None
        joined: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by those of the first token
        turns = []
        for number in range(len(pairs)):
            rows = [angles[number] for angles in each]
            if id(rows[0]) not in joined:
                parts = zip(*rows, strict=True)
                cos, sin = (torch.cat(part, dim=1).contiguous() for part in parts)
                joined[id(rows[0])] = cos, sin
            turns.append(joined[id(rows[0])])
        slots = [[cache.layers[number] for cache in caches] for number in range(len(pairs))]
        for row, copied in enumerate(copies, len(tokens) - len(copies)):
            for number, layer in copied.items():
                slots[number][row] = layer
        self._by_rows = True
        try:
            whole = self._native(hidden, slots, turns) if len(pairs) == len(self._pairs) else None
            if whole is not None:
                return ends.logits(whole)[0]
            for (layer, step), places, (cos, sin) in zip(pairs, slots, turns, strict=True):
                out = step.decode(hidden, places, cos, sin)
                if out is None:
                    rows = []
                    for row, (cache, place) in enumerate(zip(caches, places, strict=True)):
                        if isinstance(place, CopiedStates):
                            place.copy()
                        turn = layer_angles(cos[:, row : row + 1], sin[:, row : row + 1])
                        x = hidden[:, row : row + 1].contiguous()
                        rows.append(layer(x, position_embeddings=turn, use_cache=True, **{CACHE: cache}))
                    out = torch.cat(rows, dim=1)
                hidden = out
            logits = ends.logits(hidden)[0]
        finally:
            self._by_rows = False
        return logits

    def _divide_products(self) -> None:
        """Let torch's products compute one token at a time in these passes; harmless when repeated."""
        if self._divided_products:
            return
        self._divided_products = True
        parts = [part for _, step in self._pairs for part in step.wiring.mlp.modules()]
        for module in (self._model.lm_head, *parts):
            if isinstance(module, nn.Linear):
                module.__dict__["forward"] = wraps(module.forward)(self._divided(module.forward))

    def _divided(self, own: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not self._by_rows:
                return own(x)
            rows = [x.narrow(-2, row, 1) for row in range(x.shape[-2])]
            return torch.cat(list(map(own, rows)), dim=-2)

        return forward

    def _agrees(self, same: Callable[[Sequence[tuple[Any, NativeStep]], torch.Generator], bool]) -> bool:
        """Whether both ways give the same logits and caches, bit by bit, for random tokens, with stub experts
        and the first layers: so many that each kind of layer is among them.
        """
        kinds = [layer_kind(layer) for layer, _ in self._pairs]
        pairs = self._pairs[: max(map(kinds.index, kinds)) + 1]
        base = base_of(self._model)
        before = base.layers
        with stub_experts(self._model), probing() as generator:
            base.layers = nn.ModuleList([layer for layer, _ in pairs])
            try:
                return same(pairs, generator)
            except Exception:  # the family's code needs more than the trial has
                return False
            finally:
                base.layers = before

    def _same(self, pairs: Sequence[tuple[Any, NativeStep]], generator: torch.Generator) -> bool:
        ends = ModelEnds(self._model, [step for _, step in pairs])
        ids = ends.draw(generator, self.most, _TRIAL_HELD + len(_TRIAL_TOKENS)).tolist()
        alone = self._alone
        caches = [[self._new_cache(len(row)) for _ in range(2)] for row in ids]
        for number, (row, pair) in enumerate(zip(ids, caches, strict=True)):
            for cache in pair:
                cache.layers = cache.layers[: len(pairs)]
                for token in row[: 1 + number % _TRIAL_HELD]:
                    alone(token, cache)
        for number, count in enumerate(count for count in _TRIAL_TOKENS if count <= self.most):
            tokens = [row[_TRIAL_HELD + number] for row in ids[:count]]
            ours = [cache for cache, _ in caches[:count]]
            positions = [cache.get_seq_length() for cache in ours]
            found = self._logits(tokens, ours, positions, pairs, ends)
            wanted = [alone(token, theirs) for token, (_, theirs) in zip(tokens, caches, strict=False)]
            if found is None or not torch.equal(found, torch.cat(wanted)):
                return False
        return all(starmap(_equal, caches))

    def _same_successive(self, pairs: Sequence[tuple[Any, NativeStep]], generator: torch.Generator) -> bool:
        ends = ModelEnds(self._model, [step for _, step in pairs])
        counts = (2, self.most)
        ids = ends.draw(generator, _TRIAL_HELD + sum(counts)).tolist()
        ours, theirs = (self._new_cache(len(ids)) for _ in range(2))
        for cache in (ours, theirs):
            cache.layers = cache.layers[: len(pairs)]
            for token in ids[:_TRIAL_HELD]:
                self._alone(token, cache)
        held = _TRIAL_HELD
        for count in counts:
            tokens, positions = ids[held : held + count], range(held, held + count)
            held += count
            room = make_room(ours, count)
            found = self._logits(tokens, [ours] * count, positions, pairs, ends) if room else None
            if found is None or not torch.equal(
                found, torch.cat([self._alone(token, theirs) for token in tokens])
            ):
                return False
        return _equal(ours, theirs)

    def _alone(self, token: int, cache: Any) -> torch.Tensor:
        out = self._model(input_ids=torch.tensor([[token]]), use_cache=True, **{CACHE: cache})
        logits: torch.Tensor = out.logits[0]
        return logits


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether two caches hold the same."""
    pairs = zip(ours.layers, theirs.layers, strict=True)
    return all(all(map(torch.equal, tensors_of(mine), tensors_of(other))) for mine, other in pairs)
