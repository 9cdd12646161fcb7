"""In which way llama.cpp is fastest: tried once for every file, remembered in the work directory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from cpu_files import BenchError, Files, page_in
from llama_peer import LlamaPeer
from worker import Worker

MEASURED = ("decode", "prompt")
_TOKENS, _PROMPT = 16, 128
_SLACK = 2 << 30
# A second copy of the weights in memory is not worth less.
_WITHIN = 0.03


@dataclass(frozen=True)
class Way:
    """How llama.cpp runs.

    Attributes:
        repack: It puts weights into the order that it likes for this CPU.
        attention: ``plain``, ``flash`` or ``auto``.
    """

    repack: bool
    attention: str


DEFAULT_WAY = Way(repack=True, attention="auto")
_ALL = tuple(Way(repack, attention) for repack in (True, False) for attention in ("plain", "flash"))


class Ways:
    """What was found so far."""

    def __init__(self, files: Files, llama: LlamaPeer) -> None:
        self._llama = llama
        self._path = files.work / f"llama-{llama.variant}.json"
        self._known: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self._known = json.loads(self._path.read_text("utf-8"))

    def of(self, path: Path) -> dict[str, Way]:
        """The fastest way of a file for decode and for prompts.

        Raises:
            BenchError: It was not tried.
        """
        found = self._known.get(path.name)
        if found is None:
            raise BenchError(
                f"it is not known how {path.name} is fastest; run the same with --prepare first, or take "
                "llama.cpp's defaults with --llama-defaults"
            )
        return {what: Way(**way) for what, way in found["best"].items()}

    def find(self, path: Path, threads: int, rounds: int) -> dict[str, Way]:
        """Try all ways in turns, and note the fastest.

        Args:
            path: Of the file.
            threads: Used.
            rounds: Turns of each way.

        Raises:
            BenchError: The memory is too small.
        """
        needed, free = 2 * path.stat().st_size + _SLACK, psutil.virtual_memory().available
        if needed > free:
            raise BenchError(
                f"{path.name} needs {needed / 1e9:.1f} GB of memory to be tried, {free / 1e9:.1f} GB are "
                "available; use fewer layers"
            )
        page_in(path)
        rates: dict[str, dict[Way, list[float]]] = {what: {way: [] for way in _ALL} for what in MEASURED}
        with ExitStack() as stack:
            workers = {}
            for repack in (True, False):
                workers[repack] = stack.enter_context(llama_worker(self._llama, f"llama.cpp {path.name}"))
                workers[repack].post("load", path=str(path), threads=threads, context=256, repack=repack)
            for worker in workers.values():
                worker.answer()
            for number in range(rounds + 1):
                for way in _ALL if number % 2 else _ALL[::-1]:
                    told: dict[str, Any] = {"threads": threads, "attention": way.attention}
                    worker = workers[way.repack]
                    decode = worker.ask("decode", context=32, tokens=_TOKENS if number else 2, **told)
                    prompt = worker.ask("prompt", length=_PROMPT if number else 16, **told)
                    if number:  # the first ones are to warm up
                        rates["decode"][way].append(decode["rate"])
                        rates["prompt"][way].append(prompt["rate"])
        medians = {
            what: {way: statistics.median(values) for way, values in ways.items()}
            for what, ways in rates.items()
        }
        best = fastest(medians)
        self._known[path.name] = {
            "best": {what: asdict(way) for what, way in best.items()},
            "tokens_a_second": {
                what: [{**asdict(way), "rates": values} for way, values in ways.items()]
                for what, ways in rates.items()
            },
        }
        self._path.write_text(json.dumps(self._known, indent=1), "utf-8")
        return best


def fastest(rates: Mapping[str, Mapping[Way, float]]) -> dict[str, Way]:
    """The fastest way of each kind; for prompts one with the order of weights that decode has, if there is
    hardly a difference.
    """
    decode, prompt = (max(rates[what], key=lambda way: rates[what][way]) for what in MEASURED)
    same = {way: rate for way, rate in rates["prompt"].items() if way.repack == decode.repack}
    near = max(same, key=lambda way: same[way])
    if same[near] >= (1 - _WITHIN) * rates["prompt"][prompt]:
        prompt = near
    return {"decode": decode, "prompt": prompt}


def llama_worker(llama: LlamaPeer, name: str) -> Worker:
    """A process for llama.cpp."""
    # What importing moechat has said to the libraries beside it is not for llama.cpp.
    ours: dict[str, str | None] = {"OMP_WAIT_POLICY": None, "MKL_CBWR": None}
    return Worker(name, llama.command("serve"), ours)
