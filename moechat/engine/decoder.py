"""Computes prompts in parts, decodes token by token, and keeps the attention cache between answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moechat.engine.answer import AnswerText
from moechat.engine.draft_lengths import DraftLengths
from moechat.engine.grammar import GrammarCompiler
from moechat.engine.recovery import PassRunner
from moechat.engine.stats import Meter, Stats
from moechat.geometry import PLAIN_KV_BITS
from moechat.loading.model import LoadedModel
from moechat.models.attention_cache import reserve_tokens
from moechat.models.cache_argument import cache_of
from moechat.models.cache_rollback import CacheRollback, make_room
from moechat.models.mtp_head import MOST_GUESSES, MtpHead
from moechat.models.prompt_cache import CachedTokens, CacheRoom, PromptCache
from moechat.models.sampling import require_finite
from moechat.models.waves import Passed
from moechat.sizes.cache_shape import PREFILL_CHUNK


class Decoder:
    """Prefill and decoding of one loaded model.

    Args:
        passes: Runs the model.
        meter: Reads the counters of experts and link.
        tokenizer: Of the model, or ``None``.
        stop_tokens: Token ids that end an answer.
        stats: Of loading; the statistics of answers go on from these.

    Attributes:
        stats: Of the answer under way, else of the last one.
        stop_tokens: Token ids that end an answer.
        prompt_cache: Keys, values and states of the last answer, or of several conversations.
        cached_tokens: Tokens that ``prompt_cache`` held after the last answer.
        vocabulary: Rows of the embedding.
        grammars: Makes the masks of grammars.
        lengths: Chooses the lengths of drafts.
        rollback: Rolls the cache of an answer back from its draft; of one answer at a time.
        meter: Reads the counters of experts and link.
        passes: Runs the model.
    """

    def __init__(
        self,
        passes: PassRunner,
        meter: Meter,
        *,
        tokenizer: Any,
        stop_tokens: frozenset[int],
        stats: Stats,
    ) -> None:
        self.stats = stats
        self.stop_tokens = stop_tokens
        self.prompt_cache = PromptCache(passes.loaded.conversations, _room(passes.loaded), self._lend)
        self.cached_tokens = 0
        self.lengths = DraftLengths()
        self.rollback = CacheRollback(1 if passes.loaded.mtp is None else MOST_GUESSES)
        self.passes = passes
        self.meter = meter
        self._tokenizer = tokenizer
        self._one_pass_noted = False
        model = passes.usable_model()
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self.grammars = GrammarCompiler(tokenizer, self.vocabulary, stop_tokens)
        # Without it the head computes logits for every token of the prompt.
        parameters = inspect.signature(model.forward).parameters
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def new_cache(self, capacity: int = 0) -> Any:
        """An empty attention cache; ``None`` where the model makes its own, and after closing.

        Args:
            capacity: Tokens that it reserves; 0: those of the context.
        """
        loaded = self.passes.loaded
        if capacity == 0:
            self._lend(0)
        return None if loaded.model is None else loaded.new_cache(capacity or loaded.plan.context)

    def _lend(self, nbytes: int) -> None:
        """Let pages of experts have so many bytes of the memory for attention caches."""
        near = self.passes.loaded.near
        if near is not None and near.lent:
            near.lend(nbytes)

    def parts(self, ids: torch.Tensor, prompt: int) -> list[torch.Tensor]:
        """Split the tokens that are still to be computed into passes.

        Args:
            ids: int64 ``[1, tokens]``.
            prompt: Tokens of the whole prompt, those that the cache holds included.
        """
        loaded = self.passes.loaded
        if prompt <= loaded.cache.appendable:
            return list(torch.split(ids, loaded.chunk, dim=1))
        note = loaded.cache.note_of_one_pass(prompt)
        if prompt > loaded.chunk and note and not self._one_pass_noted:
            self._one_pass_noted = True
            self.passes.notes.append(note)
        return [ids]

    def waves(self, parts: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Group the passes of a prompt into waves; a group of one is a pass.

        A last pass of one token stays alone: it is computed like a decoded one.
        """
        loaded = self.passes.loaded
        # The tuner may have mapped the experts since the plan was made: longer waves have no use then.
        wave = loaded.plan.wave if loaded.near is not None else min(loaded.plan.wave, PREFILL_CHUNK)
        count = wave // loaded.chunk
        if count < 2 or loaded.chunk < 2:
            return [[part] for part in parts]
        alone = parts[-1:] if parts[-1].shape[1] == 1 else []
        whole = parts[: len(parts) - len(alone)]
        groups = [whole[begin : begin + count] for begin in range(0, len(whole), count)]
        return groups + ([alone] if alone else [])

    def advance(
        self,
        chunks: list[torch.Tensor],
        cache: Any,
        computed: Callable[[int], None] = lambda _: None,
        passed: Passed | None = None,
        ended: Callable[[int], None] = lambda _: None,
        states: Callable[[torch.Tensor], None] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Compute the chunks of a wave, or one pass, behind the tokens in a cache.

        Args:
            chunks: From :meth:`waves`.
            cache: As for :meth:`step`; result and errors too.
            computed: Called with the number of tokens that are done, or as good as done.
            passed: As for :meth:`PassRunner.run_wave`.
            ended: Called at the end of each chunk, in a wave at the end of the wave, with the number of
                tokens.
            states: Takes the hidden states of each chunk in order, ``[1, tokens, hidden]``, where the model
                has a head for multi-token prediction.
        """
        mtp = self.mtp

        def take(_begin: int, _output: Any) -> None:
            if states is not None and mtp is not None and mtp.hidden.rows is not None:
                states(mtp.hidden.rows)

        total, done = sum(chunk.shape[1] for chunk in chunks), 0
        if len(chunks) > 1:
            output = self.passes.run_wave(
                chunks,
                cache,
                tick=lambda share: computed(int(share * total)),
                each=None if states is None else take,
                passed=passed,
                **self._last_only,
            )
            if output is not None:
                for chunk in chunks:
                    done += chunk.shape[1]
                    ended(done)
                computed(total)
                return output.logits[0, -1], cache_of(output)
        for chunk in chunks:
            logits, cache = self.step(chunk, cache)
            take(done, None)
            done += chunk.shape[1]
            ended(done)
            computed(done)
        return logits, cache

    def step(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Compute one pass of tokens behind those in a cache.

        Args:
            ids: int64 ``[1, tokens]``, at least one.
            cache: From :meth:`new_cache` or an earlier call; changed in place.

        Returns:
            The logits ``[vocabulary]`` after the last token, and the cache.

        Raises:
            MoechatError: As :meth:`PassRunner.run`.
        """
        near = self.passes.loaded.near
        if near is not None and near.settings.looks_up:
            near.begin_tokens(ids[0].tolist())
        output = self.passes.run(ids, cache, **self._last_only)
        return output.logits[0, -1], cache_of(output)

    @property
    def mtp(self) -> MtpHead | None:
        """The model's head for multi-token prediction, if it has one."""
        return self.passes.loaded.mtp

    @property
    def most_verified(self) -> int:
        """Most tokens of a pass with a draft; 0: there can be none, or another answer has one."""
        return 0 if self.rollback.in_use else self.passes.most_successive

    def can_verify(self) -> bool:
        """Whether passes with drafts give the logits of passes of single tokens; tried out once.

        Raises:
            MoechatError: As :meth:`PassRunner.run`.
        """
        return self.passes.try_successive()

    def verify(
        self, latest: Sequence[int], draft: Sequence[int], cache: Any
    ) -> Sequence[torch.Tensor] | None:
        """Compute the latest tokens of an answer and a draft behind them in one pass.

        :attr:`rollback` can take the cache back from the draft then.

        Args:
            latest: Known tokens, at least one.
            draft: Guessed tokens; with the others at most :attr:`most_verified`.
            cache: As for :meth:`step`, and so are the errors.

        Returns:
            Logits, ``[vocabulary]`` each: those behind the last known token and behind each guess;
            ``None``, without any change, if the cache cannot take them.
        """
        tokens = [*latest, *draft]
        known, guesses = len(latest), len(draft)
        room = self.rollback.begin(cache, known, guesses) if draft else make_room(cache, known)
        rows = None
        try:
            if room:
                rows = self.passes.run_successive(tokens, cache, self.rollback.copies(cache))
        finally:
            if rows is None:
                self.rollback.forget(cache)
        return None if rows is None else rows[len(latest) - 1 :].unbind()

    def feed(self, tokens: Sequence[int], cache: Any) -> tuple[torch.Tensor, Any]:
        """Compute tokens in the passes of a prompt; arguments, result and errors as for :meth:`step`."""
        ids = torch.tensor([list(tokens)])
        for chunks in self.waves(self.parts(ids, ids.shape[1])):
            logits, cache = self.advance(chunks, cache)
        return logits, cache

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens of a text, in one pass or in parts.

        Args:
            ids: int64 ``[1, tokens]``, at least one.

        Returns:
            float32 ``[tokens, vocabulary]``.

        Raises:
            NotFiniteError: The last row is not finite.
        """
        found = self._logits(ids)
        require_finite(found[-1])
        return found

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        parts, loaded = self.parts(ids, ids.shape[1]), self.passes.loaded
        if len(parts) == 1 and loaded.cache.bits == PLAIN_KV_BITS:
            # Without a cache: it would hold just what the pass computes with anyway.
            result: torch.Tensor = self.passes.run(ids, use_cache=False).logits[0].cpu().float()
            return result
        if loaded.accelerator is not None:
            self.prompt_cache.drop()  # the plan reserves a GPU's memory for one cache
        cache, done = self.new_cache(), 0
        found = torch.empty(0)

        def take(begin: int, output: Any) -> None:
            nonlocal found
            rows = output.logits[0]
            if len(found) == 0:
                with torch.inference_mode(False):
                    found = torch.empty((ids.shape[1], rows.shape[-1]), dtype=torch.float32)
            found[done + begin : done + begin + len(rows)] = rows

        for chunks in self.waves(parts):
            output = None
            if len(chunks) > 1:
                output = self.passes.run_wave(chunks, cache, tick=lambda _: None, each=take)
            if output is not None:
                done += sum(part.shape[1] for part in chunks)
                continue
            for part in chunks:
                output = self.passes.run(part, cache)
                cache = cache_of(output)
                take(0, output)
                done += part.shape[1]
        return found

    # ---- answers

    def answer_text(self, stops: Sequence[str]) -> AnswerText:
        """What makes text of an answer's tokens, which ends at one of the stops."""
        return AnswerText(self._tokenizer, stops, self.stop_tokens)

    def take_cache(self, prompt: list[int]) -> CachedTokens:
        """An attention cache for an answer to a prompt, with the tokens that earlier answers left in it."""
        self.rollback.release()  # a wave needs this memory
        held = self.prompt_cache.take(prompt, self.passes.loaded.cache.appendable)
        if held.cache is None:
            try:
                held.cache = self.new_cache(held.capacity)
            except BaseException:
                self.prompt_cache.give_up(held)
                raise
        mtp = self.mtp
        if mtp is not None and held.mtp is None:
            try:
                held.mtp = mtp.new_cache(held.capacity or self.passes.loaded.plan.context)
            except BaseException:
                self.prompt_cache.give_up(held)
                raise
        return held

    def reserve(self, held: CachedTokens, tokens: int) -> None:
        """Give a cache of :meth:`take_cache` memory for so many tokens; other conversations make room."""
        if self.prompt_cache.grow(held, tokens):
            reserve_tokens(held.cache, held.capacity)
            if held.mtp is not None:
                reserve_tokens(held.mtp, held.capacity)

    def begin_stats(self, prompt: int, reused: int, seed: int) -> Stats:
        """The statistics of an answer that begins; :attr:`stats` are these from now on."""
        before = self.stats
        self.stats = Stats(
            load_s=before.load_s,
            prompt_tokens=prompt,
            reused_tokens=reused,
            seed=seed,
            pages=before.pages,
            page_bytes=before.page_bytes,
            budget_bytes=before.budget_bytes,
            dense_weights=before.dense_weights,
            kv_bits=before.kv_bits,
            kv_bytes=before.kv_bytes,
        )
        return self.stats

    def choose_copies(self, held: CachedTokens, parts: list[torch.Tensor], prompt: int) -> None:
        """Choose at which ends of the parts of a prompt states are copied."""
        loaded = self.passes.loaded
        ends, end = [], len(held.tokens)
        for part in parts if prompt <= loaded.cache.appendable else ():
            end += part.shape[1]
            if part.shape[1] == loaded.chunk:
                ends.append(end)
        held.begin(ends, loaded.cache.copies)

    def begin_request(self, key: object, prompt: Sequence[int]) -> None:
        """An answer begins; ``key`` stands for it. :meth:`end_request` has to follow."""
        near = self.passes.loaded.near
        if near is not None:
            near.begin_request(key, prompt)

    def begin_token(self, key: object, token: int) -> None:
        """The pass of a token of an answer begins."""
        near = self.passes.loaded.near
        if near is not None:
            near.begin_pass(key, token)

    def end_request(self, key: object) -> None:
        """An answer has ended; harmless when repeated."""
        near = self.passes.loaded.near
        if near is not None:
            near.end_request(key)

    def token_done(self, seconds: float, *, alone: bool) -> None:
        """Count a token, which took so long; ``alone``: its pass had no other token of its answer."""
        upkeep = self.passes.loaded.upkeep
        if upkeep is not None:
            upkeep.step(seconds, alone=alone)

    def keep(self, held: CachedTokens, tokens: list[int], prompt: int) -> None:
        """Keep the attention cache of an answer that has ended, and do what comes after answers.

        Args:
            held: From :meth:`take_cache`.
            tokens: Tokens that were computed.
            prompt: Tokens of the prompt.
        """
        loaded = self.passes.loaded
        if loaded.upkeep is not None:
            loaded.upkeep.answer_done()
        if held.cache is not None and loaded.model is not None:
            # An interrupted pass leaves layers of different lengths; the cache drops the longer tails.
            self.prompt_cache.keep(held, tokens, prompt, copied=prompt <= loaded.cache.appendable)
            self.cached_tokens = self.prompt_cache.tokens
        else:
            self.prompt_cache.give_up(held)


def _room(loaded: LoadedModel) -> CacheRoom | None:
    """The memory that caches share; ``None`` where each takes that of a whole context at once."""
    if loaded.accelerator is not None or not loaded.cache.reserved:
        return None
    shapes = [loaded.cache] if loaded.mtp is None else [loaded.cache, loaded.mtp.cache]

    def nbytes(tokens: int) -> int:
        return sum(shape.nbytes(tokens) for shape in shapes)

    return CacheRoom(nbytes, loaded.plan.context, loaded.conversations)
