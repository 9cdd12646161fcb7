"""The second stage: the same numbers as on the CPU, for every type, width, budget and family.

The tests marked ``gpu`` and those of the kernels run in processes of their own; real shapes with two layers
follow, where sizes are those of real models.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moechat
from gpu.record import Cell
from gpu.smoke import distance
from moechat.bench.synthetic_models import load_shape, synthetic_store
from moechat.budget.gpu_sizes import MIN_PAGES
from moechat.offload.accelerator import Accelerator
from moechat.offload.settings import OffloadOptions

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ("qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b")
# Relative distance of the logits of two layers from those in float32. 16-bit types round every activation to
# 11 and 8 bits; with random weights two experts often nearly tie, and a token that takes the other one is far
# off.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}
_BUDGETS = 8
# Each has a context on the GPU.
_MOST_PROCESSES = 8
_TOKENS = 48


def cells(gpu: Accelerator, work: Path, *, tests: bool = True) -> list[Cell]:
    """Tests first: they are small and say most.

    Args:
        gpu: The GPU.
        work: Directory for stores.
        tests: With those of the repository.
    """
    found = []
    if tests:
        found = [
            Cell("tests of the kernels", lambda: pytest("tests/offload/kernels"), 200),
            Cell("tests of the engine", lambda: pytest("-m", "gpu", "tests/gpu"), 240),
            Cell("measuring", lambda: pytest("-m", "gpu", "tests/offload/test_real_gpu_profile.py"), 120),
        ]
    for name in SHAPES:
        found.append(Cell(f"{name}: types", lambda name=name: types(gpu, work, name), 60))
        found.append(Cell(f"{name}: budgets", lambda name=name: budgets(gpu, work, name), 60))
    for bits in (2, 3, 6, 8, 16):
        found.append(
            Cell(f"{SHAPES[0]}: {bits} bits", lambda bits=bits: widths(gpu, work, SHAPES[0], bits), 40)
        )
    return found


def pytest(*selected: str) -> dict[str, Any]:
    """Results of tests in a process of their own; failures with their last lines."""
    begun = time.monotonic()
    report = Path(f"/tmp/gpu-check-{time.monotonic_ns()}.xml")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    if importlib.util.find_spec("xdist") is not None:
        # Most of the time goes to building kernels, on one core each.
        command += ["-n", str(max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) // 2)))]
    done = subprocess.run([*command, *selected], cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        failures = {
            f"{case.get('classname')}::{case.get('name')}": (case[0].text or "").strip()[-600:]
            for case in ElementTree.parse(report).iter("testcase")
            if len(case) and case[0].tag in ("failure", "error")
        }
    except (OSError, ElementTree.ParseError):
        failures = {"pytest": (done.stdout + done.stderr)[-2000:]}
    finally:
        report.unlink(missing_ok=True)
    lines = done.stdout.strip().splitlines() or [""]
    counted = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    return {
        "ok": done.returncode == 0 and bool(counted.get("passed")),
        **counted,
        "failures": failures,
        "wall_s": round(time.monotonic() - begun, 1),
    }


def _logits(path: Path, ids: list[int], **options: Any) -> torch.Tensor:
    with moechat.load(path, ctx=2 * len(ids), **options) as engine:
        return engine.logits(ids)


def _ids(vocabulary: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(0).integers(0, vocabulary, _TOKENS).tolist()
    return drawn


def _store(work: Path, name: str, bits: int) -> tuple[Any, list[int]]:
    shape = load_shape(name, layers=2)
    return synthetic_store(shape, work, bits=bits), _ids(shape.vocabulary)


def types(gpu: Accelerator, work: Path, name: str) -> dict[str, Any]:
    """Every type, by the GPU alone and sharing with the CPU, against float32 on the CPU."""
    store, ids = _store(work, name, 4)
    wanted = _logits(store.path, ids, dtype="float32", dense_bits=16, activation_bits=32)
    blocks = len(store.layers) * store.geometry.num_experts * store.geometry.blocks_per_expert
    errors: dict[str, float] = {}
    for dtype in TOLERANCE:
        for how, deterministic in (("alone", True), ("sharing", False)):
            options = OffloadOptions(accelerator=gpu, pages=max(MIN_PAGES, blocks // 3))
            found = _logits(
                store.path,
                ids,
                device="cuda",
                dtype=dtype,
                activation_bits=32,
                deterministic=deterministic,
                offload=options,
            )
            errors[f"{dtype}, {how}"] = distance(found, wanted)
    far = [key for key, error in errors.items() if not error < TOLERANCE[key.partition(",")[0]]]
    return {"ok": not far, "relative_error": errors, "too_far": far}


def budgets(gpu: Accelerator, work: Path, name: str) -> dict[str, Any]:
    """Logits at eight budgets, from two pages to all: the same bit by bit."""
    store, ids = _store(work, name, 4)
    blocks = len(store.layers) * store.geometry.num_experts * store.geometry.blocks_per_expert
    sizes = sorted({max(MIN_PAGES, blocks * part // (_BUDGETS - 1)) for part in range(_BUDGETS)})

    def logits(pages: int) -> torch.Tensor:
        options = OffloadOptions(accelerator=gpu, pages=pages)
        return _logits(store.path, ids, device="cuda", deterministic=True, offload=options)

    return _same(logits, sizes)


def _same(logits: Callable[[int], torch.Tensor], sizes: list[int]) -> dict[str, Any]:
    found = {pages: logits(pages) for pages in sizes}
    first = found[sizes[-1]]
    other = [pages for pages, one in found.items() if not torch.equal(one, first)]
    finite = bool(torch.isfinite(first).all())
    return {"ok": finite and not other, "pages": sizes, "other_bits_at": other, "finite": finite}


def widths(gpu: Accelerator, work: Path, name: str, bits: int) -> dict[str, Any]:
    """Experts of other widths in float32, against the CPU."""
    store, ids = _store(work, name, bits)
    wanted = _logits(store.path, ids, dtype="float32", dense_bits=16, activation_bits=32)
    options = OffloadOptions(accelerator=gpu)
    found = _logits(store.path, ids, device="cuda", dtype="float32", activation_bits=32, offload=options)
    error = distance(found, wanted)
    return {"ok": error < TOLERANCE["float32"], "relative_error": error}
