"""Log probabilities of every next word by llama.cpp; needs xllamacpp only, so that it runs where that is.

    PYTHON scripts/bench/gguf_llama.py FILE.gguf '[TOKEN, ...]' '[LENGTH, ...]'
    PYTHON scripts/bench/gguf_llama.py FILE.gguf --windows <WINDOWS.json

Prints a JSON list: for each length, those after as many tokens; or for each window of tokens those of its own
next words. The attention cache is in float32.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xllamacpp as llama

_TRIES = 20


def server(path: str) -> Any:
    """llama.cpp with the model of a file, on one thread."""
    params = llama.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 1024, 1, 0
    params.warmup = params.fit_params = False
    params.no_extra_bufts = True
    params.verbosity = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return llama.Server(params)


def log_probabilities(model: Any, tokens: list[int], *, reuse: bool = False) -> list[float]:
    """Those of every word after the tokens.

    Args:
        model: See :func:`server`.
        tokens: The tokens.
        reuse: Keep the attention cache of tokens that the last request shares.

    Raises:
        RuntimeError: Every answer was the end, for which the server states none.
    """
    request = {
        "prompt": tokens,
        "n_predict": 1,
        "n_probs": 1 << 20,
        "temperature": 1.0,
        "samplers": [],
        "cache_prompt": reuse,
    }
    for seed in range(_TRIES):
        answer = model.handle_completions({**request, "seed": seed})
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        stated = answer["choices"][0]["logprobs"]
        if stated:
            found = {word["id"]: word["logprob"] for word in stated["content"][0]["top_logprobs"]}
            return [found[word] for word in range(len(found))]
    raise RuntimeError(f"llama.cpp answered with the end {_TRIES} times")


def main() -> None:
    """See the module."""
    model = server(sys.argv[1])
    if sys.argv[2] == "--windows":
        windows = json.load(sys.stdin)
        print(
            json.dumps(
                [
                    [
                        log_probabilities(model, window[:length], reuse=True)[window[length]]
                        for length in range(1, len(window))
                    ]
                    for window in windows
                ]
            )
        )
        return
    tokens = json.loads(sys.argv[2])
    print(json.dumps([log_probabilities(model, tokens[:length]) for length in json.loads(sys.argv[3])]))


if __name__ == "__main__":
    main()
