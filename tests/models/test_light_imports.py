"""Importing moechat leaves torch's compiler out, and the compiler works where it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from first_token import FirstToken
from forked_code import run_each


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_first_token_needs_neither_the_compiler_nor_sharded_tensors(first_token: FirstToken) -> None:
    assert first_token.compiler == "CompilerStandIn"
    assert "torch.distributed.tensor" not in first_token.modules


def test_checks_of_transformers_are_restored() -> None:
    out = run(
        "import transformers.utils as names\n"
        "before = names.is_torch_distributed_available, names.is_hqq_available\n"
        "import moechat.models\n"
        "print(before == (names.is_torch_distributed_available, names.is_hqq_available))\n"
    )
    assert out.split() == ["True"]


_USES = [
    "torch._dynamo.config",
    "torch._dynamo.reset()",
    "from torch._dynamo.utils import counters",
    "import torch._dynamo.utils",
    "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
]


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each use prints, with the checks around it."""
    pieces = [
        "marked = lambda x: x\n"
        "skipped = torch.compiler.disable(lambda x: x + 1)\n"
        "assert torch._dynamo.allow_in_graph(marked) is marked\n"
        "assert skipped(1) == 2 and sys.modules['torch._dynamo'] is stand_in\n"
        f"{use}\n"
        "real = sys.modules['torch._dynamo']\n"
        "assert real is not stand_in and torch._dynamo is real and stand_in.config is real.config\n"
        "from torch._dynamo import trace_rules\n"
        "assert id(marked) in trace_rules._allowed_callable_ids\n"
        "assert skipped(torch.ones(1)).item() == 2\n"
        "import torch._dynamo.utils\n"
        "assert torch._dynamo.utils.counters is real.utils.counters is real.convert_frame.counters\n"
        "print('done')\n"
        for use in _USES
    ]
    beginning = "import sys, torch, moechat.models\nstand_in = sys.modules['torch._dynamo']\n"
    return dict(zip(_USES, run_each(beginning, pieces), strict=True))


@pytest.mark.parametrize("use", _USES)
def test_the_compiler_is_loaded_when_it_is_asked_for_and_learns_the_marks(
    printed: dict[str, str], use: str
) -> None:
    assert printed[use].split() == ["done"]
