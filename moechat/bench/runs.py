"""Runs of a measurement: near tiers, and passes over the forced tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from moechat import _native
from moechat.bench.call_timers import TimedAdditivePredictor, TimedCalls, TimedPredictor
from moechat.bench.decode import Bench
from moechat.bench.figures import Run
from moechat.bench.options import BenchOptions
from moechat.bench.predicted import Recorder
from moechat.bench.speeds import busy_link
from moechat.configurator.systems import MOST_LOOKAHEAD, CacheSettings
from moechat.errors import MoechatError
from moechat.loading import gather_knowledge
from moechat.loading.learned import requests_for
from moechat.models.router_search import find_routers
from moechat.offload.experts import RunsExperts
from moechat.offload.host import HostPlacement
from moechat.offload.requests import Requests
from moechat.offload.settings import LinkSettings
from moechat.offload.tier import ExpertTier, TierConfig
from moechat.offload.watching import TierWatch
from moechat.predict import Predictor
from moechat.routing import Replay

# Duration of the load on a link, as a multiple of the pass without it.
_LOAD_FACTOR = 1.5


class Runs:
    """Runs the forced tokens of a measurement on near tiers.

    Every run has the same tokens: an optional fill of the cache by a replay, the prompt, tokens that are not
    timed, then timed ones.

    Args:
        bench: The model.
        options: Options of the measurement.
        prompt: First tokens of the prompt, repeated or cut to its length; ``None`` draws all tokens.
        replay: The trace that chooses the experts, if any.
        predictor: Predictor of the near tiers.
    """

    def __init__(
        self,
        bench: Bench,
        options: BenchOptions,
        prompt: Sequence[int] | None,
        replay: Replay | None,
        predictor: Predictor,
    ) -> None:
        self.bench = bench
        self.options = options
        self.replay = replay
        self.predictor = predictor
        self.tokens = self._forced_tokens(prompt)

    def _forced_tokens(self, prompt: Sequence[int] | None) -> list[int]:
        """Tokens of one run: a prompt and the model's greedy answer, or random tokens."""
        options, bench = self.options, self.bench
        answer = options.warmup_tokens + options.tokens
        if prompt is None:
            generator = np.random.default_rng(options.seed)
            drawn: list[int] = generator.integers(0, bench.vocabulary, size=options.all_tokens).tolist()
            return drawn
        start = [prompt[at % len(prompt)] for at in range(options.prompt_tokens)]
        steps = bench.engine.generate(start, max_new_tokens=answer, temperature=0.0, draft_tokens=0)
        given = [step.token_id for step in steps]
        # An answer that ends early is repeated.
        return start + [given[at % len(given)] for at in range(answer)]

    def near_tier(self, settings: CacheSettings, pages: int, link: LinkSettings) -> ExpertTier:
        """Create a near tier whose calls are timed and recorded (:class:`Recorder`)."""
        if self.replay is not None:
            self.replay.rewind()
        config = TierConfig(
            self.bench.store,
            self.bench.top_k,
            link=link,
            predictor=self._timed_predictor(settings),
            requests=self._requests(settings),
            replay=self.replay,
            activation_bits=self.bench.activation_bits,
        )
        placement = HostPlacement()
        knowledge = gather_knowledge(self.bench.store, self.bench.engine.loaded.outline, settings, placement)
        if link.kind == "sim" and link.bandwidth:
            load = self.bench.store.geometry.expert_bytes / link.bandwidth
            knowledge = replace(knowledge, costs=replace(knowledge.costs, load=load, load_together=None))
        near = ExpertTier(config, placement, pages=pages, settings=settings, knowledge=knowledge)
        recorder = Recorder(TimedCalls(near.runner), self.bench.layers)
        near.runner = recorder  # type: ignore[assignment]
        return near

    def _timed_predictor(self, settings: CacheSettings) -> TimedPredictor | TimedAdditivePredictor:
        """The predictor of one near tier; one that learns is new each time."""
        if settings.prefetch != "adaptive" or self.replay is not None:
            return TimedPredictor(self.predictor)
        routers = find_routers(self.bench.model, self.bench.parts)
        return TimedAdditivePredictor(routers, self.bench.store.geometry.num_experts, MOST_LOOKAHEAD)

    def _requests(self, settings: CacheSettings) -> Requests | None:
        """What predicts from earlier requests, as `moechat run` has learned it so far."""
        bench = self.bench
        return requests_for(
            bench.store, bench.model, bench.parts, settings, bench.top_k, on_gpu=False, warn=lambda _: None
        )

    def run_under_load(self, near: ExpertTier, own: LinkSettings, link: LinkSettings, alone: Run) -> Run:
        """Run a near tier with the link ``own`` while ``link`` is busy; ``alone`` is its run without load."""
        options = self.options
        seconds = alone.ttft + alone.tpot * (options.warmup_tokens + options.tokens)
        with busy_link(self.bench.store, link, _LOAD_FACTOR * seconds):
            return self.run(near, own)

    def run(self, near: ExpertTier, link: LinkSettings, fill: bool = False) -> Run:
        """Fill the cache if requested, then compute prompt, warm-up and timed tokens."""
        options, bench = self.options, self.bench
        calls: Any = near.runner
        layers = [near.layer(ordinal) for ordinal in range(bench.layers)]
        if self.replay is not None:
            self.replay.rewind(0 if fill else options.fill_tokens)
            if fill and options.fill_tokens:
                with self._translate_errors(link):
                    self._fill(near, layers)
        with bench.experts(layers):
            prompt, rest = self.tokens[: options.prompt_tokens], self.tokens[options.prompt_tokens :]
            near.begin_request(self, prompt)
            self._begin_tokens(near, prompt)
            ttft, decoding = bench.start(prompt)
            watch = TierWatch(near)
            watch.begin()
            for token in rest[: options.warmup_tokens]:
                self._begin_tokens(near, [token])
                watch.token(decoding.feed([token]))
            with self._translate_errors(link):
                near.drain()
            peak = near.stats()["pages_peak"]
            near.reset_stats()
            calls.reset()
            predictor: Any = near.config.predictor
            predictor.seconds = 0.0
            bench.seconds_in_experts = 0.0
            steps = []
            for token in rest[options.warmup_tokens :]:
                started = time.perf_counter()
                self._begin_tokens(near, [token])
                began = time.perf_counter() - started
                steps.append(began + decoding.feed([token]))
                watch.token(steps[-1])
            near.end_request(self)
        seconds = {
            **calls.seconds,
            "predict": predictor.seconds,
            "experts": bench.seconds_in_experts,
        }
        return Run(ttft, tuple(steps), seconds, near.stats(), peak / calls.pages)

    def _begin_tokens(self, near: ExpertTier, tokens: list[int]) -> None:
        """Say that a pass of these tokens begins, as the engine does."""
        if len(tokens) == 1:
            near.begin_pass(self, tokens[0])
        if near.settings.looks_up and self.replay is None:
            near.begin_tokens(tokens)

    @contextmanager
    def _translate_errors(self, link: LinkSettings) -> Iterator[None]:
        """Convert link errors outside the engine's passes into errors that name the link."""
        try:
            yield
        except _native.LinkError as error:
            if link.kind == "file":
                name = f"the file link to {self.bench.store.path}"
                hint = "try again; if it stays so, check the disk"
            else:
                name = f"the simulated link at {link.bandwidth:.4g} bytes a second"
                hint = "give a faster one with --link"
            raise MoechatError(f"{name} failed: {error}", hint=hint) from error

    def _fill(self, near: ExpertTier, layers: Sequence[RunsExperts]) -> None:
        """Run only the expert layers, without delays of a simulated link, for the tokens before the
        prompt.
        """
        geometry = self.bench.store.geometry
        hidden = torch.zeros((1, geometry.hidden_size))
        index = torch.zeros((1, self.bench.top_k), dtype=torch.int64)  # the replay chooses
        weights = torch.full((1, self.bench.top_k), 1 / self.bench.top_k)
        near.runner.hurry_link(True)
        for _ in range(self.options.fill_tokens):
            for layer in layers:
                layer.forward(hidden, index, weights)
        near.drain()
        near.runner.hurry_link(False)
