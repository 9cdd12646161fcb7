"""A loaded head for multi-token prediction: guesses the next tokens of an answer.

See :mod:`moechat.models.mtp` for what a head computes. Its guesses are the most likely tokens; whether they
are right does not matter for the answer, because the model verifies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from moechat.models.attention_cache import keep_first, new_cache
from moechat.models.cache_argument import CACHE
from moechat.models.cache_rollback import make_room
from moechat.models.decode.together import TogetherPass
from moechat.models.decode.wiring import ends_of
from moechat.models.linear import TILE_ROWS, PackedLinear, SplitLinear
from moechat.models.mtp import MtpInputs
from moechat.models.skeleton import base_of
from moechat.models.threads import thread_invariant_pass
from moechat.sizes.cache_shape import CacheShape

# Tokens that a head guesses for a draft; before each of them the states of the model are copied.
MOST_GUESSES = 3
# Tokenizers number tokens about by their frequency. The head's product takes longer than its layer.
_FREQUENT_SHARE = 1 / 4
# Projections of an attention module to and from queries, and from its results.
_UNWANTED = ("q_proj", "q_a_proj", "q_b_proj", "o_proj")
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class HiddenStates:
    """The hidden states that a model's last norm gave, in its latest call.

    Args:
        model: The model. Its last norm hands them here from now on.

    Attributes:
        rows: ``[1, tokens, hidden]``; ``None`` before the first call.
    """

    def __init__(self, model: Any) -> None:
        self.rows: torch.Tensor | None = None
        norm = ends_of(base_of(model))[-1]
        own = norm.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = own(x)
            self.rows = found
            return found

        norm.forward = forward


class _Outputs(nn.Module):
    """The model's head, for as many rows as are wanted; in the place of a head.

    Attributes:
        wanted: The rows whose logits are computed: ``all``, the ``last`` one, its ``frequent`` tokens only,
            or ``none``.
        row: ``[1, 1, hidden]``, the last row of the latest call.
        frequent: Tokens with the ids below are frequent.
    """

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head
        self.wanted = "all"
        self.row: torch.Tensor | None = None
        self.frequent: int = head.out_features
        self._first = head
        fewer = round(self.frequent * _FREQUENT_SHARE / TILE_ROWS) * TILE_ROWS
        if isinstance(head, PackedLinear | SplitLinear) and fewer:
            self.frequent, self._first = fewer, head.first_rows(fewer)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.row = rows[:, -1:]
        if self.wanted == "none":
            return self.row
        head = self._first if self.wanted == "frequent" else self.head
        logits: torch.Tensor = head(rows if self.wanted == "all" else self.row.contiguous())
        return logits


def _zeros(columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], columns)

    return forward


class MtpHead:
    """Guesses tokens. REQUIRES: inference mode, one thread at a time, as the model.

    An entry of its attention cache is a token and the hidden states of the token before it.

    Args:
        head: The model of one layer, with its weights, without native modules.
        main: The model, with its native modules.
        cache: Shape of the head's attention cache.
        install: Makes the passes of the head from it; ``None``: its layer is not recognised.

    Attributes:
        cache: Shape of its attention cache.
        hidden: Of the model.
        most: Most entries that a guess should add.

    Raises:
        ValueError: Its layer has no native step.
    """

    def __init__(
        self,
        head: Any,
        main: Any,
        cache: CacheShape,
        install: Callable[[Any], TogetherPass | None],
    ) -> None:
        self.cache = cache
        self._model = head
        self._inputs: MtpInputs = base_of(head).embed_tokens
        self._inputs.embedding = ends_of(base_of(main))[0]
        self._outputs = head.lm_head = _Outputs(main.lm_head)
        together = install(head)
        if together is None:
            raise ValueError("the layer of the head has no native step")
        self._together = together
        self.most = together.most
        self.hidden = HiddenStates(main)
        # What makes neither keys nor values.
        (layer,) = base_of(head).layers
        width = base_of(main).config.get_text_config().hidden_size
        widths: dict[nn.Module, int] = {layer.mlp: width}
        for name in _UNWANTED:
            projection = getattr(layer.self_attn, name, None)
            if projection is not None:
                widths[projection] = projection.out_features
        # Their own forward, where it is not that of their class, and the one in its place.
        self._unwanted = {
            module: (vars(module).get("forward"), _zeros(columns)) for module, columns in widths.items()
        }

    @property
    def frequent(self) -> int:
        """Tokens with ids below are frequent."""
        return self._outputs.frequent

    def new_cache(self, tokens: int) -> Any:
        """An attention cache of the head for so many tokens."""
        return new_cache(self.cache, self._model.config, tokens)

    def feed(self, cache: Any, tokens: Sequence[int], rows: torch.Tensor) -> None:
        """Add entries to an attention cache; of their layer only the attention is computed, without queries.

        Args:
            cache: Of :meth:`new_cache`; changed in place.
            tokens: Their ids.
            rows: ``[1, tokens, hidden]``, the model's hidden states for the token before each.
        """
        try:
            for module, (_, zeros) in self._unwanted.items():
                vars(module)["forward"] = zeros
            with self._computing("none", rows):
                self._forward(tokens, cache)
        finally:
            for module, (own, _) in self._unwanted.items():
                if own is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = own

    def guess(
        self,
        cache: Any,
        tokens: Sequence[int],
        rows: torch.Tensor,
        count: int,
        bias: Mapping[int, float] = _NO_BIAS,
        among: Literal["all", "frequent"] = "all",
    ) -> list[int]:
        """Add entries to an attention cache, and guess the tokens that follow the last one.

        Args:
            cache: As for :meth:`feed`, and so are the next two.
            tokens: At least one.
            rows: See there.
            count: Tokens to guess, at least one; later ones follow from the earlier.
            bias: Added to the logits of tokens.
            among: ``frequent``: guess only tokens with ids below :attr:`frequent`, which is faster.
        """
        wanted = "last" if among == "all" else "frequent"
        self._together.try_successive()  # with all logits, and no hidden states
        found: list[int] = []
        while True:
            with self._computing(wanted, rows):
                logits = None
                if len(tokens) <= self._together.most_successive and make_room(cache, len(tokens)):
                    logits = self._together.run_successive(tokens, cache)
                if logits is None:
                    logits = self._forward(tokens, cache)
            likely = logits[-1].float()
            for token, value in bias.items():
                if token < len(likely):
                    likely[token] += value
            found.append(int(likely.argmax()))
            assert self._outputs.row is not None
            if len(found) == count:
                break
            tokens, rows = found[-1:], self._outputs.row
        keep_first(cache, cache.get_seq_length() - (count - 1))
        return found

    def _forward(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        with thread_invariant_pass(len(tokens)):
            out = self._model(input_ids=torch.tensor([list(tokens)]), use_cache=True, **{CACHE: cache})
        logits: torch.Tensor = out.logits[0]
        return logits

    @contextmanager
    def _computing(self, wanted: str, rows: torch.Tensor) -> Iterator[None]:
        self._outputs.wanted, self._inputs.rows = wanted, rows
        try:
            yield
        finally:
            self._outputs.wanted, self._inputs.rows = "all", None
