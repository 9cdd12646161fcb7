"""The measurements of bench_cpu: systems in turns, with memory's streaming speed beside every one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cpu_files import THIN, BenchError, Files, LlamaPython, Model, has_thin, page_in
from gguf_shapes import FORMATS
from worker import Worker

from moechat import _native

Say = Callable[[str], None]
# Too large for the caches of one socket; as much is read for one figure.
_STREAM_BYTES = 1 << 30
_STREAM_SECONDS = 0.25
_ARRANGEMENTS = "llama.json"
_MEMORY_SLACK = 2 << 30


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        isas: Instruction sets of moechat.
        formats: Of llama.cpp's files.
        threads: Ascending.
        rounds: Turns of every system.
        tokens: Of a decode turn.
        contexts: Tokens before them: the first in every round, others once.
        prompts: Lengths: all in every round with the most threads, the first also with fewer, once.
        options: ``dense_bits`` and ``activation_bits`` for moechat.
        repack: Whether llama.cpp may reorder weights: ``on``, ``off``, or ``auto``, what was faster.
    """

    isas: tuple[str, ...]
    formats: tuple[str, ...]
    threads: tuple[int, ...]
    rounds: int
    tokens: int
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    options: Mapping[str, Any]
    repack: str


@dataclass(frozen=True)
class Turn:
    """One measurement.

    Attributes:
        system: ``moechat ISA``, ``q4_k``, ``q4_0`` or ``q4_k thin``.
        what: ``decode``, ``prompt`` or ``experts``.
        size: Tokens of the context or prompt; 0 for experts.
        threads: Used.
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
        self._bytes = np.ones(_STREAM_BYTES, dtype=np.uint8)

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


@dataclass(frozen=True)
class System:
    """A worker that takes turns.

    Attributes:
        name: See :class:`Turn`.
        workers: By what they measure; llama.cpp may need two arrangements for decode and prompt.
        active_bytes: Of weights that a token reads.
        about: Facts.
    """

    name: str
    workers: Mapping[str, Worker]
    active_bytes: int
    about: Mapping[str, Any]


class Comparison:
    """All systems of one model, loaded at once."""

    def __init__(
        self, files: Files, model: Model, settings: Settings, llama: LlamaPython | None, ours: bool, say: Say
    ) -> None:
        self._files, self._model, self._settings, self._say = files, model, settings, say
        self._llama, self._ours = llama, ours
        self._systems: dict[str, System] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Comparison:
        try:
            if self._ours:
                for isa in self._settings.isas:
                    self._load_moechat(isa)
            if self._llama is not None:
                for kind in self._settings.formats:
                    self._load_llama(kind)
                if FORMATS[0] in self._settings.formats and has_thin(self._model):
                    self._load_thin()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def run(self, streaming: Streaming) -> dict[str, Any]:
        """Measure in rounds; returns facts of the systems and every turn."""
        turns: list[Turn] = []
        for number in range(self._settings.rounds):
            for threads in reversed(self._settings.threads):
                steps = self._steps(number, threads)
                before = streaming.rate(threads)
                for step in steps:
                    answer = self._measure(step)
                    after = streaming.rate(threads)
                    rate = answer.pop("rate")
                    turns.append(
                        Turn(
                            **asdict(step),
                            round=number,
                            rate=rate,
                            before=before,
                            after=after,
                            details=answer,
                        )
                    )
                    self._say(self._line(turns[-1]))
                    before = after
        return {
            "name": self._model.name,
            "layers": self._model.layers,
            "all_layers": self._model.config["num_hidden_layers"],
            "systems": {
                name: {"active_bytes": system.active_bytes, **system.about}
                for name, system in self._systems.items()
            },
            "turns": [asdict(turn) for turn in turns],
        }

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
        start = number // 2 % max(1, len(names))
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
        worker = self._systems[step.system].workers[step.what]
        if step.what == "prompt":
            return worker.ask("prompt", threads=step.threads, length=step.size)
        if step.what == "experts":
            return worker.ask("experts", threads=step.threads, tokens=self._settings.tokens)
        return worker.ask("decode", threads=step.threads, context=step.size, tokens=self._settings.tokens)

    def _load_moechat(self, isa: str) -> None:
        name = f"moechat {isa}"
        worker = self._stack.enter_context(self._files.moechat_worker(name, isa))
        path, nbytes = self._files.store_of(worker, self._model)
        page_in(path)
        most = max(self._settings.threads)
        about = worker.ask("load", path=str(path), threads=most, options=dict(self._settings.options))
        worker.ask("prompt", threads=most, length=32)  # warm
        worker.ask("decode", threads=most, context=8, tokens=4)
        self._systems[name] = System(
            name, dict.fromkeys(("decode", "prompt", "experts"), worker), about.pop("active_bytes"), about
        )
        self._say(f"{self._model.name}: {name} loaded, {nbytes / 1e9:.2f} GB")

    def _load_llama(self, kind: str) -> None:
        path = self._files.gguf(self._model, kind)
        plan = self._model.plan(kind)
        wanted = self._settings.repack
        repack = (
            Arrangements(self._files).of(path)
            if wanted == "auto"
            else dict.fromkeys(("decode", "prompt"), wanted == "on")
        )
        page_in(path)
        loaded: dict[bool, Worker] = {}
        about: dict[str, Any] = {"repack": dict(repack), "attention": {}, "tried": {}}
        for what, way in repack.items():
            if way not in loaded:
                _require_memory(path.stat().st_size if way else 0, path.name)
                loaded[way] = self._llama_worker(f"llama.cpp {kind}", path, way, plan.nbytes)
            chosen = loaded[way].ask("choose", threads=max(self._settings.threads), prompt=64, tokens=8)
            about["attention"][what] = chosen["attention"][what]
            about["tried"][what] = chosen["tried"][what]
        workers = {what: loaded[way] for what, way in repack.items()}
        about["expert_active_bytes"] = plan.expert_active_bytes
        self._systems[kind] = System(kind, workers, plan.active_bytes, about)
        self._say(f"{self._model.name}: {path.name} loaded, {about['attention']}, repack {about['repack']}")

    def _load_thin(self) -> None:
        kind = FORMATS[0]
        path, plan = self._files.gguf(self._model, kind, THIN), self._model.plan(kind, THIN)
        whole = self._systems[kind].about
        page_in(path)
        worker = self._llama_worker(f"llama.cpp {kind} thin", path, whole["repack"]["decode"], plan.nbytes)
        worker.ask("choose", threads=max(self._settings.threads), prompt=64, tokens=8)
        about = {"expert_active_bytes": plan.expert_active_bytes, "neurons": THIN}
        self._systems[f"{kind} thin"] = System(f"{kind} thin", {"decode": worker}, plan.active_bytes, about)

    def _llama_worker(self, name: str, path: Path, repack: bool, nbytes: int) -> Worker:
        assert self._llama is not None
        worker = self._stack.enter_context(llama_worker(self._llama, name, path))
        found = worker.ask("load", path=str(path), threads=max(self._settings.threads), repack=repack)
        if found["nbytes"] != nbytes:
            raise BenchError(f"llama.cpp counts {found['nbytes']} bytes in {path}, the plan {nbytes}")
        return worker


def llama_worker(llama: LlamaPython, name: str, path: Path) -> Worker:
    """A process for llama.cpp."""
    script = Path(__file__).resolve().parent / "llama_worker.py"
    return Worker(name, [llama.path, str(script), "serve", str(path)], {})


class Arrangements:
    """Whether llama.cpp is faster with its own order of weights, by file; measured once, when preparing."""

    def __init__(self, files: Files) -> None:
        self._path = files.work / _ARRANGEMENTS
        self._known: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self._known = json.loads(self._path.read_text("utf-8"))

    def of(self, path: Path) -> dict[str, bool]:
        """For ``decode`` and ``prompt``.

        Raises:
            BenchError: It was not measured.
        """
        found = self._known.get(path.name)
        if found is None:
            raise BenchError(f"it is not known how {path.name} is fastest: run with --prepare first")
        return dict(found["repack"])

    def measure(self, llama: LlamaPython, path: Path, threads: int, rounds: int) -> dict[str, Any]:
        """Try both ways in turns, and note which is faster."""
        page_in(path)
        _require_memory(path.stat().st_size, path.name)
        rates: dict[str, dict[bool, list[float]]] = {
            what: {True: [], False: []} for what in ("decode", "prompt")
        }
        with ExitStack() as stack:
            workers = {}
            for way in (True, False):
                workers[way] = stack.enter_context(llama_worker(llama, f"llama.cpp {path.name}", path))
                workers[way].ask("load", path=str(path), threads=threads, repack=way)
                workers[way].ask("choose", threads=threads, prompt=64, tokens=8)
            for _ in range(rounds):
                for way, worker in workers.items():
                    rates["decode"][way].append(
                        worker.ask("decode", threads=threads, context=32, tokens=16)["rate"]
                    )
                    rates["prompt"][way].append(worker.ask("prompt", threads=threads, length=128)["rate"])
        best = {what: max(ways, key=lambda way: float(np.median(ways[way]))) for what, ways in rates.items()}
        found = {
            "repack": best,
            "rates": {
                what: {"on" if way else "off": values for way, values in ways.items()}
                for what, ways in rates.items()
            },
        }
        self._known[path.name] = found
        self._path.write_text(json.dumps(self._known, indent=1), "utf-8")
        return found


def _require_memory(nbytes: int, name: str) -> None:
    """Refuse what would make the system swap or drop the other models' pages."""
    free = psutil.virtual_memory().available
    if nbytes + _MEMORY_SLACK > free:
        raise BenchError(
            f"{name} needs {(nbytes + _MEMORY_SLACK) / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are "
            "available; use fewer layers or formats"
        )


def check_isas(names: Sequence[str]) -> tuple[str, ...]:
    """Names of instruction sets that this machine has; none: the best one.

    Raises:
        BenchError: One of them is not available.
    """
    available = _native.available_isas()
    for name in names:
        if name not in available:
            raise BenchError(f"instruction set {name!r} is not available here; choose from {available}")
    return tuple(names) or (_native.active_isa(),)
