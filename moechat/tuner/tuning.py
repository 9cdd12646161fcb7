"""The tuner of one loaded model: recalls a choice or times plans, applies the winner, and remembers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

import moechat
from moechat import _native
from moechat.config import user_paths
from moechat.configurator.systems import CacheSettings
from moechat.hardware.identity import this_machine
from moechat.loading import LoadedModel
from moechat.offload.planner import TierTargets
from moechat.offload.settings import LinkSettings
from moechat.offload.tier import ExpertTier
from moechat.tuner.candidates import DEFAULT, MAPPED, PLAIN, Candidate, candidates
from moechat.tuner.choice import Choice, Timing, choose
from moechat.tuner.passes import Sequences
from moechat.tuner.remembered import Remembered, TuningKey, recall, remember
from moechat.tuner.timing import Timed, time_candidates

State = Literal["measured", "remembered", "skipped"]


@dataclass(frozen=True)
class Tuning:
    """The result of the tuner.

    Attributes:
        state: ``measured`` now, ``remembered`` from an earlier start, or ``skipped``.
        winner: Name of the candidate that is in effect.
        title: Description of the winner, for people.
        why: For people, a sentence without a period.
        measured: When the timings were taken, ISO 8601 in UTC; empty if there are none.
        timings: Of the candidates.
        left_out: Candidates for which there was no time.
        same_as: Candidates left out because they equal another one: name, and the other's name.
        seconds: Time taken now.
        kept: The choice was written to the user's directory, or came from there.
    """

    state: State
    winner: str
    title: str
    why: str
    measured: str = ""
    timings: tuple[Timing, ...] = ()
    left_out: tuple[str, ...] = ()
    same_as: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    kept: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values; medians and spreads in milliseconds."""
        return {
            "state": self.state,
            "winner": self.winner,
            "title": self.title,
            "why": self.why,
            "measured": self.measured,
            "seconds": self.seconds,
            "kept": self.kept,
            "left_out": list(self.left_out),
            "same_as": dict(self.same_as),
            "candidates": [
                {
                    "name": timing.name,
                    "rounds": timing.rounds,
                    "token_ms": 1000 * timing.token_seconds if timing.rounds else None,
                    "spread_ms": 1000 * timing.token_spread,
                    "prompt_ms": 1000 * timing.prompt_seconds if timing.prefill else None,
                }
                for timing in self.timings
            ],
        }


def skipped(why: str) -> Tuning:
    """The result when nothing was timed and the computed plan stays."""
    return Tuning("skipped", DEFAULT, "the computed plan", why)


