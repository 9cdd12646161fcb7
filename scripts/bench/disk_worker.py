"""Measures one system for bench/disk: a model in one process.

    PYTHON scripts/bench/disk_worker.py moechat FILE.gguf
    PYTHON scripts/bench/disk_worker.py llama.cpp FILE.gguf DIRECTORY VARIANT

The model is loaded with the defaults of each; answers requests then, see worker.py. DIRECTORY and VARIANT are
those of :class:`llama_peer.LlamaPeer`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from worker import serve

CONTEXT = 2048
# Computes tokens behind those before, or, where it is told so, from an empty context.
Feed = Callable[[Sequence[int], bool], None]


def bytes_read() -> int:
    """What this process has read from disks, through maps too."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
    return int(fields["read_bytes"])


def measure(feed: Feed, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
    """Seconds to the first token and of each after it; MB read in both."""
    read, started = bytes_read(), time.perf_counter()
    feed(prompt, True)
    first, read_first = time.perf_counter(), bytes_read()
    for token in tokens:
        feed([token], False)
    ended = time.perf_counter()
    return {
        "ttft": first - started,
        "prompt_mb": (read_first - read) / 1e6,
        "tpot": (ended - first) / len(tokens),
        "token_mb": (bytes_read() - read_first) / 1e6 / len(tokens),
    }


def lru_share(chosen: Sequence[Sequence[int]], room: int, skipped: int = 100) -> float:
    """Share of one layer's chosen experts that LRU with so much room finds, after the first tokens."""
    kept: OrderedDict[int, None] = OrderedDict()
    found = count = 0
    for number, experts in enumerate(chosen):
        for expert in experts:
            if number >= skipped:
                count += 1
                found += expert in kept
            kept.pop(expert, None)
            kept[expert] = None
        while len(kept) > room:
            kept.popitem(last=False)
    return found / count


def moechat_functions(path: str) -> dict[str, Callable[..., dict[str, Any]]]:
    import moechat
    from moechat.bench.decode import Bench, Decoding

    engine = moechat.load(path, ctx=CONTEXT)
    decodings: list[Decoding] = []

    def feed(tokens: Sequence[int], empty: bool) -> None:
        if empty:
            decodings[:] = [Decoding(engine)]
        decodings[0].feed(tokens)

    def routing(tokens: list[int]) -> dict[str, Any]:
        bench = Bench(engine)
        layers: list[list[list[int]]] = [[] for _ in range(bench.layers)]
        end = bench.watch(lambda ordinal, _, index: layers[ordinal].extend(index.tolist()))
        feed(tokens, True)
        end()
        room = max(1, bench.store.geometry.num_experts // 4)
        return {"lru_quarter": sum(lru_share(layer, room) for layer in layers) / len(layers)}

    return {"measure": lambda **given: measure(feed, **given), "routing": routing}


def llama_functions(path: str, directory: str, variant: str) -> dict[str, Callable[..., dict[str, Any]]]:
    from llama_peer import load_calls
    from llama_worker import LlamaModel

    calls, _ = load_calls(Path(directory), variant)
    threads = len(os.sched_getaffinity(0))
    model = LlamaModel(calls, Path(path), threads, CONTEXT, repack=False)
    contexts: list[Any] = []

    def feed(tokens: Sequence[int], empty: bool) -> None:
        if empty:
            contexts[:] = [model._empty("auto", threads)]
        model._feed(contexts[0], (ctypes.c_int32 * len(tokens))(*tokens))

    return {"measure": lambda **given: measure(feed, **given)}


if __name__ == "__main__":
    system, *arguments = sys.argv[1:]
    serve(moechat_functions(*arguments) if system == "moechat" else llama_functions(*arguments))
