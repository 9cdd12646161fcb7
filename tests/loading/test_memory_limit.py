"""Invariant 3: a process with ``ram=`` stays below it, measured, and under a limit that the kernel holds."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from homes import shared_home
from places import SUPPORT
from tiny import write_tiny_checkpoint
from transformers import AutoConfig

import moechat
from moechat.errors import DoesNotFitError

PROMPT = 4000
CHILD = SUPPORT / "budget_child.py"
MEBI = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 150 MB of experts at 8 bits: several times what the budget below leaves for them."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=40,
        num_experts_per_tok=4,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    directory = tmp_path_factory.mktemp("budget") / "model"
    write_tiny_checkpoint(directory, config)
    return directory


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A library of the module's own: the first process converts the model, within its budget."""
    with shared_home(tmp_path_factory) as directory:
        yield directory


@pytest.fixture(scope="module")
def least(model: Path, home: Path) -> int:
    """The least budget of a fresh process."""
    done = subprocess.run(
        [sys.executable, str(CHILD), str(model), "0", str(PROMPT)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@contextmanager
def kernel_limit(limit: int) -> Iterator[tuple[str, list[str]]]:
    """How to start a process to which the kernel gives no more than ``limit`` bytes; and what it counts.

    A memory control group counts what is resident. Where none can be made, RLIMIT_DATA counts what is
    private and writable, used or not: the limit is then for that part alone.
    """
    for root, knob in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"moechat-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / knob).write_text(str(limit))
            except OSError:
                continue
            yield "control group", ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
            return
        finally:
            group.rmdir()
    yield "RLIMIT_DATA", []


def least_budget(model: Path) -> int:
    with pytest.raises(DoesNotFitError) as caught:
        moechat.load(model, bits=8, ram="64M", ctx=PROMPT + 64)
    assert caught.value.exit_code == 4
    words = str(caught.value) + str(caught.value.hint)
    assert "MiB" in words or "GiB" in words
    return caught.value.least_bytes


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, 48 * MEBI])
def test_peak_stays_below_the_budget_with_a_prompt_of_4000_tokens(
    model: Path, least: int, spare: int
) -> None:
    budget = least + spare
    with kernel_limit(budget) as (kind, prefix):

        def limit() -> None:
            if kind == "RLIMIT_DATA":
                resource.setrlimit(resource.RLIMIT_DATA, (budget, budget))

        done = subprocess.run(
            [*prefix, sys.executable, str(CHILD), str(model), str(budget), str(PROMPT)],
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=240,
            preexec_fn=limit,
        )
    assert done.returncode == 0, f"under {kind}: exit {done.returncode}\n{done.stderr[-2000:]}"
    figures = json.loads(done.stdout)
    assert figures["answer_tokens"] == 6
    assert figures["pages"] > 0, "the budget must be too small for all experts, or this test shows nothing"
    assert figures["pages"] < figures["blocks"] / 2
    assert figures["peak_rss"] <= budget, f"{figures['peak_rss'] / MEBI:.0f} MiB of {budget / MEBI:.0f} MiB"
    assert figures["pages_peak"] <= figures["pages"]


def test_a_budget_that_is_named_as_least_works_and_one_below_is_refused(model: Path, home: Path) -> None:
    least = least_budget(model)
    with pytest.raises(DoesNotFitError):
        moechat.load(model, bits=8, ram=least - 32 * MEBI, ctx=PROMPT + 64)
    with moechat.load(model, bits=8, ram=least + 16 * MEBI, ctx=PROMPT + 64) as engine:
        assert len(list(engine.generate([5, 6, 7], max_new_tokens=3, temperature=0.0))) == 3
