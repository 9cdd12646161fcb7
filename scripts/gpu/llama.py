"""The sixth stage: llama.cpp on the same card, in turns with moechat, at the best of its settings.

llama.cpp comes prebuilt for CUDA (``scripts/bench/llama_peer.py``) and reads a GGUF file of the same shape,
every matrix Q4_K. Its ``-ncmoe`` (layers whose experts stay in host memory) is swept over the values that fit
into the budget, and so are the tokens of a batch. The best for decoding and the best for prompts are taken.

Files that are too large for one copy to the machine may lie there in parts, NAME.part0, NAME.part1 and so on.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf_shapes import GgufPlan, plan_gguf
from llama_peer import LlamaPeer
from worker import Worker, WorkerError

import moechat
from gpu.record import Cell, Say
from gpu.rounds import Rounds, turn
from gpu.speed import Speeds
from moechat import _native
from moechat.bench.synthetic_models import load_shape, synthetic_store
from moechat.config import parse_size
from moechat.offload.accelerator import Accelerator
from moechat.offload.settings import OffloadOptions

_BENCH = Path(__file__).resolve().parents[1] / "bench"
BUILD = "linux-x64-cuda"
_FAMILIES = ("mixtral", "qwen3_moe")
_BATCHES = (512, 2048)
_SWEEP = 5
_ROUNDS = 3


def cells(gpu: Accelerator, speeds: Speeds, directory: Path | None, say: Say) -> list[Cell]:
    """A cell for each case whose family has a GGUF form here; none without llama.cpp."""
    if directory is None:
        return []
    peer = LlamaPeer(directory, build=BUILD)
    found = [Cell("about", lambda: _about(peer), 20)]
    for case in speeds.cases:
        shape = load_shape(case.partition("@")[0], layers=speeds.layers)
        if shape.config.model_type in _FAMILIES:
            found.append(Cell(case, lambda case=case: compared(gpu, speeds, peer, case, say), 240))
    return found


def _about(peer: LlamaPeer) -> dict[str, Any]:
    for first in sorted(peer.directory.rglob("*.part0")):
        whole = first.with_suffix("")
        parts = sorted(first.parent.glob(f"{whole.name}.part*"), key=lambda part: int(part.suffix[5:]))
        if not whole.exists():
            with open(whole, "wb") as file:
                for part in parts:
                    file.write(part.read_bytes())
    return peer.about()


def compared(gpu: Accelerator, speeds: Speeds, peer: LlamaPeer, case: str, say: Say) -> dict[str, Any]:
    """One shape at one budget: moechat by default, and llama.cpp at its best, in turns."""
    name, _, budget_text = case.partition("@")
    shape = load_shape(name, layers=speeds.layers)
    store = synthetic_store(shape, speeds.work, bits=4)
    say(f"{case}: GGUF file")
    file = gguf_file(speeds.work, shape.config.to_dict(), name, shape.layers)
    prompts = tuple(length for length in speeds.rounds.prompts if length <= 4096)
    longest = max(prompts) + speeds.rounds.warm + speeds.rounds.tokens + 8
    rounds = Rounds(prompts=prompts, contexts=prompts[:1], warm=16, tokens=speeds.rounds.tokens, rounds=1)
    budget = parse_size(budget_text)
    with _worker(peer, case) as worker:
        best = sweep(
            gpu, worker, file, shape.layers, budget, longest, rounds, say=lambda text: say(f"{case}: {text}")
        )
        say(f"{case}: llama.cpp is fastest with {best}")
        gpu.release()
        options: dict[str, Any] = {"vram": budget_text, "ctx": longest, "dense_bits": speeds.dense_bits}
        ours: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []
        with moechat.load(
            store.path, device="cuda", offload=OffloadOptions(accelerator=gpu), **options
        ) as engine:
            near = engine.loaded.near
            assert near is not None
            for what in ("decode", "prompt"):
                _load(worker, file, longest, best[what])
                for _ in range(_ROUNDS):
                    theirs.append({what: _turn_of_llama(worker, what, rounds, best[what])})
                    ours.append(turn(engine, near, rounds))
    mine = statistics.median(time for one in ours for time in one["decoded"][rounds.contexts[0]]["times"])
    other = statistics.median(time for one in theirs if "decode" in one for time in one["decode"])
    first = {length: statistics.median(one["first"][length] for one in ours) for length in rounds.prompts}
    their_first = {
        length: statistics.median(one["prompt"][length] for one in theirs if "prompt" in one)
        for length in rounds.prompts
    }
    return {
        "best": best,
        "token_ms": {"moechat": 1e3 * mine, "llama.cpp": other},
        "faster": other / (1e3 * mine),
        "first_token_s": {"moechat": first, "llama.cpp": their_first},
        "first_faster": {length: their_first[length] / first[length] for length in first},
    }


@contextmanager
def _worker(peer: LlamaPeer, name: str) -> Iterator[Worker]:
    with Worker(
        f"llama.cpp {name}", peer.command("serve"), {"OMP_WAIT_POLICY": None, "MKL_CBWR": None}
    ) as worker:
        yield worker


def _load(worker: Worker, file: Path, context: int, way: dict[str, int]) -> None:
    worker.ask("load", path=str(file), context=context, repack=True, gpu_layers=999, **way)


def _turn_of_llama(worker: Worker, what: str, rounds: Rounds, way: dict[str, int]) -> Any:
    """Milliseconds of tokens, or seconds of each prompt."""
    threads = way["threads"]
    if what == "decode":
        length = rounds.contexts[0]
        found = worker.ask("decode", threads=threads, context=length, tokens=rounds.tokens, attention="auto")
        return found["ms"]
    return {
        length: length / worker.ask("prompt", threads=threads, length=length, attention="auto")["rate"]
        for length in rounds.prompts
    }


def sweep(
    gpu: Accelerator,
    worker: Worker,
    file: Path,
    layers: int,
    budget: int,
    context: int,
    rounds: Rounds,
    *,
    say: Say,
) -> dict[str, dict[str, int]]:
    """The best settings within a budget, for decoding and for prompts.

    Raises:
        WorkerError: None fits.
    """
    threads = max(1, _native.num_threads())
    tried: list[tuple[dict[str, int], float, float]] = []
    fitting = layers
    low, high = 0, layers
    # The fewest layers in host memory that fit into the budget, then steps to all of them.
    while low <= high:
        middle = (low + high) // 2
        way = {"threads": threads, "cpu_moe": middle, "batch": _BATCHES[0]}
        if _fits(gpu, worker, file, context, way, budget):
            fitting, high = middle, middle - 1
        else:
            low = middle + 1
    values = sorted({fitting + (layers - fitting) * step // (_SWEEP - 1) for step in range(_SWEEP)})
    for cpu_moe in values:
        for batch in _BATCHES:
            way = {"threads": threads, "cpu_moe": cpu_moe, "batch": batch}
            if not _fits(gpu, worker, file, context, way, budget):
                continue
            decode = worker.ask("decode", threads=threads, context=32, tokens=24, attention="auto")["rate"]
            length = max(rounds.prompts)
            prompt = worker.ask("prompt", threads=threads, length=length, attention="auto")["rate"]
            say(f"-ncmoe {cpu_moe}, batch {batch}: {decode:.1f} tokens/s, prompt {prompt:.0f}")
            tried.append((way, decode, prompt))
    if not tried:
        raise WorkerError(f"llama.cpp does not fit into {budget >> 20} MiB with any -ncmoe")
    return {
        "decode": max(tried, key=lambda one: one[1])[0],
        "prompt": max(tried, key=lambda one: one[2])[0],
    }


def _fits(
    gpu: Accelerator, worker: Worker, file: Path, context: int, way: dict[str, int], budget: int
) -> bool:
    """Load the model; whether it takes no more of the GPU's memory than the budget."""
    gpu.release()
    _, total = gpu.memory()
    before = _used(gpu)
    try:
        _load(worker, file, context, way)
        worker.ask("decode", threads=way["threads"], context=8, tokens=1, attention="auto")
    except WorkerError:
        return False
    return _used(gpu) - before <= min(budget, total)


