"""The training loop: steps, the schedule of the rate, interrupts, and states to resume from."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from moechat.errors import MoechatError
from moechat.tune.adapted import AdaptedModel
from moechat.tune.batches import make_batch, micro_batches, share_of, step_examples, steps_of_epoch
from moechat.tune.data import Example
from moechat.tune.run_state import restore, save_state
from moechat.tune.settings import TuneSettings


@dataclass(frozen=True)
class StepLosses:
    """The parts of a step's loss.

    Attributes:
        nll: Per trained token.
        cache: L_cs, mean over sequences.
        rank: L_rm, mean over sequences.
    """

    nll: float
    cache: float
    rank: float


@dataclass(frozen=True)
class RunPlan:
    """What is trained, and where its state is kept.

    Attributes:
        examples: The trained sequences.
        settings: See there.
        micro_batch: Sequences of a pass.
        directory: Of the state.
        identity: Of the run, see :func:`moechat.tune.run_state.save_state`.
        save_every_s: Seconds between two states.
    """

    examples: Sequence[Example]
    settings: TuneSettings
    micro_batch: int
    directory: Path
    identity: Mapping[str, Any]
    save_every_s: float

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.settings.epochs * steps_of_epoch(len(self.examples), self.settings.batch)


def rate_factor(step: int, steps: int, warmup: float) -> float:
    """Factor of the peak rate at a step: rises to 1 in the ``warmup`` share, then falls linearly to 0."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return (steps - step) / max(1, steps - rising)


def make_optimizer(adapted: AdaptedModel, settings: TuneSettings) -> torch.optim.AdamW:
    """AdamW over all trained parameters."""
    parameters = list(adapted.trained().values())
    return torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def train(
    plan: RunPlan,
    adapted: AdaptedModel,
    accelerator: Any,
    state: Mapping[str, Any] | None,
    progress: Mapping[str, Any],
    advance: Callable[[int, StepLosses], None],
) -> None:
    """Train until the last step, from a state if there is one.

    Ctrl-C and SIGTERM end it after the step under way and the writing of its state; a second one at once.

    Args:
        plan: What is trained.
        adapted: The model, on the accelerator's device.
        accelerator: Of the accelerate library.
        state: Of an earlier run.
        progress: What states keep besides, such as the first measurement.
        advance: Called after each step with the number of steps done and the losses.

    Raises:
        KeyboardInterrupt: It was interrupted; the state is on the disk.
        MoechatError: A state cannot be written or does not fit, or a loss is not finite.
    """
    settings = plan.settings
    optimizer = make_optimizer(adapted, settings)
    step = 0
    if state is not None:
        restore(state, adapted.trained(), optimizer)
        step = int(state["progress"]["step"])
    module = accelerator.prepare_model(adapted)
    adapted.train()
    saved_at = time.monotonic()

    def save() -> None:
        if accelerator.is_main_process:
            now = {**progress, "step": step}
            save_state(plan.directory, plan.identity, adapted.trained(), optimizer, now)

    if state is None:
        save()
    with _deferred_signals() as signals:
        while step < plan.steps:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate_factor(step, plan.steps, settings.warmup)
            losses, stopped = _step(plan, adapted, module, optimizer, accelerator, step, bool(signals))
            if not all(map(math.isfinite, (losses.nll, losses.cache, losses.rank))):
                raise MoechatError(
                    f"the loss of step {step + 1:,} is not finite, so the weights are no longer of use",
                    hint="lower --learning-rate; the last state before it is kept",
                )
            step += 1
            advance(step, losses)
            if stopped or step == plan.steps or time.monotonic() - saved_at > plan.save_every_s:
                save()
                saved_at = time.monotonic()
            if stopped and step < plan.steps:
                break
    if signals:
        signal.raise_signal(signals[0])
    if step < plan.steps:  # another process was interrupted
        raise KeyboardInterrupt


def _step(
    plan: RunPlan,
    adapted: AdaptedModel,
    module: Any,
    optimizer: torch.optim.Optimizer,
    accelerator: Any,
    step: int,
    stop: bool,
) -> tuple[StepLosses, bool]:
    """One step; returns its losses, and whether any process wants to stop."""
    settings = plan.settings
    examples = step_examples(plan.examples, settings.batch, step, settings.seed)
    tokens = sum(sum(example.trained) for example in examples)
    torch.manual_seed(settings.seed + step)  # families with dropout
    world = accelerator.num_processes
    parts = share_of(micro_batches(examples, plan.micro_batch), accelerator.process_index, world)
    sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
    sums[3] = float(stop)
    for at, (part, counts) in enumerate(parts):
        # Gradients are exchanged once for a step.
        last = at == len(parts) - 1
        with nullcontext() if last else accelerator.no_sync(module):
            batch = make_batch(part).to(accelerator.device)
            nll, cache, rank = module(batch.ids, batch.trained, batch.tokens)
            cache, rank = cache / len(examples), rank / len(examples)
            loss = nll / tokens + settings.cache_weight * cache + settings.rank_weight * rank
            # The exchange takes the mean over processes.
            accelerator.backward(loss * (world if counts else 0.0))
            if counts:
                sums[:3] += torch.stack([nll.detach() / tokens, cache.detach(), rank.detach()]).double()
    if settings.clip:
        torch.nn.utils.clip_grad_norm_(adapted.trained().values(), settings.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    found = accelerator.reduce(sums, reduction="sum").tolist() if world > 1 else sums.tolist()
    return StepLosses(*found[:3]), found[3] > 0


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the list instead of raising; the second of a kind acts as before."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        # Only of the same kind: launchers of several processes send SIGTERM after a Ctrl-C that all have got.
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in numbers:
            signal.signal(number, receive)
        yield received
    finally:
        for number in numbers:
            signal.signal(number, before[number])
