"""The processes that bench/cpu compares: started, loaded and warm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from cpu_files import THIN, BenchError, Files, Model, Say, has_thin, page_in
from cpu_llama import DEFAULT_WAY, MEASURED, Way, Ways, llama_worker
from gguf_shapes import FORMATS, GgufPlan
from llama_peer import LlamaPeer
from worker import Worker

from moechat import _native

_MEMORY_SLACK = 3 << 29
_CONTEXT_STEP = 1024
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
        dense_bits: Of moechat; ``None``: its default.
        activation_bits: Of moechat, a system for each of them and of the instruction sets; ``None``: its
            default.
        best: llama.cpp runs as is fastest here, not by its own defaults.
        kept: moechat reads llama.cpp's files too, and keeps the values of their experts.
    """

    isas: tuple[str, ...]
    formats: tuple[str, ...]
    threads: tuple[int, ...]
    rounds: int
    tokens: int
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    dense_bits: int | None
    activation_bits: tuple[int | None, ...]
    best: bool
    kept: bool = False

    @property
    def context(self) -> int:
        """Tokens that a measurement holds at most; rounded up."""
        most = max(max(self.contexts) + self.tokens + 2, max(self.prompts))
        return -(-most // _CONTEXT_STEP) * _CONTEXT_STEP

    def options(self, activation_bits: int | None) -> dict[str, int]:
        """Options of :func:`moechat.load`: those that are not its defaults."""
        given = {"dense_bits": self.dense_bits, "activation_bits": activation_bits}
        return {"ctx": self.context} | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class System:
    """A worker that takes turns.

    Attributes:
        name: See :class:`Turn`.
        workers: By what they measure, with what each is told beside; llama.cpp may be fastest in two ways.
        active_bytes: Of weights that a token reads.
        about: Facts.
    """

    name: str
    workers: dict[str, tuple[Worker, dict[str, Any]]]
    active_bytes: int
    about: dict[str, Any]


@dataclass(frozen=True)
class _Part:
    """A process that is loading.

    Attributes:
        name: Of its system.
        worker: It.
        path: What it loads.
        whats: What it will measure, and what it is told for it.
        plan: Of a GGUF file.
    """

    name: str
    worker: Worker
    path: Path
    whats: dict[str, dict[str, Any]]
    plan: GgufPlan | None = None


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
        llama: LlamaPeer | None,
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
            parts += [self._moechat(isa, bits) for isa in settings.isas for bits in settings.activation_bits]
        for kind in self._formats if self._ours and settings.kept else ():
            parts.append(self._kept(kind, settings.isas[0]))
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

    def _moechat(self, isa: str, activation_bits: int) -> _Part:
        path, settings = self._files.store(self._model), self._settings
        name = f"moechat {isa}" if activation_bits is None else f"moechat {isa} a{activation_bits}"
        page_in(path)
        worker = self._stack.enter_context(self._files.moechat_worker(name, isa))
        options = settings.options(activation_bits)
        worker.post("load", path=str(path), threads=max(settings.threads), options=options)
        return _Part(name, worker, path, {"decode": {}, "prompt": {}, "experts": {}})

    def _kept(self, kind: str, isa: str) -> _Part:
        """A file of llama.cpp in moechat, which ``--prepare`` has converted."""
        path, settings = self._files.gguf(self._model, kind), self._settings
        name = f"moechat {isa} kept {kind}"
        worker = self._stack.enter_context(self._files.moechat_worker(name, isa))
        options = settings.options(settings.activation_bits[0])
        worker.post("load", path=str(path), threads=max(settings.threads), options=options)
        return _Part(name, worker, path, {"decode": {}, "prompt": {}, "experts": {}})

    def _gguf(self, kind: str, neurons: int | None) -> list[_Part]:
        """A process for decode and one for prompts, or one for both, where the same arrangement is best."""
        assert self._llama is not None
        path, plan = self._files.gguf(self._model, kind, neurons), self._model.plan(kind, neurons)
        name = kind if neurons is None else f"{kind} thin"
        ways = _ways(self._files, self._model, self._settings, self._llama, kind)
        if neurons is not None:
            del ways["prompt"]
        page_in(path)
        parts = []
        for repack in sorted({way.repack for way in ways.values()}):
            worker = self._stack.enter_context(llama_worker(self._llama, f"llama.cpp {name}"))
            worker.post(
                "load",
                path=str(path),
                threads=max(self._settings.threads),
                context=self._settings.context,
                repack=repack,
            )
            whats = {what: {"attention": way.attention} for what, way in ways.items() if way.repack == repack}
            parts.append(_Part(name, worker, path, whats, plan))
        return parts

    def _warm(self, part: _Part, about: dict[str, Any]) -> None:
        most = max(self._settings.threads)
        for what, told in part.whats.items():
            if what == "prompt":
                part.worker.ask("prompt", threads=most, length=32, **told)
            elif what == "decode":
                part.worker.ask("decode", threads=most, context=8, tokens=4, **told)
        if part.plan is not None:
            about["active_bytes"] = part.plan.active_bytes
            about["expert_active_bytes"] = part.plan.expert_active_bytes
            about["ways"] = {what: {"repack": about["repack"], **told} for what, told in part.whats.items()}
            del about["repack"]
        system = self.systems.setdefault(part.name, System(part.name, {}, about["active_bytes"], {}))
        ways = {**system.about.get("ways", {}), **about.get("ways", {})}
        system.about.update(about, **({"ways": ways} if ways else {}))
        system.workers.update({what: (part.worker, told) for what, told in part.whats.items()})
        self._say(f"{self._model.name}: {part.name} loaded for {' and '.join(part.whats)}")


def groups(
    files: Files, model: Model, settings: Settings, llama: LlamaPeer | None, ours: bool
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
    if ours and settings.kept:
        kept = max(model.plan(kind).nbytes for kind in settings.formats)
        fixed += kept + _MOECHAT_BYTES
    needed = {kind: _gguf_memory(files, model, settings, llama, kind) for kind in settings.formats}
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


def _gguf_memory(files: Files, model: Model, settings: Settings, llama: LlamaPeer, kind: str) -> int:
    """Of all processes with this format: the mapped file, and a copy of it where the order is another."""
    ways = {way.repack for way in _ways(files, model, settings, llama, kind).values()}
    needed = len(ways) * (model.plan(kind).nbytes + _LLAMA_BYTES)
    if kind == FORMATS[0] and has_thin(model):
        needed += model.plan(kind, THIN).nbytes + _LLAMA_BYTES
    return needed


def _ways(files: Files, model: Model, settings: Settings, llama: LlamaPeer, kind: str) -> dict[str, Way]:
    """How llama.cpp runs, by what is measured."""
    if settings.best:
        return Ways(files, llama).of(files.gguf(model, kind))
    return dict.fromkeys(MEASURED, DEFAULT_WAY)


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
