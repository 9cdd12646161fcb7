"""Tunes a model from beginning to end: data, measuring, training, merging, measuring again, saving."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from moechat.errors import UsageError
from moechat.hub.model_ref import ModelRef
from moechat.loading.model import Report
from moechat.tune.adapted import AdaptedModel
from moechat.tune.batches import split
from moechat.tune.data import DataSet, Example, read_data
from moechat.tune.measure import Measurement, measure
from moechat.tune.preload_training import PromptRouting, covered_share, record_prompts, train_preload
from moechat.tune.run_state import read_state, state_directory
from moechat.tune.settings import TuneSettings
from moechat.tune.source import TuneSource, build_model, load_source_tokenizer, memory_errors, open_source
from moechat.tune.training import RunPlan, StepLosses, train
from moechat.tune.tuned_checkpoint import require_absent, write_checkpoint

_MEMORY_HINT = "lower --micro-batch or --max-tokens, or tune on a machine with more memory"
_EXTRA = ("peft", "accelerate")


class TuneEvents(Protocol):
    """Receives what a run does."""

    def phase(self, title: str, total: int) -> None:
        """A part of the work begins; ``total`` steps, 0 if unknown."""

    def advance(self, done: int, detail: str = "") -> None:
        """``done`` steps of the part are done."""

    def notice(self, text: str) -> None:
        """A line to show."""


@dataclass(frozen=True)
class TuneJob:
    """What is tuned, with what, and where to.

    Attributes:
        ref: The model.
        data: JSON Lines file.
        out: Directory of the tuned checkpoint, which must not exist.
        settings: See there.
        micro_batch: Sequences that go through the model together.
        cpu: Compute on the CPU even if there is a GPU.
        save_every_s: Seconds between two states of the run.
    """

    ref: ModelRef
    data: Path
    out: Path
    settings: TuneSettings
    micro_batch: int = 4
    cpu: bool = False
    save_every_s: float = 60.0


@dataclass(frozen=True)
class TuneResult:
    """What a run has reached.

    Attributes:
        model: Name of the original.
        out: The tuned checkpoint.
        settings: See there.
        trained: Trained sequences.
        held_out: Held-out sequences.
        before: The original on held-out data; ``None`` without any.
        after: The tuned model, as it is saved.
        covered: Share of the choices of held-out answers that are among the C experts that the predictor
            ranks highest; ``None`` without a predictor or held-out prompts.
        covered_by_popularity: The same for the C experts that are chosen most in the trained data.
        seconds: That this command took.
        processes: That have worked together.
        is_main: Whether this process writes the result, one of several.
    """

    model: str
    out: Path
    settings: TuneSettings
    trained: int
    held_out: int
    before: Measurement | None
    after: Measurement | None
    covered: float | None
    covered_by_popularity: float | None
    seconds: float
    processes: int
    is_main: bool

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": self.model,
            "out": str(self.out),
            "settings": self.settings.facts(),
            "trained_sequences": self.trained,
            "held_out_sequences": self.held_out,
            "before": None if self.before is None else self.before.facts(),
            "after": None if self.after is None else self.after.facts(),
            "preload_covered": self.covered,
            "preload_covered_by_popularity": self.covered_by_popularity,
            "seconds": self.seconds,
            "processes": self.processes,
        }


def require_extra() -> None:
    """Check that the packages of the extra ``tune`` are installed.

    Raises:
        UsageError: One is not.
    """
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"tuning needs packages that are not installed: {', '.join(missing)}",
            hint='pip install "moechat[tune]"',
        )


def tune(job: TuneJob, report: Report, events: TuneEvents) -> TuneResult:
    """Tune a model; one of several processes if accelerate has launched them.

    Args:
        job: What to do.
        report: Receives the progress of opening the model.
        events: Receives everything else.

    Raises:
        KeyboardInterrupt: It was interrupted; the same job goes on.
        MoechatError: See :mod:`moechat.errors`.
    """
    started = time.monotonic()
    require_extra()
    require_absent(job.out)
    source = open_source(job.ref, report)
    data = read_data(job.data, load_source_tokenizer(source), job.settings.max_tokens)
    with memory_errors(_MEMORY_HINT):
        result = _Run(job, source, data, events).work()
    return replace(result, seconds=time.monotonic() - started)


def start_accelerator(gpu: bool, *, half: bool | None = None) -> tuple[Any, torch.dtype]:
    """Accelerate's accelerator for this process, and the type of the weights that are not trained.

    Args:
        gpu: Compute on a GPU.
        half: Compute in bf16; by default on a GPU.
    """
    from accelerate import Accelerator

    half = gpu if half is None else half
    accelerator = Accelerator(cpu=not gpu, mixed_precision="bf16" if half else "no")
    return accelerator, torch.bfloat16 if half else torch.float32


class _Run:
    """One run."""

    def __init__(self, job: TuneJob, source: TuneSource, data: DataSet, events: TuneEvents) -> None:
        self._job, self._source, self._events = job, source, events
        self._trained, self._held_out = split(data.examples, job.settings.held_out, job.settings.seed)
        self._accelerator, self._dtype = start_accelerator(torch.cuda.is_available() and not job.cpu)
        identity = {
            **job.settings.facts(),
            "data": data.sha256,
            "model": source.fingerprint,
            # Two data types round differently.
            "computed_in": str(self._dtype),
        }
        self._plan = RunPlan(
            self._trained,
            job.settings,
            job.micro_batch,
            state_directory(job.out),
            identity,
            job.save_every_s,
        )
        if data.cut or data.dropped:
            events.notice(
                f"{job.data}: {data.cut:,} sequences are cut to {job.settings.max_tokens} tokens; "
                f"{data.dropped:,} of them are left out, as their answer begins later"
            )

    def work(self) -> TuneResult:
        """All parts in turn."""
        job, events, accelerator = self._job, self._events, self._accelerator
        state = read_state(self._plan.directory, self._plan.identity)
        events.phase("loading the model", 0)
        model, entries = build_model(self._source, self._dtype)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(limit, int) and job.settings.max_tokens > limit:
            raise UsageError(f"--max-tokens is {job.settings.max_tokens}; the model takes at most {limit}")
        adapted = AdaptedModel(model, entries, job.settings).to(accelerator.device)
        if state is None:
            before = self._measure(adapted.model, adapted, "measuring the original")
        else:
            kept = state["progress"]["before"]
            before = None if kept is None else Measurement.of_facts(kept)
            events.notice(f"going on at step {state['progress']['step']:,} of {self._plan.steps:,}")
        self._train(adapted, state, before)
        merged = adapted.merge(self._source.dtype)
        after = self._measure(merged, adapted, "measuring the tuned model")
        predictor, covered, popular = self._preload(merged, adapted)
        result = TuneResult(
            self._source.name,
            job.out,
            job.settings,
            len(self._trained),
            len(self._held_out),
            before,
            after,
            covered,
            popular,
            0.0,
            int(accelerator.num_processes),
            bool(accelerator.is_main_process),
        )
        if accelerator.is_main_process:
            events.phase("writing the tuned model", 0)
            facts = {name: value for name, value in result.facts().items() if name not in ("out", "seconds")}
            write_checkpoint(job.out, merged, self._source.directory, self._source.dtype, facts, predictor)
            shutil.rmtree(self._plan.directory, ignore_errors=True)
        accelerator.wait_for_everyone()
        return result

    def _train(self, adapted: AdaptedModel, state: dict[str, Any] | None, before: Measurement | None) -> None:
        steps = self._plan.steps
        self._events.phase("tuning", steps)

        def advance(done: int, losses: StepLosses) -> None:
            self._events.advance(
                done, f"loss {losses.nll:.3f}, cache {losses.cache:.3f}, order {losses.rank:.2f}"
            )

        progress = {"before": None if before is None else before.facts()}
        try:
            train(self._plan, adapted, self._accelerator, state, progress, advance)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, or a signal
                self._events.notice("stopped; the same command goes on")
            raise

    def _measure(self, model: Any, adapted: AdaptedModel, title: str) -> Measurement | None:
        if not self._held_out:
            return None
        accelerator = self._accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        self._events.phase(title, len(self._held_out[rank::world]))

        def add_up(values: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = accelerator.reduce(values.to(accelerator.device), reduction="sum")
            return found.cpu()

        with accelerator.autocast():
            return measure(
                model,
                adapted.taps,
                self._held_out,
                gamma=self._job.settings.gamma,
                size=self._job.micro_batch,
                device=accelerator.device,
                rank=rank,
                world=world,
                add_up=add_up,
                advance=self._events.advance,
            )

    def _preload(self, merged: Any, adapted: AdaptedModel) -> tuple[Any, float | None, float | None]:
        """The predictor, and the shares of choices that it and popularity cover."""
        if not self._job.settings.preload:
            return None, None, None
        trained = self._record(merged, adapted, self._trained)
        held_out = self._record(merged, adapted, self._held_out)
        if not self._accelerator.is_main_process or not trained:
            return None, None, None
        self._events.phase("training the predictor", 0)
        predictor = train_preload(trained, adapted.embed, self._job.settings)
        if not held_out:
            return predictor, None, None
        capacity = self._job.settings.capacity_of(adapted.taps.experts)
        popular = np.sum([prompt.counts for prompt in trained], 0)
        return (
            predictor,
            covered_share(lambda prompt: predictor.scores(prompt.prompt), held_out, capacity),
            covered_share(lambda _prompt: popular, held_out, capacity),
        )

    def _record(self, merged: Any, adapted: AdaptedModel, examples: Sequence[Example]) -> list[PromptRouting]:
        accelerator = self._accelerator
        own = list(examples[accelerator.process_index :: accelerator.num_processes])
        self._events.phase("recording experts by prompt", len(own))
        with accelerator.autocast():
            found = record_prompts(
                merged,
                adapted.taps,
                own,
                adapted.embed,
                size=self._job.micro_batch,
                device=accelerator.device,
                advance=self._events.advance,
            )
        if accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            found = gather_object(found)
        return found


def is_main_process() -> bool:
    """Whether this process prints; of processes that a launcher has started, only the first does."""
    return os.environ.get("RANK", "0") == "0"
