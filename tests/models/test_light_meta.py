"""Passes on the meta device need no sympy, find the same, and leave the real modules to all others."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from first_token import FirstToken
from forked_code import run_each

from moechat.hub.known_shapes import shape_names
from moechat.models.outlining import known_config
from moechat.models.skeleton import build_skeleton

# Sums of integers, on the meta device, need sympy.
_WITH_SYMPY = {"deepseek-v4-flash"}
_OUTLINES = (
    f"""
import torch
from moechat.hub.known_shapes import shape_names
LIGHT = [name for name in shape_names() if name not in {_WITH_SYMPY}]
"""
    + """
from moechat.models.outlining import headers_of, known_config, outline_skeleton
from moechat.models.skeleton import build_skeleton
def outlines():
    for number, name in enumerate(LIGHT):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        skeleton = build_skeleton(known_config(name), dtype)
        print(name, outline_skeleton(skeleton, dtype, dense_bits="auto", source=headers_of(skeleton, "BF16")))
"""
)


def run(code: str) -> str:
    done = subprocess.run(
        # Sets are printed in the same order.
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_known_shapes_are_outlined_without_sympy_and_with_the_same_result() -> None:
    without = run(f"{_OUTLINES}\noutlines()\nimport sys\nassert 'sympy' not in sys.modules")
    # Once it is imported, no stand-in takes its place.
    with_it = run(f"import sympy\n{_OUTLINES}\noutlines()")
    assert without == with_it
    assert without.count("\n") >= 16


def test_a_first_token_needs_no_sympy(first_token: FirstToken) -> None:
    assert not {"sympy", "torch.fx.experimental.symbolic_shapes"} & first_token.modules


_USES = [
    "import sympy; assert sympy.Symbol('x').is_symbol",
    "from sympy import Symbol; assert Symbol('x').is_symbol",
    "import sympy.core.symbol as s; assert s.Symbol('x').is_symbol",
    "from torch.fx.experimental.symbolic_shapes import ShapeEnv; ShapeEnv()",
    "import torch.fx.experimental.symbolic_shapes as s; s.ShapeEnv()",
]
_AFTERWARDS = """
before = list(sys.meta_path)
with light_meta():
    torch.empty(3, device='meta').normal_()
assert 'sympy' not in sys.modules and sys.meta_path == before
import sympy, torch.fx.experimental.symbolic_shapes as shapes
print(sympy.Symbol('x'), shapes.guard_or_true(False))
"""
_PLAIN_ARGUMENTS = """
from moechat.models.light_meta import Shapes
from torch.fx.experimental import symbolic_shapes as real
ours = Shapes(real.__name__)
ours.load = None  # none of these needs the real module
asks = ['expect_true', 'guard_or_false', 'guard_or_true', 'guard_size_oblivious']
asks += ['statically_known_true']
bools = (False, True)
calls = [(name, (value,)) for name in asks for value in bools]
calls += [(name, (a, b)) for name in ('sym_and', 'sym_or') for a in bools for b in bools]
calls += [('sym_and', (True, True, False)), ('sym_or', (False,)), ('sym_and', (True,))]
pairs = (1, 2), (2, 2), ((1, 2), [1, 2]), ((1,), (1, 2)), ((), ())
calls += [('sym_eq', pair) for pair in pairs]
calls += [('sym_eq', (torch.Size((1, 2)), (1, 3)))]
numbers = [value for value in (0, 5, True) if hasattr(real, 'guarding_hint_or_throw')]
calls += [('guarding_hint_or_throw', (value,)) for value in numbers]
calls += [('has_guarding_hint', (value,)) for value in numbers]
calls += [('is_nested_int', (3,))]
for name, given in calls:
    found, wanted = getattr(ours, name)(*given), getattr(real, name)(*given)
    assert found == wanted and type(found) is type(wanted), (name, given, found, wanted)
print('done')
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the pieces of code print, each in a process that has imported torch, and no sympy."""
    pieces = {
        use: "with light_meta():\n"
        "    import sympy as early\n"
        "    from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq\n"
        "    assert guard_or_false(True) and not isinstance(1, early.Basic)\n"
        f"    {use}\n"
        "    import sympy\n"
        "    assert isinstance(sympy.Symbol('x'), early.Basic) and not isinstance(1, early.Basic)\n"
        "import sympy\n"
        "from torch.fx.experimental import symbolic_shapes as shapes\n"
        "assert type(sympy) is type(shapes) is type(sys) and sys.modules['sympy'] is sympy\n"
        "assert early.Symbol is sympy.Symbol\n"
        "size = shapes.ShapeEnv().create_unbacked_symint()\n"
        "assert isinstance(sym_eq(size, 3), torch.SymBool) and guard_or_false(size == 3) is False\n"
        "assert sympy.core.symbol.Symbol is sympy.Symbol\n"
        "print(shapes is torch.fx.experimental.symbolic_shapes)\n"
        for use in _USES
    }
    pieces |= {each: each for each in (_AFTERWARDS, _PLAIN_ARGUMENTS)}
    beginning = "import sys, torch\nfrom moechat.models.light_meta import light_meta\n"
    return dict(zip(pieces, run_each(beginning, list(pieces.values())), strict=True))


@pytest.mark.parametrize("use", _USES)
def test_the_real_modules_are_loaded_when_they_are_asked_for(printed: dict[str, str], use: str) -> None:
    assert printed[use].split() == ["True"]


def test_afterwards_the_real_modules_can_be_imported(printed: dict[str, str]) -> None:
    assert printed[_AFTERWARDS].split() == ["x", "False"]


def test_plain_arguments_have_the_results_of_the_real_functions(printed: dict[str, str]) -> None:
    assert printed[_PLAIN_ARGUMENTS].split() == ["done"]


def test_models_built_by_several_threads_leave_the_default_type_as_it_is() -> None:
    names = shape_names()[:4]

    def build(name: str) -> dict[str, torch.dtype]:
        skeleton = build_skeleton(known_config(name), torch.bfloat16)
        return {key: tensor.dtype for key, tensor in skeleton.state.items()}

    alone = [build(name) for name in names]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(build, names * 3)) == alone * 3
    assert torch.get_default_dtype() is torch.float32
