"""Watches how a tier loads what is missing, while answers are given; see :mod:`moechat.trials.watch`."""

from __future__ import annotations

from moechat.configurator.systems import CacheSettings
from moechat.offload.tier import ExpertTier
from moechat.simulate.run import Watched
from moechat.simulate.strategy import watched
from moechat.trials import Switch


class TierWatch:
    """Counts the tokens of one tier and switches between ways to load, between tokens.

    Nothing is watched where the settings leave no choice. On a GPU the ways are those that the requests of
    its recorded graphs serve.

    Args:
        near: The tier.
    """

    def __init__(self, near: ExpertTier) -> None:
        self._near = near
        self._runner = near.runner
        self._watched: Watched | None = None
        self._settings: CacheSettings | None = None  # as this watch has left them
        self._hard = 0
        self._switches: list[Switch] = []

    @property
    def switches(self) -> list[Switch]:
        """Changes so far."""
        now = [] if self._watched is None else self._watched.watch.switches
        return self._switches + now

    @property
    def kept(self) -> bool:
        """Whether trials have chosen or confirmed the way at work."""
        return self._watched is not None and self._watched.watch.rounds > 0

    def begin(self) -> None:
        """An answer begins; its first token, computed with the prompt, does not count."""
        near = self._near
        if near.settings != self._settings or near.runner is not self._runner:
            self._restart()
        elif self._watched is not None:
            self._watched.watch.pause()
        self._hard = near.runner.hard_activations()

    def token(self, seconds: float) -> None:
        """Count a token of an answer, after the first; may switch for the next one."""
        if self._watched is None:
            return
        before, self._hard = self._hard, self._near.runner.hard_activations()
        watch = self._watched.watch
        if watch.token(seconds, self._hard - before):
            self._load_by(self._watched.ways[watch.way])

    def leave_out(self) -> None:
        """A token shared its pass with others, which says little about the ways."""
        self._hard = self._near.runner.hard_activations()

    def settle(self) -> None:
        """Between answers: end a trial."""
        if self._watched is None or self._near.settings != self._settings:
            return
        watch = self._watched.watch
        watch.abandon()
        wanted = self._watched.ways[watch.at_work]
        if wanted != self._near.settings:
            self._load_by(wanted)

    def _restart(self) -> None:
        near = self._near
        self._switches = self.switches
        self._runner, self._settings = near.runner, near.settings
        found = watched(
            near.wanted,
            near.plan.strategy,
            near.settings,
            far_computes=near.far_computes,
            may_take_turns=near.placement.may_take_turns,
        )
        self._watched = found

    def _load_by(self, settings: CacheSettings) -> None:
        self._near.load_by(settings)
        self._settings = self._near.settings
