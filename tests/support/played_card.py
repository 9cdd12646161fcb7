"""A GPU whose speeds a test sets: a :class:`moechat.hardware.card.Card` with clocks of its own.

Kernels take the time that their bytes and operations need, from when the host has started them; host and GPU
have a clock each, which calls move. Only the link runs in real time: a simulated one of the native code.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moechat import _native
from moechat.hardware.card import CardFacts, Task

MIB = 1 << 20


@dataclass
class Speeds:
    launch: float = 6e-6
    small: float = 1e-6
    call: float = 35e-6
    wake: float = 9e-6
    round_trip: float = 14e-6
    graph_launch: float = 8e-6
    graph_node: float = 1.4e-6
    bandwidth: float = 320e9
    copied: float = 290e9
    flops: float = 25e12
    expert_share: float = 0.75
    dense_share: float = 0.85
    back: float = 11e9
    link: float = 400e6
    link_latency: float = 1e-3
    staged_share: float = 0.5
    pinned: float = 1e18
    build: float = 0.5
    noise: float = 0.02


class PlayedCard:
    def __init__(
        self, speeds: Speeds | None = None, *, free: int = 8 << 30, fails: tuple[str, ...] = ()
    ) -> None:
        self.speeds = speeds or Speeds()
        self.free = free
        self.fails = fails
        self.host = 100.0
        self.busy_until = 100.0
        self.held = 0
        self.most_held = 0
        self.built: set[object] = set()
        self._random = random.Random(1)

    def _check(self, name: str) -> None:
        if name in self.fails:
            raise RuntimeError(f"{name} does not work on this GPU")

    def _kernel(self, start: float, seconds: float, builds: object = None) -> Callable[[], None]:
        def run() -> None:
            if builds is not None and builds not in self.built:
                self.built.add(builds)
                self.host += self.speeds.build
            self.host += start
            noisy = seconds * (1 + self.speeds.noise * self._random.uniform(-1, 1))
            self.busy_until = max(self.busy_until, self.host) + noisy

        return run

    def facts(self) -> CardFacts:
        self._check("facts")
        return CardFacts("Played GPU", (8, 6), 28, 3 * MIB, self.free, 300 * MIB)

    def clock(self) -> float:
        return self.host

    def gpu_seconds(self, run: Callable[[], object], calls: int) -> float:
        begun = max(self.host, self.busy_until)
        for _ in range(calls):
            run()
        seconds = self.busy_until - begun
        self.wait()
        return seconds

    def wait(self) -> None:
        self.host = max(self.host, self.busy_until) + self.speeds.wake

    def small(self) -> Task:
        self._check("small")
        return Task(self._kernel(self.speeds.launch, self.speeds.small))

    def graph(self, nodes: int) -> Task:
        self._check("graph")
        return Task(self._kernel(self.speeds.graph_launch, nodes * self.speeds.graph_node))

    def fetch(self) -> None:
        self.host += self.speeds.round_trip

    def read(self, nbytes: int) -> Task:
        self._check("read")
        assert nbytes <= self.free // 4
        return Task(self._kernel(self.speeds.launch, nbytes / self.speeds.bandwidth), nbytes)

    def copy(self, nbytes: int) -> Task:
        return Task(self._kernel(self.speeds.launch, 2 * nbytes / self.speeds.copied), 2 * nbytes)

    def back(self, nbytes: int, copies: int) -> Task:
        return Task(self._kernel(self.speeds.launch, copies * nbytes / self.speeds.back), copies * nbytes)

    def experts(self, bits: int, tokens: int) -> Task:
        self._check("experts")
        nbytes, operations = 200e6, 200e6 * 8 / (bits + 0.5) * 2 * tokens
        seconds = max(
            nbytes / (self.speeds.expert_share * self.speeds.bandwidth),
            operations / (0.5 * self.speeds.flops),
        )
        return Task(self._kernel(self.speeds.launch, seconds, ("experts", bits, tokens)), nbytes, operations)

    def call(self) -> Task:
        return Task(self._kernel(self.speeds.call, 20e-6, "call"))

    def dense(self, bits: int, tokens: int) -> Task:
        nbytes, operations = 256e6, 256e6 * 8 / bits * 2 * tokens
        seconds = max(
            nbytes / (self.speeds.dense_share * self.speeds.bandwidth), operations / self.speeds.flops
        )
        return Task(self._kernel(self.speeds.launch, seconds, ("dense", bits, tokens)), nbytes, operations)

    def link(self, memory: np.ndarray, *, pinned: bool, buffer_bytes: int) -> _native.Link:
        self._check("link")
        share = 1.0 if pinned else self.speeds.staged_share
        return _native.sim_link(
            [memory],
            bandwidth=share * self.speeds.link,
            latency=self.speeds.link_latency,
            in_flight_bytes=1 << 30,
            copy=False,
        )

    def target(self, slots: int, nbytes: int) -> np.ndarray:
        return np.empty((slots, nbytes), np.uint8)

    def pin(self, memory: np.ndarray) -> str:
        if self.held + memory.nbytes > self.speeds.pinned:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        self.held += memory.nbytes
        self.most_held = max(self.most_held, self.held)
        return ""

    def unpin(self, memory: np.ndarray) -> None:
        self.held -= memory.nbytes

    def release(self) -> None:
        pass
