"""Computes prompts in parts, decodes token by token, and keeps the attention cache between answers."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moechat.engine.answer import AnswerSettings, AnswerText, TokenChooser
from moechat.engine.grammar import GrammarCompiler
from moechat.engine.recovery import PassRunner
from moechat.engine.stats import Meter, Stats
from moechat.geometry import PLAIN_KV_BITS
from moechat.models.prompt_cache import CachedTokens, PromptCache
from moechat.models.waves import Passed
from moechat.steps import Step


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
        self.prompt_cache = PromptCache(passes.loaded.conversations)
        self.cached_tokens = 0
        self._passes = passes
        self._meter = meter
        self._tokenizer = tokenizer
        self._one_pass_noted = False
        model = passes.usable_model()
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self.grammars = GrammarCompiler(tokenizer, self.vocabulary, stop_tokens)
        # Without it the head computes logits for every token of the prompt.
        parameters = inspect.signature(model.forward).parameters
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def new_cache(self) -> Any:
        """An empty attention cache; ``None`` where the model makes its own, and after closing."""
        loaded = self._passes.loaded
        return None if loaded.model is None else loaded.cache.new(loaded.model.config, loaded.plan.context)

    def parts(self, ids: torch.Tensor, prompt: int) -> list[torch.Tensor]:
        """Split the tokens that are still to be computed into passes.

        Args:
            ids: int64 ``[1, tokens]``.
            prompt: Tokens of the whole prompt, those that the cache holds included.
        """
        loaded = self._passes.loaded
        if prompt <= loaded.cache.appendable:
            return list(torch.split(ids, loaded.chunk, dim=1))
        note = loaded.cache.note_of_one_pass(prompt)
        if prompt > loaded.chunk and note and not self._one_pass_noted:
            self._one_pass_noted = True
            self._passes.notes.append(note)
        return [ids]

    def waves(self, parts: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Group the passes of a prompt into waves; a group of one is a pass.

        A last pass of one token stays alone: it is computed like a decoded one.
        """
        loaded = self._passes.loaded
        count = loaded.plan.wave // loaded.chunk
        if loaded.near is None or count < 2 or loaded.chunk < 2:
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
    ) -> tuple[torch.Tensor, Any]:
        """Compute the chunks of a wave, or one pass, behind the tokens in a cache.

        Args:
            chunks: From :meth:`waves`.
            cache: As for :meth:`step`; result and errors too.
            computed: Called with the number of tokens that are done, or as good as done.
            passed: As for :meth:`PassRunner.run_wave`.
            ended: Called at the end of each chunk, in a wave at the end of the wave, with the number of
                tokens.
        """
        total, done = sum(chunk.shape[1] for chunk in chunks), 0
        if len(chunks) > 1:
            output = self._passes.run_wave(
                chunks,
                cache,
                tick=lambda share: computed(int(share * total)),
                passed=passed,
                **self._last_only,
            )
            if output is not None:
                for chunk in chunks:
                    done += chunk.shape[1]
                    ended(done)
                computed(total)
                return output.logits[0, -1], output.past_key_values
        for chunk in chunks:
            logits, cache = self.step(chunk, cache)
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
        output = self._passes.run(ids, past_key_values=cache, use_cache=True, **self._last_only)
        return output.logits[0, -1], output.past_key_values

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
        """
        parts, loaded = self.parts(ids, ids.shape[1]), self._passes.loaded
        if len(parts) == 1 and loaded.cache.bits == PLAIN_KV_BITS:
            # Without a cache: it would hold just what the pass computes with anyway.
            result: torch.Tensor = self._passes.run(ids, use_cache=False).logits[0].cpu().float()
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
                output = self._passes.run_wave(chunks, cache, tick=lambda _: None, each=take)
            if output is not None:
                done += sum(part.shape[1] for part in chunks)
                continue
            for part in chunks:
                output = self._passes.run(part, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                take(0, output)
                done += part.shape[1]
        return found

    def answer_in_turns(
        self,
        ids: torch.Tensor,
        settings: AnswerSettings,
        *,
        started: float,
        progress: Callable[[int, int], None],
    ) -> Generator[Step | None, None, None]:
        """Compute a prompt, then draw tokens until the model stops.

        Other answers may be computed between two items. Each has an attention cache of its own.

        Args:
            ids: The prompt, int64 ``[1, tokens]``.
            settings: How tokens are drawn, and where the answer ends.
            started: When the answer was requested, on ``time.perf_counter``'s clock.
            progress: Called before the first and after each part of the prompt with the tokens computed so
                far (or already cached) and the tokens of the prompt; its own time counts too. In a wave it is
                called several times a layer, with the tokens that would have been computed in that time.

        Returns:
            A step for each token; ``None`` after each pass of the prompt but the last.

        Raises:
            MoechatError: As :meth:`PassRunner.run`, or the grammar needs too much memory.
        """
        chooser = TokenChooser(settings)
        text = AnswerText(self._tokenizer, settings.stops, self.stop_tokens)
        prompt = ids.shape[1]
        known: list[int] = ids[0].tolist()
        most = self._passes.loaded.cache.appendable
        held = self.prompt_cache.take(known, most)
        reused = len(held.tokens)
        if held.cache is None:
            held.cache = self.new_cache()
        before = self.stats
        self.stats = stats = Stats(
            load_s=before.load_s,
            prompt_tokens=prompt,
            reused_tokens=reused,
            seed=settings.seed,
            pages=before.pages,
            page_bytes=before.page_bytes,
            budget_bytes=before.budget_bytes,
            dense_weights=before.dense_weights,
            kv_bits=before.kv_bits,
            kv_bytes=before.kv_bytes,
        )
        parts = self.parts(ids[:, reused:], prompt)
        history, waves = ids, self.waves(parts)
        self._choose_copies(held, parts, prompt)
        first = 0.0
        computed = reused
        upkeep = self._passes.loaded.upkeep
        self._meter.start()
        try:
            progress(reused, prompt)
            for count in range(1, settings.limit + 1):
                begun = time.perf_counter()
                for chunks in waves:
                    held.whole = False
                    if computed < prompt:
                        logits, held.cache = self.advance(
                            chunks,
                            held.cache,
                            partial(_advanced, progress, computed, prompt),
                            partial(_passed, held, computed),
                            partial(_ended, held, computed),
                        )
                    else:
                        logits, held.cache = self.step(chunks[0], held.cache)
                    computed += sum(chunk.shape[1] for chunk in chunks)
                    held.whole = True
                    if computed < prompt:
                        stats = self._meter.add(stats)
                        yield None
                        self._meter.start()
                chosen = chooser.choose(history, logits.cpu())
                now = time.perf_counter()
                first = first or now
                if upkeep is not None:
                    upkeep.step(now - begun)
                self.stats = stats = replace(
                    self._meter.add(stats),
                    output_tokens=count,
                    ttft_s=first - started,
                    tpot_s=(now - first) / (count - 1) if count > 1 else 0.0,
                    busy_s=now - started,
                )
                step = text.step(chosen, complete=chooser.complete, last=count == settings.limit)
                yield step
                self._meter.start()
                if step.finish_reason:
                    return
                latest = torch.tensor([[step.token_id]])
                waves = [[latest]]
                history = torch.cat([history, latest], dim=1)
                known.append(step.token_id)
        finally:
            loaded = self._passes.loaded
            if upkeep is not None and upkeep is loaded.upkeep:
                upkeep.answer_done()
            if held.cache is not None and loaded.model is not None:
                # An interrupted pass leaves layers of different lengths; the cache drops the longer tails.
                self.prompt_cache.keep(held, known[:computed], prompt, copied=prompt <= most)
                self.cached_tokens = self.prompt_cache.tokens
            else:
                self.prompt_cache.give_up()

    def _choose_copies(self, held: CachedTokens, parts: list[torch.Tensor], prompt: int) -> None:
        """Choose at which ends of the parts of a prompt states are copied."""
        loaded = self._passes.loaded
        ends, end = [], len(held.tokens)
        for part in parts if prompt <= loaded.cache.appendable else ():
            end += part.shape[1]
            if part.shape[1] == loaded.chunk:
                ends.append(end)
        held.begin(ends, loaded.cache.copies)


def _ended(held: CachedTokens, before: int, done: int) -> None:
    held.reached(before + done)


def _passed(held: CachedTokens, before: int, number: int, done: int) -> None:
    held.layer_reached(number, before + done)


def _advanced(progress: Callable[[int, int], None], before: int, prompt: int, done: int) -> None:
    progress(before + done, prompt)
