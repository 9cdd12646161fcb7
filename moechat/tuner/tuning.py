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
from moechat.budget.tier_targets import TierTargets
from moechat.config import user_paths
from moechat.configurator.systems import CacheSettings
from moechat.hardware.identity import this_machine
from moechat.loading import LoadedModel
from moechat.offload.settings import LinkSettings
from moechat.offload.tier import ExpertTier
from moechat.trials import Comparison
from moechat.tuner.candidates import DEFAULT, MAPPED, PLAIN, Candidate, candidates
from moechat.tuner.choice import Choice, Timing, choose
from moechat.tuner.passes import Sequences
from moechat.tuner.racing import race
from moechat.tuner.remembered import Remembered, TuningKey, recall, remember

State = Literal["measured", "remembered", "skipped"]
# Starts whose times are kept.
MOST_SESSIONS = 8
# Tokens before a turn counts: with the targets of the turn before, what it has in flight still arrives; with
# others the cache has to change.
_SETTLE, _SETTLE_OTHER_TARGETS = 2, 4


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
        decided: No other candidate can be much faster; else the next start goes on.
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
    decided: bool = False
    same_as: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    kept: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``slower`` is a share of the computed plan's time, with its standard error."""
        return {
            "state": self.state,
            "winner": self.winner,
            "title": self.title,
            "why": self.why,
            "measured": self.measured,
            "seconds": self.seconds,
            "kept": self.kept,
            "decided": self.decided,
            "same_as": dict(self.same_as),
            "candidates": [
                {
                    "name": timing.name,
                    "tokens": timing.tokens,
                    "token_ms": 1000 * timing.token_seconds if timing.token_seconds else None,
                    "slower": None if timing.gap is None else timing.gap.share,
                    "slower_error": None if timing.gap is None else timing.gap.error,
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
        may_map: Whether the store may be mapped; ``None``: if no budget was given. On a GPU it never is.
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
        maps = not loaded.plan.given if may_map is None else may_map
        self._may_map = maps and self._near.placement.maps_experts
        self._directory = directory
        self._mapped = False
        self._settings = self._near.first_settings
        found = candidates(
            self._settings,
            self._near.top_k,
            may_map=self._may_map,
            far_computes=self._near.far_computes,
        )
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
            self._mapped = True
            return candidate
        self._near.switch(candidate.settings, self._plans[name])
        self._loaded.page_experts()
        self._mapped = False
        return candidate

    def recall(self) -> Tuning | None:
        """Apply the choice of earlier starts, if it is decided."""
        entry = self._recalled()
        if entry is None:
            return None
        choice = self._choose(entry.sessions)
        if choice is None or not choice.decided:
            return None
        candidate = self.use(choice.winner)
        return Tuning(
            "remembered",
            candidate.name,
            candidate.title,
            choice.why,
            entry.measured,
            choice.timings,
            decided=True,
            same_as=self._same_as,
            kept=True,
        )

    def run(self, limit_s: float, report: Callable[[float], None] = lambda _: None) -> Tuning:
        """Race the candidates, apply the winner and remember what was timed.

        What earlier starts have timed counts too, and candidates that were surely slower then are left out.
        If a token takes too long for two turns, the method ends at once, and the computed plan stays.

        Args:
            limit_s: Seconds after which no further token is begun.
            report: Called with the share of that time that has passed.

        Raises:
            Exception: Errors of decoding, KeyboardInterrupt included; the computed plan is in effect again.
        """
        upkeep = self._loaded.upkeep
        if upkeep is not None:
            upkeep.collect()
        entry = self._recalled()
        earlier = () if entry is None or self._choose(entry.sessions) is None else entry.sessions
        placement = self._near.placement
        placement.serve([each.settings for each in self._candidates if each.settings is not None])
        try:
            raced = race(
                self._candidates,
                self._sequences(),
                lambda candidate: self._take_turns(candidate.name),
                limit_s=limit_s,
                earlier=earlier,
                hardness=lambda: float(self._near.runner.hard_activations()),
                report=report,
            )
        except BaseException:
            self.use(DEFAULT)
            raise
        finally:
            placement.serve(())
            if upkeep is not None:
                upkeep.discard()
        sessions = (*earlier, raced.session)[-MOST_SESSIONS:]
        choice = self._choose(sessions)
        assert choice is not None  # the candidates are those at hand
        if not any(timing.gap for timing in choice.timings):
            self.use(DEFAULT)
            why = f"a token takes {raced.pace:.2g} s, too long to time plans within {limit_s:g} s"
            return replace(skipped(why), seconds=raced.seconds)
        winner = self.use(choice.winner)
        measured = datetime.now(UTC).isoformat(timespec="seconds")
        return Tuning(
            "measured",
            winner.name,
            winner.title,
            choice.why,
            measured,
            choice.timings,
            choice.decided,
            self._same_as,
            raced.seconds,
            self._keep(sessions, measured),
        )

    def _take_turns(self, name: str) -> int:
        """Make a candidate take effect; returns the tokens that it needs to settle."""
        before = None if self._mapped else self._near.targets.copy()
        # Transfers that the previous turn has queued must not count for this one.
        self._near.drain()
        self.use(name)
        plan = self._plans.get(name)
        if before is None or plan is None or not np.array_equal(before, plan.targets):
            return _SETTLE_OTHER_TARGETS
        return _SETTLE

    def _choose(self, sessions: Sequence[Comparison]) -> Choice | None:
        """``None``: the sessions timed other candidates."""
        names = [candidate.name for candidate in self._candidates]
        if any(way not in names for session in sessions for way in session.sums()):
            return None
        return choose(sessions, names, default=DEFAULT, plain=self.plain)

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
            dense_bytes=self._loaded.form.nbytes,
            activation_bits=self._loaded.form.activation_bits,
            kv_bits=self._loaded.cache.bits,
            near=self._near.placement.near,
        )

    def _place(self) -> Path:
        return user_paths().state / "tuning" if self._directory is None else self._directory

    def _recalled(self) -> Remembered | None:
        try:
            return recall(self._place(), self._key(), pages=self._near.pages, may_map=self._may_map)
        except Exception:  # identifying the machine may fail anywhere; the chat must start
            return None

    def _keep(self, sessions: Sequence[Comparison], measured: str) -> bool:
        entry = Remembered(self._near.pages, self._may_map, measured, tuple(sessions))
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
