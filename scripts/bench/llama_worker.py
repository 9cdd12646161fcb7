"""Measures llama.cpp for bench/cpu and gpu_check: one model in one process.

    PYTHON scripts/bench/llama_worker.py about DIRECTORY VARIANT BUILD   what runs here, as JSON
    PYTHON scripts/bench/llama_worker.py serve DIRECTORY VARIANT BUILD   answers requests, see worker.py

DIRECTORY, VARIANT and BUILD are those of :class:`llama_peer.LlamaPeer`. llama.cpp is called through its C
interface, so that nothing but its own work is timed.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from llama_peer import load_calls
from worker import serve

_ATTENTION = {"auto": -1, "plain": 0, "flash": 1}


class LlamaModel:
    """A model with a context for each form of attention, made when it is first used."""

    def __init__(
        self,
        calls: ctypes.CDLL,
        path: Path,
        threads: int,
        context: int,
        repack: bool,
        gpu_layers: int = 0,
        cpu_moe: int = 0,
        batch: int = 512,
    ) -> None:
        """Load it.

        Args:
            calls: Of llama.cpp.
            path: Of a GGUF file.
            threads: Most that will be asked for.
            context: Tokens that a context holds.
            repack: Let llama.cpp put the weights into the order that it likes for this CPU.
            gpu_layers: Layers on a GPU.
            cpu_moe: Of these, the first ones whose experts stay in host memory.
            batch: Tokens of a prompt that are computed at a time.

        Raises:
            RuntimeError: llama.cpp refuses it; it has said why on stderr.
        """
        self._calls, self._threads, self._context, self._batch = calls, threads, context, batch
        self._model = calls.peer_load(str(path).encode(), repack, gpu_layers, cpu_moe)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._tokens = calls.peer_vocabulary(self._model)
        self._contexts: dict[str, Any] = {}
        self._generator = np.random.default_rng(0)

    @property
    def nbytes(self) -> int:
        """Of all tensors, as llama.cpp counts them."""
        return int(self._calls.peer_model_bytes(self._model))

    def prompt(self, threads: int, length: int, attention: str) -> dict[str, Any]:
        """Compute a prompt from an empty context; tokens a second."""
        context = self._empty(attention, threads)
        tokens = self._random(length)
        started = time.perf_counter()
        self._feed(context, tokens)
        return {"rate": length / (time.perf_counter() - started)}

    def decode(self, threads: int, context: int, tokens: int, attention: str) -> dict[str, Any]:
        """Compute single tokens after a prompt; tokens a second, and milliseconds of each."""
        handle = self._empty(attention, threads)
        self._feed(handle, self._random(context))
        pieces = [self._random(1) for _ in range(tokens + 2)]
        for piece in pieces[:2]:
            self._feed(handle, piece)
        times = [time.perf_counter()]
        for piece in pieces[2:]:
            self._feed(handle, piece)
            times.append(time.perf_counter())
        spent = [1e3 * (b - a) for a, b in pairwise(times)]
        return {"rate": tokens / (times[-1] - times[0]), "ms": spent}

    def finite(self) -> bool:
        """Whether the logits after a prompt are numbers."""
        context = self._empty("auto", 1)
        logits = self._feed(context, self._random(8))
        values = np.ctypeslib.as_array(logits, (self._tokens,))
        return bool(np.isfinite(values).all() and values.std() > 0)

    def close(self) -> None:
        """Free it."""
        for context in self._contexts.values():
            self._calls.peer_free_context(context)
        self._contexts.clear()
        self._calls.peer_free(self._model)

    def _random(self, count: int) -> Any:
        values = self._generator.integers(0, self._tokens, count)
        return (ctypes.c_int32 * count)(*values.tolist())

    def _empty(self, attention: str, threads: int) -> Any:
        if attention not in self._contexts:
            made = self._calls.peer_context(
                self._model, self._context, self._threads, _ATTENTION[attention], self._batch
            )
            if not made:
                raise RuntimeError(f"llama.cpp makes no context of {self._context} tokens")
            self._contexts[attention] = made
        context = self._contexts[attention]
        self._calls.peer_empty(context, threads)
        return context

    def _feed(self, context: Any, tokens: Any) -> Any:
        logits = self._calls.peer_feed(context, tokens, len(tokens))
        if not logits:
            raise RuntimeError(f"llama.cpp does not compute {len(tokens)} tokens")
        return logits


def main() -> None:
    """See the module."""
    calls, variant = load_calls(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
    if sys.argv[1] == "about":
        print(json.dumps({"variant": variant, "system_info": calls.peer_system_info().decode()}))
        return
    models: list[LlamaModel] = []

    def load(path: str, threads: int, context: int, repack: bool, **on_gpu: int) -> dict[str, Any]:
        while models:
            models.pop().close()
        models.append(LlamaModel(calls, Path(path), threads, context, repack, **on_gpu))
        if not models[0].finite():
            raise RuntimeError(f"llama.cpp computes no finite logits from {path}")
        return {"nbytes": models[0].nbytes, "repack": repack, "variant": variant}

    serve(
        {
            "load": load,
            "prompt": lambda **given: models[0].prompt(**given),
            "decode": lambda **given: models[0].decode(**given),
        }
    )


if __name__ == "__main__":
    main()