def _used(gpu: Accelerator) -> int:
    torch.cuda.synchronize(gpu.device)
    free, total = gpu.memory()
    return total - free


def gguf_file(work: Path, config: dict[str, Any], name: str, layers: int) -> Path:
    """A GGUF file of a shape in Q4_K, written if it is missing."""
    plan: GgufPlan = plan_gguf(config, "q4_k", context=32768)
    path = work / f"{name}-{layers}l-q4_k-{plan.fingerprint}.gguf"
    if not path.exists():
        described = work / f"{path.name}.json"
        described.write_text(json.dumps(plan.to_json()), "utf-8")
        command = [sys.executable, str(_BENCH / "gguf_files.py"), str(described), str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
    return path


def table(cells: dict[str, Any]) -> str:
    """The cells of the stage, for people."""
    lines = []
    for case, found in cells.items():
        if "faster" in found:
            first = ", ".join(f"{length}: {ratio:.2f}" for length, ratio in found["first_faster"].items())
            ours, theirs = (found["token_ms"][name] for name in ("moechat", "llama.cpp"))
            lines.append(
                f"{case}: {ours:.2f} ms a token, llama.cpp {theirs:.2f} ({found['best']['decode']}): "
                f"{found['faster']:.2f} times as fast; first token {first}"
            )
    return "\n".join(lines)
