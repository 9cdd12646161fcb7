"""Keeps the routing statistics of a tier and replans from them, between answers.

During an answer this costs two additions a token. Statistics are written to the user's directory at the end
of an answer (rarely), while the chat waits for its user, and when the engine is closed. In that time the
experts that were used most are loaded into free pages (:mod:`moechat.offload.preload`). A new plan is made
from them after a number of decoded tokens, and only when the caller is idle (MoEpic, section 3.4.2, where τ
is 5000 tokens).
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moechat.budget.knowledge import (
    Knowledge,
    blend,
    family_statistics,
    key_of,
    saved_statistics,
)
from moechat.budget.tier_targets import expected_seconds
from moechat.configurator.estimate import ModelShape
from moechat.offload.observed import Observed
from moechat.offload.preload import Preloader, into_free_pages, most_used, of_targets
from moechat.offload.tier import ExpertTier
from moechat.offload.watching import TierWatch
from moechat.predict.learned_file import keep_learned, learned_path
from moechat.routing.hot_experts import LEAST_TOKENS, expert_shares
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.statistics_file import add_statistics
from moechat.trials import Switch

REPLAN_TOKENS = 5000
# The first plans are made from little, so the next ones come earlier: after so many tokens, then four times
# as many, and so on.
_FIRST_REPLAN, _REPLAN_GROWTH = 500, 4
# Decoded tokens from which measured costs replace those of the profile.
_OBSERVED_TOKENS = 64
# Seconds between two writes: at the end of an answer, and while the chat waits.
_SAVE_AFTER_ANSWER_S, _SAVE_IDLE_S = 120.0, 15.0
# Decoded tokens after which settings whose experts stay load the most used ones again.
_PRELOAD_TOKENS = 256
_MOST_NOTES = 32
_RUNNER_COUNTERS = (
    "bytes_computed",
    "compute_seconds",
    "link_bytes",
    "link_busy_seconds",
    "stall_seconds",
    "begin_seconds",
    "blocks_far",
    "far_seconds",
)


@dataclass(frozen=True)
class Replanned:
    """A new plan.

    Attributes:
        tokens: Tokens decoded since the plan before.
        method: Method of the allocation.
        layers_changed: Number of layers whose targets have changed.
        before_ms: Expected load time of a token that nothing hides, in milliseconds, with the targets before;
            ``None`` without statistics.
        after_ms: The same with the new targets.
        took_ms: Milliseconds that planning took.
        statistics_from: Origin of the routing statistics.
        costs_from: Origin of the costs.
    """

    tokens: int
    method: str
    layers_changed: int
    before_ms: float | None
    after_ms: float | None
    took_ms: float
    statistics_from: str
    costs_from: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))


class Upkeep:
    """Counts, saves and uses the statistics of one tier. Not safe for several threads.

    Args:
        near: The tier.
        shape: Sizes of the model.
        model_type: Its family.
        fingerprint: Fingerprint of its weights.
        knowledge: Knowledge that the first plan was made from.
        every: Decoded tokens after which a new plan is due; 0: never.

    Attributes:
        replans: Number of new plans so far.
        last: The last of them.
    """

    def __init__(
        self,
        near: ExpertTier,
        shape: ModelShape,
        *,
        model_type: str,
        fingerprint: str,
        knowledge: Knowledge,
        every: int = REPLAN_TOKENS,
    ) -> None:
        self._near = near
        self._shape = shape
        self._model_type = model_type
        self._fingerprint = fingerprint
        self._knowledge = knowledge
        self._every = every
        self._process = os.getpid()
        # Neither a replayed trace nor a set that never changes shows which experts to keep.
        self._counts = near.replay is None and near.settings.policy not in ("static", "belady")
        self._pending: RoutingStatistics | None = None
        self._saved_at = time.monotonic()
        self._notes: deque[str] = deque(knowledge.notes + near.plan.notes, maxlen=_MOST_NOTES)
        self._default: RoutingStatistics | None = None
        self._tokens = 0  # decoded since the last plan
        self._tokens_in_all = self._tokens_kept = 0  # decoded; and when predictors were last kept
        self._watch = TierWatch(near)
        # Of the current answer, after its first token.
        self._mark: Mapping[str, float] | None = None
        self._answer_tokens, self._seconds = 0, 0.0
        # Of answers since the last plan: counters of the native runner, seconds in all, and tokens.
        self._taken = dict.fromkeys(_RUNNER_COUNTERS, 0.0)
        self._taken_seconds = 0.0
        self._taken_tokens = 0
        self.replans = 0
        self.last: Replanned | None = None
        self._preloader = Preloader()
        self._preload_due, self._preload_at = self._counts, 0
        self._preload_noted = False

    # ---- during an answer

    def step(self, seconds: float, *, alone: bool = True) -> None:
        """Count a token of an answer; the first one was computed with its prompt.

        Args:
            seconds: That it took; 0 for a guessed one, whose pass counts for the token before.
            alone: Its pass had no other token of its answer. Ways to load experts are compared by such passes
                only.
        """
        if self._mark is None:
            self._mark = self._near.stats()
            self._answer_tokens, self._seconds = 0, 0.0
            self._watch.begin()
        else:
            self._answer_tokens += 1
            self._seconds += seconds
            if alone:
                self._watch.token(seconds)
            else:
                self._watch.leave_out()

    def answer_done(self) -> None:
        """End the answer, complete or not; cheap except for a rare write."""
        mark, self._mark = self._mark, None
        if mark is None or os.getpid() != self._process:
            return
        now = self._near.stats()
        self._tokens += self._answer_tokens
        self._tokens_in_all += self._answer_tokens
        gained = {name: now[name] - mark[name] for name in self._taken}
        if self._answer_tokens and min(gained.values()) >= 0:  # else the counters were reset meanwhile
            for name, value in gained.items():
                self._taken[name] += value
            self._taken_seconds += self._seconds
            self._taken_tokens += self._answer_tokens
        if time.monotonic() - self._saved_at >= _SAVE_AFTER_ANSWER_S:
            self.save()

    @property
    def switches(self) -> list[Switch]:
        """Changes of the way to load that the watch has made."""
        return self._watch.switches

    # ---- between answers

    def idle(self) -> Replanned | None:
        """Save the statistics and replan, as far as either is due.

        Returns:
            The new plan, if one was made.
        """
        self._watch.settle()
        if self._near.settings.loads_most_used and self._tokens_in_all >= self._preload_at + _PRELOAD_TOKENS:
            self._preload_due = self._counts
        if self._preload_due and not self._preloader.running:
            self._preload()
        due = min(self._every, _FIRST_REPLAN * _REPLAN_GROWTH**self.replans)
        done = self.replan() if self._every and self._tokens >= due else None
        if time.monotonic() - self._saved_at >= _SAVE_IDLE_S:
            self.save()
        return done

    def replan(self) -> Replanned:
        """Make a new plan from all statistics and costs and apply it; no block moves."""
        started = time.perf_counter()
        near, blocks = self._near, self._shape.blocks_per_expert
        knowledge = self._latest()
        old = near.plan
        # A strategy that was only simulated is chosen again; one that was given, timed or watched stays.
        chosen = old.settings_for(near.wanted) == near.settings and not self._watch.kept
        plan = near.plan_for(near.wanted if chosen else near.settings, knowledge)
        settings = plan.settings_for(near.wanted) if chosen else near.settings
        before = expected_seconds(old, settings, knowledge, near.top_k, blocks)
        after = expected_seconds(plan, settings, knowledge, near.top_k, blocks)
        self._notes.extend(plan.notes)
        changed = int((old.targets != plan.targets).any(axis=1).sum())
        near.switch(settings, plan)
        near.knowledge = self._knowledge = knowledge
        tokens, self._tokens = self._tokens, 0
        self.replans += 1
        self._preload_due = self._counts
        self.last = Replanned(
            tokens=tokens,
            method=plan.method,
            layers_changed=changed,
            before_ms=None if before is None else 1000 * before,
            after_ms=None if after is None else 1000 * after,
            took_ms=1000 * (time.perf_counter() - started),
            statistics_from=knowledge.statistics_from,
            costs_from=knowledge.costs_from,
        )
        return self.last

    def save(self) -> bool:
        """Add the counted statistics to the user's file; ``False`` if that failed: it is tried again."""
        if not self._counts or os.getpid() != self._process or sys.is_finalizing():
            return False
        self._saved_at = time.monotonic()
        self._keep_learned()
        self._collect()
        if self._pending is None or self._pending.tokens == 0:
            return True
        try:
            kept = add_statistics(
                key_of(self._shape, self._fingerprint), self._pending, warn=self._notes.append
            )
        except Exception as error:  # a conversation goes on without its statistics
            self._notes.append(f"routing statistics cannot be kept: {error!r}")
            kept = False
        if not kept:
            return False
        self._pending = None
        return True

    def _keep_learned(self) -> None:
        """Keep what a predictor has learned since the last time; a failure is only noted."""
        predictor, kind = self._near.requests.predictor, self._near.settings.prefetch
        if predictor is None or self._tokens_in_all == self._tokens_kept:
            return
        path = learned_path(kind, key_of(self._shape, self._fingerprint))
        try:
            keep_learned(path, predictor)
            self._tokens_kept = self._tokens_in_all
        except OSError as error:
            self._notes.append(f"what was learned for predictions cannot be kept in {path}: {error}")

    @property
    def preloading(self) -> bool:
        """Whether experts of earlier use are being loaded."""
        return self._preloader.running

    def busy(self) -> None:
        """A pass begins: stop preloading until the next :meth:`idle`. Costs nothing where it has ended."""
        if self._preloader.running:
            self._preload_due = True
        self._preloader.stop()

    def close(self) -> None:
        """Save the statistics, if possible; REQUIRES: the tier is still open."""
        self._preloader.stop()
        self.save()

    def _preload(self) -> None:
        """Begin to load what is worth it: in free pages, or in place of others; see :class:`Preloader`."""
        self._preload_due, self._preload_at = False, self._tokens_in_all
        near = self._near
        if self.replans and near.settings.admit == "always":
            self._preloader.start(near.runner, of_targets(near.runner.keys(), near.targets))
            return
        notes: list[str] = []
        seen = self._seen(near.settings.policy, notes)
        if seen is None or seen.tokens < LEAST_TOKENS:
            return
        shares = expert_shares(seen)
        near.runner.expect(shares)
        room = (near.pages - near.reserve) // near.geometry.blocks_per_expert
        order = most_used(shares, room) if near.settings.loads_most_used else into_free_pages(shares)
        self._preloader.start(near.runner, order)
        if not self._preload_noted:
            self._preload_noted = True
            self.notify(
                f"experts that {seen.tokens:,} earlier tokens used most are loaded while nothing else is done"
            )

    def notify(self, note: str) -> None:
        """Add a sentence for :meth:`take_notes`."""
        self._notes.append(note)

    def take_notes(self) -> list[str]:
        """Problems with files since the last call, as sentences for the user."""
        notes = list(dict.fromkeys(self._notes))
        self._notes.clear()
        return notes

    def pending(self) -> RoutingStatistics | None:
        """Statistics that are counted and not saved yet; ``None``: there are none."""
        if self._counts:
            self._collect()
        return self._pending

    def collect(self) -> None:
        """Set the counts so far aside, so that :meth:`discard` drops only later ones."""
        if self._counts:
            self._collect()

    def discard(self) -> None:
        """Drop the counts since :meth:`collect`, which are of text that is not the user's."""
        if self._counts:
            self._near.reset_routing_counts()

    def _collect(self) -> None:
        counted = self._near.routing_statistics()
        self._near.reset_routing_counts()
        self._pending = counted if self._pending is None else self._pending.merge(counted)

    def _latest(self) -> Knowledge:
        """Knowledge with the newest statistics and costs."""
        notes: list[str] = []
        knowledge = self._knowledge
        statistics, source = knowledge.statistics, knowledge.statistics_from
        if self._counts:
            statistics, source = self._latest_statistics(notes)
        costs, costs_from = knowledge.costs, knowledge.costs_from
        if self._taken_tokens >= _OBSERVED_TOKENS:
            tokens, seconds = self._taken_tokens, self._taken_seconds
            found = self._near.placement.observed(costs, Observed(self._shape, self._taken, tokens, seconds))
            if found is not None:
                costs, costs_from = found, f"{tokens:,} decoded tokens"
            self._taken = dict.fromkeys(self._taken, 0.0)
            self._taken_seconds, self._taken_tokens = 0.0, 0
        self._notes.extend(notes)
        return replace(
            knowledge, statistics=statistics, statistics_from=source, costs=costs, costs_from=costs_from
        )

    def _seen(self, policy: str, notes: list[str]) -> RoutingStatistics | None:
        """Counts of this run and of earlier ones; ``None``: there are none."""
        self._collect()
        saved, seen = saved_statistics(self._shape, self._fingerprint, policy, notes), self._pending
        if saved is not None and (seen is None or saved.fits(seen)):
            seen = saved if seen is None else saved.merge(seen)
        return seen

    def _latest_statistics(self, notes: list[str]) -> tuple[RoutingStatistics | None, str]:
        policy = self._near.settings.policy
        seen = self._seen(policy, notes)
        if self._default is None:
            self._default = family_statistics(self._shape, self._model_type, policy, notes)
        return blend(self._default, seen, notes)
