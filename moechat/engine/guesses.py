"""Guesses the next tokens of an answer, so that one pass verifies several of them (speculative decoding).

A draft is what followed before in the text (:mod:`moechat.engine.drafts`), or what the model's head for
multi-token prediction expects, if it has one: whichever is expected to be faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moechat.engine.answer import AnswerSettings
from moechat.engine.decoder import Decoder
from moechat.engine.draft_lengths import Choice
from moechat.engine.drafts import Match, PromptLookup
from moechat.engine.mtp_entries import MtpEntries
from moechat.models.cache_rollback import has_states
from moechat.models.prompt_cache import CachedTokens
from moechat.steps import MOST_DRAFT


@dataclass(frozen=True)
class Draft:
    """Guessed tokens.

    Attributes:
        tokens: They; none, where no draft is worth its time.
        match: Where the text was found before; ``None``: nowhere, or it was not looked for.
        by_mtp: The head has guessed; else they are what followed ``match``.
    """

    tokens: Sequence[int] = ()
    match: Match | None = None
    by_mtp: bool = False


class Guesses:
    """Makes the drafts of one answer, and counts how many of them were right.

    Args:
        decoder: Computes passes; knows what drafts cost.
        held: The answer's attention cache, with the tokens that earlier answers left in it.
        known: The text so far, which its owner appends to.
        settings: Of the answer.
    """

    def __init__(
        self, decoder: Decoder, held: CachedTokens, known: Sequence[int], settings: AnswerSettings
    ) -> None:
        self._decoder = decoder
        self._kept = decoder.rollback.kept if has_states(held.cache) else MOST_DRAFT
        self._known = known
        self._expected = settings.expected
        self._lookup: PromptLookup | None = None  # made where there may be drafts
        self._mtp = decoder.mtp
        self._entries: MtpEntries | None = None
        if self._mtp is not None and held.mtp is not None:
            self._entries = MtpEntries(self._mtp, held.mtp, len(held.tokens), settings.bias)

    @property
    def reads_hidden_states(self) -> bool:
        """Whether :meth:`computed` wants the hidden states of passes."""
        return self._entries is not None

    def computed(self, position: int, rows: torch.Tensor) -> None:
        """Take the hidden states, ``[1, tokens, hidden]``, of a pass whose first token had a position.

        Raises:
            MoechatError: As :meth:`PassRunner.run`.
        """
        entries = self._entries
        if entries is not None:
            self._decoder.passes.run_mtp(lambda: entries.computed(position, rows, self._known))

    def computed_until(self, end: int) -> None:
        """As :meth:`computed`, of the latest pass, which ended before a position."""
        rows = None if self._mtp is None else self._mtp.hidden.rows
        if rows is not None:
            self.computed(end - rows.shape[1], rows)

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        if self._lookup is not None:
            self._lookup.append(token)

    def draft(self, behind: int, most: int) -> Draft:
        """Guess the tokens that follow the text.

        Args:
            behind: Tokens that the pass computes in any case.
            most: Most tokens to guess.

        Raises:
            MoechatError: As :meth:`PassRunner.run`.
        """
        decoder, lengths = self._decoder, self._decoder.lengths
        if most <= 0:
            return Draft()
        if self._lookup is None:
            self._lookup = PromptLookup(self._known, self._expected)
        match = self._lookup.find()
        by_text = by_mtp = Choice(0, 0.0)
        if match is not None:
            by_text = lengths.choose(match.length, behind + most, behind, kept=self._kept)
        if self._entries is not None:
            by_mtp = lengths.choose_mtp(behind + most, behind, kept=self._kept)
        if not (by_text.guesses or by_mtp.guesses) or not decoder.can_verify():
            return Draft((), match)
        if by_mtp.guesses and (not by_text.guesses or by_text.rate < by_mtp.rate):
            tokens = self._by_mtp(by_mtp.guesses)
            if tokens:
                return Draft(tokens, match, by_mtp=True)
        return Draft(() if match is None else self._lookup.draft(match, by_text.guesses), match)

    def _by_mtp(self, count: int) -> list[int]:
        decoder, entries = self._decoder, self._entries
        assert entries is not None
        begun = time.perf_counter()
        found: list[int] = decoder.passes.run_mtp(lambda: entries.guess(self._known, count))
        if found:
            decoder.lengths.mtp_took(count, time.perf_counter() - begun)
        return found

    def verified(self, draft: Draft, right: int, token: int | None) -> None:
        """The first tokens of a draft were right; the next one was not, or the draft has ended.

        Args:
            draft: The draft, which may be empty.
            right: Number of right tokens.
            token: The one that was drawn last; ``None``: the answer has ended.
        """
        lengths, match = self._decoder.lengths, draft.match
        # What follows the end of an answer is not known.
        guesses = len(draft.tokens) if token is not None else right
        if draft.by_mtp:
            lengths.mtp_verified(guesses, right)
        elif draft.tokens and match is not None:
            lengths.verified(match.length, guesses, right)
        if match is not None and self._lookup is not None and (draft.by_mtp or not draft.tokens):
            drawn = draft.tokens[0] if right else token
            if drawn is not None:
                lengths.verified(match.length, 1, int(self._lookup.draft(match, 1)[0] == drawn))

    def forget_rejected(self) -> None:
        """The hidden states of rejected tokens are not those of the text."""
        if self._entries is not None:
            self._entries.forget(len(self._known) - 1)
