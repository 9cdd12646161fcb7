"""The measurements of bench/cpu: systems in turns, with memory's streaming speed beside every one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from cpu_files import Files, Model, Say
from cpu_systems import Settings, System, Systems, groups
from llama_peer import LlamaPeer

from moechat import _native
from moechat.hardware.measure_cpu import last_cache_bytes

_MOST_STREAMED, _LEAST_STREAMED = 1 << 30, 1 << 28
_STREAM_SECONDS = 0.25


@dataclass(frozen=True)
class Turn:
    """One measurement.

    Attributes:
        system: ``moechat ISA``, a format of llama.cpp such as ``q4_k``, or ``q4_k thin``.
        what: ``decode``, ``prompt`` or ``experts``.
        size: Tokens of the context or prompt; 0 for experts.
        threads: Used.
        session: From 0: systems of other sessions were not loaded at the same time.
        round: From 0.
        rate: Tokens a second; for experts bytes a second.
        before: Streaming bytes a second just before.
        after: The same just after.
        details: What else the worker said.
    """

    system: str
    what: str
    size: int
    threads: int
    session: int
    round: int
    rate: float
    before: float
    after: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stream(self) -> float:
        """Streaming bytes a second around it."""
        return (self.before + self.after) / 2


class Streaming:
    """Memory's speed, as moechat's own kernel reads it."""

    def __init__(self) -> None:
        # Too much for the caches.
        nbytes = min(_MOST_STREAMED, max(_LEAST_STREAMED, 4 * last_cache_bytes()))
        self._bytes = np.ones(nbytes, dtype=np.uint8)

    def rate(self, threads: int) -> float:
        """Bytes a second with so many threads."""
        _native.set_num_threads(threads)
        return _native.stream_read_rate(self._bytes, threads, _STREAM_SECONDS)


@dataclass(frozen=True)
class _Step:
    """A turn to come."""

    system: str
    what: str
    size: int
    threads: int


class Comparison:
    """The turns of one model's systems."""

    def __init__(
        self, model: Model, settings: Settings, systems: Mapping[str, System], streaming: Streaming, say: Say
    ) -> None:
        self._model, self._settings, self._say = model, settings, say
        self._systems, self._streaming = systems, streaming

    def run(self, session: int) -> list[Turn]:
        """Measure in rounds."""
        turns: list[Turn] = []
        for number in range(self._settings.rounds):
            for threads in reversed(self._settings.threads):
                steps = self._steps(number, threads)
                before = self._streaming.rate(threads)
                for step in steps:
                    answer = self._measure(step)
                    after = self._streaming.rate(threads)
                    rate = answer.pop("rate")
                    turns.append(
                        Turn(
                            **asdict(step),
                            session=session,
                            round=number,
                            rate=rate,
                            before=before,
                            after=after,
                            details=answer,
                        )
                    )
                    self._say(self._line(turns[-1]))
                    before = after
        return turns

    def _line(self, turn: Turn) -> str:
        what = turn.what + (f" {turn.size}" if turn.size else "")
        bytes_of = 1.0 if turn.what == "experts" else float(self._systems[turn.system].active_bytes)
        share = "" if turn.what == "prompt" else f", {turn.rate * bytes_of / turn.stream:.2f} of streaming"
        rate = f"{turn.rate / 1e9:.1f} GB/s" if turn.what == "experts" else f"{turn.rate:.1f} tokens/s"
        return (
            f"{self._model.name}, round {turn.round + 1}, {turn.threads} threads, {turn.system}, {what}: "
            f"{rate}{share}"
        )

    def _steps(self, number: int, threads: int) -> list[_Step]:
        """The turns of a round: what is measured in the same order, the systems in turn from both ends."""
        settings, most = self._settings, max(self._settings.threads)
        names = list(self._systems)
        start = number // 2 % len(names)
        names = [*names[start:], *names[:start]]
        if number % 2:
            names.reverse()
        whats: list[tuple[str, int]] = [("decode", settings.contexts[0])]
        if threads == most and number == 0:
            whats += [("decode", size) for size in settings.contexts[1:]]
        whats.append(("experts", 0))
        if threads == most:
            whats += [("prompt", size) for size in settings.prompts]
        elif number == 0 and settings.prompts:
            whats.append(("prompt", settings.prompts[0]))
        steps = []
        for what, size in whats:
            for name in names:
                thin, moechat = name.endswith("thin"), name.startswith("moechat")
                if what == "experts" and not moechat:
                    continue
                if thin and (what, size) != ("decode", settings.contexts[0]):
                    continue
                steps.append(_Step(name, what, size, threads))
        return steps

    def _measure(self, step: _Step) -> dict[str, Any]:
        worker, told = self._systems[step.system].workers[step.what]
        arguments: dict[str, Any] = {"threads": step.threads, **told}
        if step.what == "prompt":
            return worker.ask("prompt", length=step.size, **arguments)
        if step.what == "decode":
            arguments["context"] = step.size
        return worker.ask(step.what, tokens=self._settings.tokens, **arguments)


def measure(
    files: Files,
    model: Model,
    settings: Settings,
    llama: LlamaPeer | None,
    ours: bool,
    streaming: Streaming,
    say: Say,
) -> dict[str, Any]:
    """Measure everything of one model; returns facts of the systems, and every turn."""
    facts: dict[str, Any] = {}
    turns: list[Turn] = []
    for session, formats in enumerate(groups(files, model, settings, llama, ours)):
        with Systems(files, model, settings, formats, llama, ours, say) as loaded:
            turns += Comparison(model, settings, loaded.systems, streaming, say).run(session)
            facts |= {name: system.about for name, system in loaded.systems.items()}
    return {
        "name": model.name,
        "layers": model.layers,
        "all_layers": model.config["num_hidden_layers"],
        "systems": facts,
        "turns": [asdict(turn) for turn in turns],
    }