class Tuner:
    """Times plans on a loaded model.

    Args:
        loaded: With a near tier.
        link: Fills the near tier.
        sequences: Text to decode, apart from the user's, with an attention cache of its own.
        may_map: Whether the store may be mapped; ``None``: if no budget was given.
        directory: Where choices are kept; ``None``: in the user's state directory.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        link: LinkSettings,
        sequences: Callable[[], Sequences],
        *,
        may_map: bool | None = None,
        directory: Path | None = None,
    ) -> None:
        assert loaded.near is not None
        self._loaded = loaded
        self._near: ExpertTier = loaded.near
        self._link = link
        self._sequences = sequences
        self._may_map = not loaded.plan.given if may_map is None else may_map
        self._directory = directory
        self._settings = self._near.first_settings
        found = candidates(self._settings, self._near.top_k, may_map=self._may_map)
        self._candidates, self._plans, self._same_as = _distinct(found, self._near)

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates that differ from each other, most important first."""
        return list(self._candidates)

    @property
    def plain(self) -> str:
        """Name of the candidate that the winner must not be slower than."""
        wanted = MAPPED if self._may_map else PLAIN
        return self._same_as.get(wanted, wanted)

    def use(self, name: str) -> Candidate:
        """Make a candidate take effect, at once and without moving a block.

        Raises:
            KeyError: There is no such candidate.
        """
        name = self._same_as.get(name, name)
        candidate = {candidate.name: candidate for candidate in self._candidates}[name]
        if candidate.settings is None:
            self._loaded.map_experts()
            return candidate
        self._near.switch(candidate.settings, self._plans[name])
        self._loaded.page_experts()
        return candidate

    def recall(self) -> Tuning | None:
        """Apply the choice of an earlier start, if there is one."""
        entry = self._recalled()
        if entry is None or not entry.decided:
            return None
        try:
            candidate = self.use(entry.winner)
        except KeyError:
            return None
        return Tuning(
            "remembered", candidate.name, candidate.title, entry.why, entry.measured, entry.timings, kept=True
        )

    def run(self, limit_s: float, report: Callable[[float], None] = lambda _: None) -> Tuning:
        """Time the candidates, apply the winner and remember it.

        An earlier start may have ended after too few rounds; the new ones are added to these. If not even one
        round fits into the time, the method ends at once, and the computed plan stays.

        Args:
            limit_s: Seconds after which no further token is begun.
            report: Called with the share of that time that has passed.

        Raises:
            Exception: Errors of decoding, KeyboardInterrupt included; the computed plan is in effect again.
        """
        upkeep = self._loaded.upkeep
        if upkeep is not None:
            upkeep.collect()
        try:
            timed = time_candidates(
                self._candidates,
                self._sequences(),
                lambda candidate: self._take_turns(candidate.name),
                limit_s=limit_s,
                hardness=self._hardness,
                report=report,
            )
            timings, choice = self._decide(timed)
        except BaseException:
            self.use(DEFAULT)
            raise
        finally:
            if upkeep is not None:
                upkeep.discard()
        if not any(timing.rounds for timing in timed.timings):
            self.use(DEFAULT)
            why = f"a token takes {timed.pace:.2g} s, too long to time plans within {limit_s:g} s"
            return replace(skipped(why), seconds=timed.seconds)
        winner = self.use(choice.winner)
        measured = datetime.now(UTC).isoformat(timespec="seconds")
        return Tuning(
            "measured",
            winner.name,
            winner.title,
            choice.why,
            measured,
            timings,
            timed.left_out,
            self._same_as,
            timed.seconds,
            self._keep(choice, timings, measured),
        )

    def _hardness(self) -> float | None:
        """Activations so far that would have missed the experts of the computed plan.

        The near tier ranks experts by the policy, which sees the same text under every plan.
        """
        ranks = self._near.routing_statistics().ranks
        kept = self._plans[DEFAULT].targets[:, :1]
        return float(ranks[np.arange(ranks.shape[1])[None, :] >= kept].sum())

    def _take_turns(self, name: str) -> None:
        # Transfers that the previous turn has queued must not count for this one.
        self._near.drain()
        self.use(name)

    def _decide(self, timed: Timed) -> tuple[tuple[Timing, ...], Choice]:
        timings = timed.timings
        before = self._recalled()
        if before is not None and not before.decided:
            timings = _together(before.timings, timings)
        return timings, choose(timings, default=DEFAULT, plain=self.plain)

    # ---- memory

    def _key(self) -> TuningKey:
        store = self._loaded.store
        return TuningKey(
            machine=this_machine().key,
            model=store.manifest.source.fingerprint,
            bits=store.geometry.bits,
            threads=_native.num_threads(),
            dtype=str(self._loaded.dtype).removeprefix("torch."),
            # As asked for: what is chosen for them may change with the routing that has been seen.
            settings=f"{self._near.wanted} {self._link} replayed={self._near.replay is not None}",
            version=moechat.__version__,
            dense_bits=self._loaded.form.bits,
            activation_bits=self._loaded.form.activation_bits,
        )

    def _place(self) -> Path:
        return user_paths().state / "tuning" if self._directory is None else self._directory

    def _recalled(self) -> Remembered | None:
        try:
            return recall(self._place(), self._key(), pages=self._near.pages, may_map=self._may_map)
        except Exception:  # identifying the machine may fail anywhere; the chat must start
            return None

    def _keep(self, choice: Choice, timings: Sequence[Timing], measured: str) -> bool:
        if not any(timing.rounds for timing in timings):
            return False
        before = self._recalled()
        if not choice.decided and before is not None and before.decided:
            return False
        entry = Remembered(
            self._near.pages,
            self._may_map,
            choice.winner,
            choice.why,
            choice.decided,
            measured,
            tuple(timings),
        )
        try:
            remember(self._place(), self._key(), entry)
        except Exception:  # the directory cannot be written; the choice is used once
            return False
        return True


def _distinct(
    found: Sequence[Candidate], near: ExpertTier
) -> tuple[list[Candidate], dict[str, TierTargets], dict[str, str]]:
    """Candidates that differ, their plans, and for each of the others the candidate that it equals."""
    kept: list[Candidate] = []
    plans: dict[str, TierTargets] = {}
    same_as: dict[str, str] = {}
    for candidate in found:
        if candidate.settings is None:
            kept.append(candidate)
            continue
        plan = near.plan_for(candidate.settings)
        twin = next(
            (
                other.name
                for other in kept
                if other.settings is not None
                and np.array_equal(plans[other.name].targets, plan.targets)
                and _alike(other.settings, candidate.settings)
            ),
            None,
        )
        if twin is not None:
            same_as[candidate.name] = twin
            continue
        kept.append(candidate)
        plans[candidate.name] = plan
    return kept, plans, same_as


def _alike(one: CacheSettings, other: CacheSettings) -> bool:
    """Whether two settings are equal except for the derivation of their targets."""
    return replace(one, allocation="uniform", split=1.0) == replace(other, allocation="uniform", split=1.0)


def _together(before: Sequence[Timing], now: Sequence[Timing]) -> tuple[Timing, ...]:
    """Both timings joined, if they are of the same candidates; else the new ones."""
    old = {timing.name: timing for timing in before}
    if old.keys() != {timing.name for timing in now}:
        return tuple(now)
    return tuple(
        Timing(
            timing.name, old[timing.name].decode + timing.decode, old[timing.name].prefill + timing.prefill
        )
        for timing in now
    )
