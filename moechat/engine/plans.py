"""Changes the plan of a loaded model's experts between answers: new plans, and timed choices among plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moechat.engine.decoder import Decoder
from moechat.engine.prompt import PromptEncoder
from moechat.engine.recovery import PassRunner
from moechat.engine.stats import Meter
from moechat.loading import Progress
from moechat.offload.settings import LinkSettings
from moechat.offload.upkeep import Replanned, Upkeep
from moechat.tuner import MAPPED, Sequences, Tuner, Tuning, skipped
from moechat.validation import require_bool, require_callable, require_number

_MOST_TUNE_SECONDS = 86400.0


class PlanKeeper:
    """Replans and tunes one loaded model.

    Args:
        passes: Runs the model.
        decoder: Of the model.
        prompts: Encoder of the model.
        meter: Restarted after passes that belong to no answer.
        link: Over which the near tier is filled; a part of the key under which choices are remembered.

    Attributes:
        tuning: Result of the last :meth:`tune`; ``None`` before.
    """

    def __init__(
        self, passes: PassRunner, decoder: Decoder, prompts: PromptEncoder, meter: Meter, link: LinkSettings
    ) -> None:
        self.tuning: Tuning | None = None
        self._passes = passes
        self._decoder = decoder
        self._prompts = prompts
        self._meter = meter
        self._link = link

    @property
    def mapped(self) -> bool:
        """Whether the tuner has replaced the pages by the mapped store."""
        return self.tuning is not None and self.tuning.winner == MAPPED

    def maintain(self, action: Callable[[Upkeep], Replanned | None]) -> Replanned | None:
        """Run a method of the near tier's upkeep; ``None`` where experts are mapped.

        Raises:
            MoechatError: Another thread closes the engine at the same time, or this process is a forked one.
        """
        upkeep = self._passes.loaded.upkeep
        if upkeep is None:
            return None
        with self._passes.translate_native_errors():
            return action(upkeep)

    def tune(
        self,
        limit_s: float,
        *,
        again: bool,
        may_map: bool | None,
        progress: Callable[[Progress], None] | None,
    ) -> Tuning:
        """Recall a choice of plan or time the candidates; see :meth:`Engine.tune`."""
        limit_s = require_number("limit_s", limit_s, 0.0, _MOST_TUNE_SECONDS)
        require_bool("again", again)
        if may_map is not None:
            require_bool("may_map", may_map)
        require_callable("progress", progress)
        self._passes.usable_model()
        if self._passes.loaded.upkeep is not None:
            self._passes.loaded.upkeep.busy()  # its transfers would be timed too
        self.tuning = self._tune(limit_s, again, may_map, progress)
        if self.mapped:
            self._release_pages()
        return self.tuning

    def _tune(
        self,
        limit_s: float,
        again: bool,
        may_map: bool | None,
        progress: Callable[[Progress], None] | None,
    ) -> Tuning:
        loaded, decoder = self._passes.loaded, self._decoder
        if loaded.near is None:
            if self.tuning is not None and self.mapped:
                return self.tuning
            return skipped("all experts are in memory, so there is nothing to choose")
        tuner = Tuner(loaded, self._link, self._sequences, may_map=may_map)
        found = None if again else tuner.recall()
        if found is not None:
            return found
        # The plan reserves a GPU's memory for one cache.
        room = 0 if loaded.accelerator is not None else loaded.plan.context - Sequences.MOST_TOKENS
        if 0 < decoder.cached_tokens > room:
            return skipped("the conversation takes the memory of the attention cache")
        if limit_s <= 0:
            return skipped("nothing is remembered for this model and budget")
        self.tuning = skipped("it was interrupted")  # stays if an exception leaves this method
        try:
            with self._passes.translate_native_errors():
                return _run(tuner, limit_s, progress)
        finally:
            if self._passes.loaded.near is not None:
                self._meter.restart()

    def _sequences(self) -> Sequences:
        decoder, prompts = self._decoder, self._prompts
        return Sequences(
            decoder.step,
            decoder.new_cache,
            None if prompts.tokenizer is None else prompts.encode,
            vocabulary=decoder.vocabulary,
            stop=frozenset(decoder.stop_tokens),
            most_tokens=self._passes.loaded.plan.context,
        )

    def _release_pages(self) -> None:
        """Free the pages: the experts are mapped now, and the page cache holds what they held."""
        near, upkeep = self._passes.loaded.near, self._passes.loaded.upkeep
        self._meter.close()
        if upkeep is not None:
            upkeep.close()
        if self._passes.loaded.check is not None:
            self._passes.loaded.check.mapped = True
        self._passes.loaded = replace(self._passes.loaded, near=None, upkeep=None)
        self._decoder.stats = replace(self._decoder.stats, pages=0)
        if near is not None:
            near.close()


def _run(tuner: Tuner, limit_s: float, progress: Callable[[Progress], None] | None) -> Tuning:
    if progress is None:
        return tuner.run(limit_s)
    report, total = progress, round(1000 * limit_s)
    return tuner.run(limit_s, lambda share: report(Progress("tune", round(share * total), total)))
