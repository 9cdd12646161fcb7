"""A process that loads the demo and computes one token: what it has imported by then."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

_CODE = """
import json, sys, moechat
with moechat.load('demo') as engine:
    step = next(iter(engine.generate('Once', max_new_tokens=1)))
print(json.dumps([
    sorted(sys.modules),
    type(sys.modules['torch._dynamo']).__name__,
    [name for name in ('transformers', 'transformers.models') if '_later' in vars(sys.modules[name])],
]))
"""


@dataclass(frozen=True)
class FirstToken:
    """What a first token needs.

    Attributes:
        modules: Names of all imported modules.
        compiler: Type of the module of torch's compiler.
        deferred: Modules of transformers whose lists of names were not made.
    """

    modules: frozenset[str]
    compiler: str
    deferred: frozenset[str]


def compute_first_token() -> FirstToken:
    """Start the process."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    modules, compiler, deferred = json.loads(done.stdout)
    return FirstToken(frozenset(modules), compiler, frozenset(deferred))
