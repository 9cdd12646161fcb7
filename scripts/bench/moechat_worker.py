"""Measures moechat for bench/cpu: one model and instruction set in one process.

    PYTHON scripts/bench/moechat_worker.py   answers requests, see worker.py

``MOECHAT_ISA`` chooses the kernels; ``MOECHAT_HOME`` is where it is noted that a store was verified.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worker import serve

import moechat
from moechat import _native
from moechat.bench.decode import Bench
from moechat.bench.synthetic_models import cut_shape, describe_shape, store_name
from moechat.hub.names import resolve
from moechat.loading.stores import open_store
from moechat.store.synthetic import write_synthetic_store


def sizes(name: str, config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Directory name and bytes of the store that :func:`prepare` would write."""
    shape = cut_shape(name, config, layers=layers)
    model = describe_shape(shape, bits=4)
    return {"name": store_name(shape, 4), "nbytes": model.expert_bytes + model.dense_bytes}


def prepare(
    name: str, config: dict[str, Any], layers: int, path: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Write the 4-bit store of a shape unless it is there, verify it, and pack what the options ask for."""
    shape = cut_shape(name, config, layers=layers)
    write_synthetic_store(describe_shape(shape, bits=4), Path(path))
    moechat.load(path, **options).close()
    return {}


def convert(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Convert a GGUF file with the values that it has, and pack what the options ask for; seconds."""
    started = time.perf_counter()
    open_store(resolve(path), None, lambda _: None)
    seconds = time.perf_counter() - started
    moechat.load(path, **options).close()
    return {"seconds": seconds}


class MoechatModel:
    """A loaded model whose experts are mapped."""

    def __init__(self, path: str, threads: int, options: dict[str, Any]) -> None:
        """Load it.

        Args:
            path: Of the store.
            threads: Most that will be asked for.
            options: Of :func:`moechat.load`.

        Raises:
            MoechatError: See :func:`moechat.load`.
            RuntimeError: The memory is too small to map all experts.
        """
        engine = moechat.load(path, threads=threads, **options)
        held = engine.describe().experts
        if not held.startswith("mapped"):
            raise RuntimeError(f"experts of {path} are not mapped ({held}): too little memory is free")
        self._bench = Bench(engine)
        self._generator = np.random.default_rng(0)
        geometry = self._bench.store.geometry
        self._hidden = geometry.hidden_size
        self._touch()

    def about(self) -> dict[str, Any]:
        """Facts, and the bytes of weights that a token reads."""
        engine, bench = self._bench.engine, self._bench
        geometry = bench.store.geometry
        experts = bench.layers * bench.top_k * geometry.expert_bytes
        described = engine.describe().to_json()
        return {
            "isa": _native.active_isa(),
            "version": moechat.__version__,
            "torch": torch.__version__,
            "torch_isa": torch.backends.cpu.get_cpu_capability(),
            "dense_dtype": described["dense_dtype"],
            "dense_bits": described["dense_bits"],
            "activation_bits": described["activation_bits"],
            "expert_active_bytes": experts,
            "active_bytes": experts + dense_active_bytes(bench.model),
        }

    def prompt(self, threads: int, length: int) -> dict[str, Any]:
        """Compute a prompt from an empty context; tokens a second."""
        self._use(threads)
        return {"rate": length / self._bench.start(self._random(length))[0]}

    def decode(self, threads: int, context: int, tokens: int) -> dict[str, Any]:
        """Compute single tokens after a prompt; tokens a second, and milliseconds of each."""
        self._use(threads)
        _, decoding = self._bench.start(self._random(context))
        pieces = [self._random(1) for _ in range(tokens + 2)]
        for piece in pieces[:2]:
            decoding.feed(piece)
        times = [time.perf_counter()]
        for piece in pieces[2:]:
            decoding.feed(piece)
            times.append(time.perf_counter())
        spent = [1e3 * (b - a) for a, b in pairwise(times)]
        return {"rate": tokens / (times[-1] - times[0]), "ms": spent}

    def experts(self, threads: int, tokens: int) -> dict[str, Any]:
        """Compute the expert layers alone, one token after the other with experts drawn at random; bytes of
        blocks a second.
        """
        self._use(threads)
        bench, geometry = self._bench, self._bench.store.geometry
        layers: list[Any] = [part.module._moechat_layer for part in bench.parts]
        x = torch.randn(1, self._hidden)
        weights = torch.full((1, bench.top_k), 1.0 / bench.top_k)
        choices = [
            [
                torch.from_numpy(
                    self._generator.choice(geometry.num_experts, (1, bench.top_k), replace=False)
                )
                for _ in layers
            ]
            for _ in range(tokens + 2)
        ]
        started = 0.0
        with torch.inference_mode():
            for number, token in enumerate(choices):
                if number == 2:
                    started = time.perf_counter()
                for layer, index in zip(layers, token, strict=True):
                    layer.forward(x, index, weights)
        elapsed = time.perf_counter() - started
        walked = tokens * len(layers) * bench.top_k * geometry.expert_bytes
        return {"rate": walked / elapsed, "layer_us": 1e6 * elapsed / tokens / len(layers)}

    def _use(self, threads: int) -> None:
        _native.set_num_threads(threads)
        torch.set_num_threads(threads)

    def _random(self, count: int) -> list[int]:
        values: list[int] = self._generator.integers(0, self._bench.vocabulary, count).tolist()
        return values

    def _touch(self) -> None:
        """Compute every expert once, so that all of them are in memory and in the page tables."""
        geometry, bench = self._bench.store.geometry, self._bench
        every = torch.arange(geometry.num_experts).reshape(1, -1)
        x, weights = torch.zeros(1, self._hidden), torch.zeros(every.shape)
        with torch.inference_mode():
            for part in bench.parts:
                layer: Any = part.module._moechat_layer
                layer.forward(x, every, weights)


def dense_active_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights outside of the experts that a token reads: all, but one row of an embedding."""
    total = 0
    for module in model.modules():
        rows = getattr(module, "num_embeddings", None)
        parameters = [value for value in module._parameters.values() if value is not None]
        own: int = getattr(module, "nbytes", sum(value.nbytes for value in parameters))
        total += own // rows if rows else own
    return total


def main() -> None:
    """See the module."""
    models: list[MoechatModel] = []

    def load(path: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        models.append(MoechatModel(path, threads, options))
        return models[0].about()

    serve(
        {
            "sizes": sizes,
            "prepare": prepare,
            "convert": convert,
            "load": load,
            "prompt": lambda **given: models[0].prompt(**given),
            "decode": lambda **given: models[0].decode(**given),
            "experts": lambda **given: models[0].experts(**given),
        }
    )


if __name__ == "__main__":
    main()
