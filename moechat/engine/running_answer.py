"""One answer under way: its prompt is computed in passes, then its tokens are drawn one after the other.

A pass may have a draft of the next tokens (:mod:`moechat.engine.guesses`). Tokens are drawn behind each of
them for as long as they are those of the draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from moechat.engine.answer import AnswerSettings, AnswerText, TokenChooser
from moechat.engine.decoder import Decoder
from moechat.engine.guesses import Draft, Guesses
from moechat.engine.stats import Stats
from moechat.errors import MoechatError
from moechat.models.prompt_cache import CachedTokens
from moechat.steps import Step

_NO_DRAFT = Draft()


@dataclass
class _Pending:
    """Logits that are computed and from which no token is drawn yet.

    Attributes:
        rows: ``[vocabulary]`` behind the latest token, then behind each token of the draft.
        seconds: What their pass took, or the answer's share of it.
        draft: Tokens that were guessed and computed.
        right: Guesses that have been drawn.
        alone: The pass had no other token of this answer.
    """

    rows: Sequence[torch.Tensor]
    seconds: float
    draft: Draft = _NO_DRAFT
    right: int = 0
    alone: bool = True


class Answer:
    """An iterator over the steps of an answer, to be advanced in turns with others.

    Each item computes one pass: of a part of the prompt, then of a token, unless
    :meth:`moechat.Engine.compute_together` has computed that already, or a guess was right. Items are a step
    for each token, and ``None`` after each pass of the prompt but the last.

    Each answer has an attention cache of its own, from its first item until it ends or is closed.

    Args:
        decoder: Computes passes, and keeps attention caches between answers.
        ids: The prompt, int64 ``[1, tokens]``.
        settings: How tokens are drawn, and where the answer ends.
        started: When the answer was requested, on ``time.perf_counter``'s clock.
        progress: Called before the first and after each part of the prompt with the tokens computed so far
            (or already cached) and the tokens of the prompt; its own time counts too. In a wave it is called
            several times a layer, with the tokens that would have been computed in that time.

    Attributes:
        decoder: As given.
        stats: Measurements so far.
    """

    # Invariants: _held is None before the first item and after the end. _waves are the passes of the prompt
    # that are left, in order. _computed tokens of _known are in the cache, mostly all but the latest; behind
    # them the cache has the tokens of a draft that are not drawn yet, if _pending has any.
    def __init__(
        self,
        decoder: Decoder,
        ids: torch.Tensor,
        settings: AnswerSettings,
        *,
        started: float,
        progress: Callable[[int, int], None],
    ) -> None:
        self.stats = Stats()
        self.decoder = decoder
        self._settings = settings
        self._started = started
        self._progress = progress
        self._chooser = TokenChooser(settings)
        self._text: AnswerText = decoder.answer_text(settings.stops)
        self._history = ids
        self._prompt = ids.shape[1]
        self._known: list[int] = ids[0].tolist()
        self._held: CachedTokens | None = None
        self._waves: list[list[torch.Tensor]] = []
        self._computed = 0
        self._drawn = 0
        self._first = 0.0
        self._pending: _Pending | None = None
        self._guesses: Guesses | None = None  # where there may be drafts
        self._ended = False

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> Step | None:
        """Compute and draw, see the class.

        Raises:
            StopIteration: The answer has ended.
            MoechatError: As :meth:`PassRunner.run`, or the grammar needs too much memory. The answer is
                closed then.
        """
        if self._ended:
            self.close()
            raise StopIteration
        try:
            if self._held is None:
                self._begin()
            if self._pending is None and not self._compute():
                return None
            step = self._draw()
        except BaseException:
            self.close()
            raise
        self._ended = step.finish_reason is not None
        return step

    def __del__(self) -> None:
        # Garbage is collected at any place and in any thread, where nothing may be computed.
        if self.__dict__.get("_held") is not None:
            self._end(computes=False)

    def close(self) -> None:
        """End the answer; its tokens stay in the prompt cache. Harmless when repeated."""
        self._end(computes=True)

    def _end(self, *, computes: bool) -> None:
        finished, self._ended = self._ended, True
        pending, self._pending = self._pending, None
        held, self._held = self._held, None
        if held is None:
            return
        try:
            # As without drafts: all tokens of a complete answer, else all but the latest.
            drawn = finished or (pending is not None and not pending.right)
            wanted = len(self._known) - (0 if drawn else 1)
            if self._computed >= self._prompt and self._keep_drawn(held, pending, wanted) and computes:
                self._recompute(held, wanted)
        finally:
            self._guesses = None  # it has the cache, too
            self.decoder.rollback.forget(held.cache)
            self.decoder.end_request(self)
            self.decoder.keep(held, self._known[: self._computed], self._prompt)

    @property
    def ended(self) -> bool:
        """Whether no further item comes."""
        return self._ended

    # ---- passes that several answers share

    @property
    def next_token(self) -> int | None:
        """The token whose pass comes next; ``None`` before the prompt is computed, and if there is none."""
        if self._held is None or self._ended or self._pending is not None or self._computed < self._prompt:
            return None
        return self._known[-1] if self._computed == len(self._known) - 1 else None

    @property
    def cache(self) -> Any:
        """Attention cache of an answer that has begun and has not ended."""
        assert self._held is not None
        return self._held.cache

    def begin_pass(self, tokens: int = 1) -> None:
        """A pass begins; if it fails, the cache is good only up to its last copy.

        Memory for a prompt is reserved by then; that for so many other tokens is here.
        """
        assert self._held is not None
        self.decoder.reserve(self._held, self._computed + tokens)
        self._held.whole = False

    def give_back(self) -> None:
        """The pass that had begun was not computed, and nothing has changed."""
        assert self._held is not None
        self._held.whole = True

    def take(self, logits: torch.Tensor, stats: Stats, seconds: float) -> None:
        """Take the result of a pass of :attr:`next_token`.

        Args:
            logits: ``[vocabulary]``.
            stats: The answer's, with its share of what was read and moved.
            seconds: Its share of the time.
        """
        assert self._held is not None
        self._held.whole = True
        self._computed += 1
        self.stats = stats
        self._pending = _Pending((logits,), seconds)

    # ---- a pass of its own

    def _begin(self) -> None:
        decoder = self.decoder
        self._held = decoder.take_cache(self._known)
        reused = self._computed = len(self._held.tokens)
        decoder.reserve(self._held, self._prompt)  # at once, not part by part
        self.stats = decoder.begin_stats(self._prompt, reused, self._settings.seed)
        parts = decoder.parts(self._history[:, reused:], self._prompt)
        self._waves = decoder.waves(parts)
        decoder.choose_copies(self._held, parts, self._prompt)
        decoder.begin_request(self, self._known)
        if self._settings.draft_tokens and decoder.passes.most_successive:
            self._guesses = Guesses(decoder, self._held, self._known, self._settings)
        self._progress(reused, self._prompt)

    def _compute(self) -> bool:
        """Compute the next pass; returns whether a token can be drawn then."""
        held, decoder = self._held, self.decoder
        assert held is not None
        if self._computed >= self._prompt:
            self._compute_token(held)
            return True
        decoder.meter.start()
        begun = time.perf_counter()
        chunks = self._waves.pop(0)
        self.begin_pass()
        guesses = self._guesses
        states: list[torch.Tensor] = []
        logits, held.cache = decoder.advance(
            chunks,
            held.cache,
            partial(_advanced, self._progress, self._computed, self._prompt),
            partial(_layer_passed, held, self._computed),
            partial(_part_ended, held, self._computed),
            states.append if guesses is not None and guesses.reads_hidden_states else None,
        )
        before = self._computed
        self._computed += sum(chunk.shape[1] for chunk in chunks)
        held.whole = True
        for rows in states:
            assert guesses is not None
            guesses.computed(before, rows)
            before += rows.shape[1]
        self._count(decoder.meter.add(self.stats))
        if self._waves:
            return False
        self._pending = _Pending((logits,), time.perf_counter() - begun)
        return True

    def _compute_token(self, held: CachedTokens) -> None:
        """Compute the latest token, and a draft where one is expected to be worth it."""
        decoder, latest, before = self.decoder, self._known[self._computed :], self._computed
        guessing = time.perf_counter()
        found = self._guess(len(latest))
        draft = found.tokens
        decoder.meter.start()
        begun = time.perf_counter()
        self.begin_pass(len(latest) + len(draft))
        several = draft or len(latest) > 1
        rows: Sequence[torch.Tensor] | None = decoder.verify(latest, draft, held.cache) if several else None
        if rows is None:
            found, draft = replace(found, tokens=(), by_mtp=False), ()
            for token in latest:
                decoder.begin_token(self, token)
                logits, held.cache = decoder.step(torch.tensor([[token]]), held.cache)
            rows = (logits,)
            self._count(decoder.meter.add(self.stats))
        else:
            self._count(decoder.meter.add_shares([self.stats])[0])
        self._computed += len(latest)
        held.whole = not draft
        now = time.perf_counter()
        decoder.lengths.passed(len(latest) + len(draft), now - begun)
        if draft:
            self.stats = replace(self.stats, drafted_tokens=self.stats.drafted_tokens + len(draft))
        if self._guesses is not None:
            self._guesses.computed_until(before + len(latest) + len(draft))
        self._pending = _Pending(rows, now - guessing, found, alone=len(latest) + len(draft) == 1)

    def _count(self, stats: Stats) -> None:
        self.stats = self.decoder.stats = stats

    def _draw(self) -> Step:
        pending = self._pending
        assert pending is not None
        begun = time.perf_counter()
        chosen = self._chooser.choose(self._history, pending.rows[pending.right])
        now = time.perf_counter()
        self._first = self._first or now
        self._drawn += 1
        self.decoder.token_done(pending.seconds + now - begun, alone=pending.alone)
        last = self._drawn == self._settings.limit
        step = self._text.step(chosen, complete=self._chooser.complete, last=last)
        if step.finish_reason is None:
            latest = torch.tensor([[step.token_id]])
            self._history = torch.cat([self._history, latest], dim=1)
            self._known.append(step.token_id)
            if self._guesses is not None:
                self._guesses.append(step.token_id)
        self._go_on(pending, None if step.finish_reason else step.token_id)
        self._count(
            replace(
                self.stats,
                output_tokens=self._drawn,
                ttft_s=self._first - self._started,
                tpot_s=(now - self._first) / (self._drawn - 1) if self._drawn > 1 else 0.0,
                busy_s=now - self._started,
            )
        )
        return step

    # ---- drafts

    def _guess(self, behind: int) -> Draft:
        """What may follow the text.

        Args:
            behind: Tokens that the pass computes in any case.
        """
        if self._guesses is None:
            return _NO_DRAFT
        left = self._settings.limit - self._drawn - 1  # tokens that may follow the next one
        most = min(self._settings.draft_tokens, left, self.decoder.most_verified - behind)
        return self._guesses.draft(behind, most)

    def _go_on(self, pending: _Pending, token: int | None) -> None:
        """Go on with the pass if the drawn token was guessed; else the rest of its draft is wrong.

        Args:
            pending: The pass.
            token: The drawn one; ``None``: the answer has ended.
        """
        draft = pending.draft.tokens
        if pending.right < len(draft) and draft[pending.right] == token:
            pending.right += 1
            pending.seconds = 0.0
            self._computed += 1
            self.stats = replace(self.stats, accepted_tokens=self.stats.accepted_tokens + 1)
            return
        self._pending = None
        if self._guesses is not None:
            self._guesses.verified(pending.draft, pending.right, token)
        if draft:
            assert self._held is not None
            self._settle(self._held)

    def _settle(self, held: CachedTokens) -> None:
        """Take the cache back to the drawn tokens.

        A cache with states goes back to what it was before the pass, unless all of its tokens were drawn. The
        next pass then computes the tokens since then again.
        """
        self._computed = self.decoder.rollback.keep(held.cache, self._computed)
        held.whole = True
        if self._guesses is not None:
            self._guesses.forget_rejected()

    def _keep_drawn(self, held: CachedTokens, pending: _Pending | None, wanted: int) -> bool:
        """At the end, keep at most the first ``wanted`` tokens in the cache; returns whether some are missing
        that can be computed.
        """
        if pending is not None and pending.draft.tokens:
            self._computed = min(self._computed, wanted)
            self._settle(held)
        return held.whole and self._computed < wanted

    def _recompute(self, held: CachedTokens, wanted: int) -> None:
        """Compute drawn tokens again from which a cache with states has gone back."""
        held.whole = False
        with suppress(MoechatError):  # then the cache is good up to its last copy
            if self.decoder.verify(self._known[self._computed : wanted], [], held.cache) is not None:
                self._computed = wanted
            held.whole = True


def _part_ended(held: CachedTokens, before: int, done: int) -> None:
    held.reached(before + done)


def _layer_passed(held: CachedTokens, before: int, number: int, done: int) -> None:
    held.layer_reached(number, before + done)


def _advanced(progress: Callable[[int, int], None], before: int, prompt: int, done: int) -> None:
    progress(before + done, prompt)
