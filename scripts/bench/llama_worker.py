"""Measures llama.cpp for bench/cpu: one model in one process. Needs numpy and llama-cpp-python only.

    PYTHON scripts/bench/llama_worker.py about             versions, and what the build uses, as JSON
    PYTHON scripts/bench/llama_worker.py serve FILE.gguf   answers requests, see worker.py

llama.cpp is called below its Python classes, so that nothing but its own work is timed.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from worker import serve

_CONTEXT = 1024
_FORMS = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "plain": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "flash": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}


def about() -> dict[str, Any]:
    """Version of the package, and llama.cpp's own words on what it was built for."""
    return {
        "version": metadata.version("llama-cpp-python"),
        "python": sys.executable,
        "system_info": llama_cpp.llama_print_system_info().decode(),
    }


class LlamaModel:
    """A model with a context for each form of attention."""

    def __init__(self, path: Path, threads: int, repack: bool = True) -> None:
        """Load it.

        Args:
            path: Of a GGUF file.
            threads: Most that will be asked for.
            repack: Let llama.cpp put the weights into the order that it likes for this CPU.

        Raises:
            RuntimeError: llama.cpp refuses it; it has said why on stderr.
        """
        llama_cpp.llama_backend_init()
        chosen = llama_cpp.llama_model_default_params()
        chosen.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        chosen.use_extra_bufts = repack
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), chosen)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._tokens = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._contexts = {}
        for name, form in _FORMS.items():
            settings = llama_cpp.llama_context_default_params()
            settings.n_ctx = _CONTEXT
            settings.n_batch = settings.n_ubatch = 512
            settings.n_threads = settings.n_threads_batch = threads
            settings.flash_attn_type = form
            settings.no_perf = True
            context = llama_cpp.llama_init_from_model(self._model, settings)
            if not context:
                raise RuntimeError(f"llama.cpp makes no context of {_CONTEXT} tokens for {path}")
            self._contexts[name] = context
        self._generator = np.random.default_rng(0)

    @property
    def nbytes(self) -> int:
        """Of all tensors, as llama.cpp counts them."""
        return int(llama_cpp.llama_model_size(self._model))

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
        self._feed(context, self._random(8))
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        values = np.ctypeslib.as_array(logits, (self._tokens,))
        return bool(np.isfinite(values).all() and values.std() > 0)

    def _random(self, count: int) -> Any:
        values = self._generator.integers(0, self._tokens, count)
        return (llama_cpp.llama_token * count)(*values.tolist())

    def _empty(self, attention: str, threads: int) -> Any:
        context = self._contexts[attention]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        llama_cpp.llama_set_n_threads(context, threads, threads)
        return context

    def _feed(self, context: Any, tokens: Any) -> None:
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(tokens)))
        if status:
            raise RuntimeError(f"llama_decode ended with {status}")
        llama_cpp.llama_get_logits_ith(context, -1)  # waits for them


@llama_cpp.llama_log_callback
def _errors_only(level: int, text: bytes, _data: ctypes.c_void_p) -> None:
    if level in (4, 5) and _errors_only_last[0] != 3:  # an error, or its continuation
        sys.stderr.write(text.decode("utf-8", "replace"))
    if level != 5:
        _errors_only_last[0] = 4 if level == 4 else 3


_errors_only_last = [3]


def main() -> None:
    """See the module."""
    llama_cpp.llama_log_set(_errors_only, ctypes.c_void_p())
    if sys.argv[1] == "about":
        print(json.dumps(about()))
        return
    models: list[LlamaModel] = []

    def load(path: str, threads: int, repack: bool) -> dict[str, Any]:
        models.append(LlamaModel(Path(path), threads, repack))
        if not models[0].finite():
            raise RuntimeError(f"llama.cpp computes no finite logits from {path}")
        return {"nbytes": models[0].nbytes, "repack": repack}

    serve(
        {
            "load": load,
            "prompt": lambda **given: models[0].prompt(**given),
            "decode": lambda **given: models[0].decode(**given),
        }
    )


if __name__ == "__main__":
    main()
