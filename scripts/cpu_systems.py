"""The processes that bench_cpu compares: started, loaded and warm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cpu_files import THIN, BenchError, Files, LlamaPython, Model, Say, has_thin, page_in
from gguf_shapes import FORMATS, GgufPlan
from worker import Worker

from moechat import _native

_ARRANGEMENTS = "llama.json"
_MEMORY_SLACK = 3 << 29
# Of a process, beside what it maps: code, attention cache, workspace, packed dense weights.
_MOECHAT_BYTES, _LLAMA_BYTES = 5 << 28, 3 << 28


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
class System:
    """A worker that takes turns.

    Attributes:
        name: See :class:`Turn`.
        workers: By what they measure; llama.cpp may need two arrangements for decode and prompt.
        active_bytes: Of weights that a token reads.
        about: Facts.
    """

    name: str
    workers: dict[str, Worker]
    active_bytes: int
    about: dict[str, Any]


@dataclass(frozen=True)
class _Part:
    """A process that is loading.

    Attributes:
        name: Of its system.
        worker: It.
        path: What it loads.
        whats: What it will measure.
        plan: Of a GGUF file.
        repack: With llama.cpp's own order of weights.
    """

    name: str
    worker: Worker
    path: Path
    whats: tuple[str, ...]
    plan: GgufPlan | None = None
    repack: bool = False


class Systems:
    """All systems of one model, loaded at once; a context manager, at whose end the processes are gone.

    Attributes:
        systems: By name.
    """

    def __init__(
        self,
        files: Files,
        model: Model,
        settings: Settings,
        formats: tuple[str, ...],
        llama: LlamaPython | None,
        ours: bool,
        say: Say,
    ) -> None:
        self._files, self._model, self._settings, self._say = files, model, settings, say
        self._formats, self._llama, self._ours = formats, llama, ours
        self.systems: dict[str, System] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Systems:
        try:
            self._load()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def _load(self) -> None:
        """Start and load all at the same time, then let one after the other warm up."""
        settings, first = self._settings, FORMATS[0]
        parts: list[_Part] = []
        if self._ours:
            parts += [self._moechat(isa) for isa in settings.isas]
        for kind in self._formats:
            parts += self._gguf(kind, None)
            if kind == first and has_thin(self._model):
                parts += self._gguf(kind, THIN)
        facts = [part.worker.answer() for part in parts]
        for part, about in zip(parts, facts, strict=True):
            if part.plan is not None and about["nbytes"] != part.plan.nbytes:
                raise BenchError(
                    f"llama.cpp counts {about['nbytes']} bytes in {part.path}, the plan {part.plan.nbytes}"
                )
            self._warm(part, about)

    def _moechat(self, isa: str) -> _Part:
        path, settings = self._files.store(self._model), self._settings
        page_in(path)
        worker = self._stack.enter_context(self._files.moechat_worker(f"moechat {isa}", isa))
        worker.post("load", path=str(path), threads=max(settings.threads), options=dict(settings.options))
        return _Part(f"moechat {isa}", worker, path, ("decode", "prompt", "experts"))

    def _gguf(self, kind: str, neurons: int | None) -> list[_Part]:
        """A process for decode and one for prompts, or one for both, where the same arrangement is best."""
        assert self._llama is not None
        path, plan = self._files.gguf(self._model, kind, neurons), self._model.plan(kind, neurons)
        name = kind if neurons is None else f"{kind} thin"
        ways = _ways(self._files, self._model, self._settings, kind)
        if neurons is not None:
            del ways["prompt"]
        page_in(path)
        parts = []
        for way in sorted(set(ways.values())):
            worker = self._stack.enter_context(llama_worker(self._llama, f"llama.cpp {name}", path))
            worker.post("load", path=str(path), threads=max(self._settings.threads), repack=way)
            whats = tuple(what for what, chosen in ways.items() if chosen == way)
            parts.append(_Part(name, worker, path, whats, plan, way))
        return parts

    def _warm(self, part: _Part, about: dict[str, Any]) -> None:
        most = max(self._settings.threads)
        if part.plan is None:
            part.worker.ask("prompt", threads=most, length=32)
            part.worker.ask("decode", threads=most, context=8, tokens=4)
            active = about.pop("active_bytes")
        else:
            chosen = part.worker.ask("choose", threads=most, prompt=64, tokens=8)
            active = part.plan.active_bytes
            about = {
                "expert_active_bytes": part.plan.expert_active_bytes,
                "repack": dict.fromkeys(part.whats, part.repack),
                "attention": {what: chosen["attention"][what] for what in part.whats},
                "attention_tried": {what: chosen["tried"][what] for what in part.whats},
            }
        system = self.systems.setdefault(part.name, System(part.name, {}, active, {}))
        for key, value in about.items():
            if isinstance(value, dict):
                system.about.setdefault(key, {}).update(value)
            else:
                system.about[key] = value
        system.workers.update(dict.fromkeys(part.whats, part.worker))
        self._say(f"{self._model.name}: {part.name} loaded for {' and '.join(part.whats)}")


def groups(
    files: Files, model: Model, settings: Settings, llama: LlamaPython | None, ours: bool
) -> list[tuple[str, ...]]:
    """Formats that are measured beside moechat at the same time: all, or one after the other where the memory
    is too small for all.

    Raises:
        BenchError: It is too small for one.
    """
    if llama is None:
        return [()]
    store = sum(file.stat().st_size for file in files.store(model).iterdir())
    fixed = _MEMORY_SLACK + (store + len(settings.isas) * _MOECHAT_BYTES if ours else 0)
    needed = {kind: _gguf_memory(files, model, settings, kind) for kind in settings.formats}
    free = psutil.virtual_memory().available
    if fixed + sum(needed.values()) <= free:
        return [settings.formats]
    kind = max(needed, key=lambda name: needed[name])
    if fixed + needed[kind] > free:
        raise BenchError(
            f"{model.name} needs {(fixed + needed[kind]) / 1e9:.1f} GB of memory to be measured with {kind}, "
            f"{free / 1e9:.1f} GB are available; use fewer layers"
        )
    return [(name,) for name in settings.formats]


def _gguf_memory(files: Files, model: Model, settings: Settings, kind: str) -> int:
    """Of all processes with this format: the mapped file, and a copy of it where the order is another."""
    ways = set(_ways(files, model, settings, kind).values())
    needed = len(ways) * (model.plan(kind).nbytes + _LLAMA_BYTES)
    if kind == FORMATS[0] and has_thin(model):
        needed += model.plan(kind, THIN).nbytes + _LLAMA_BYTES
    return needed


def _ways(files: Files, model: Model, settings: Settings, kind: str) -> dict[str, bool]:
    """Whether llama.cpp reorders the weights, by what is measured."""
    if settings.repack == "auto":
        return Arrangements(files).of(files.gguf(model, kind))
    return dict.fromkeys(("decode", "prompt"), settings.repack == "on")


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
