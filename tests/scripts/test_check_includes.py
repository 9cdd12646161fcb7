"""The checker of native includes: it accepts these sources, and finds every kind of violation."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_includes.py"


def run(*arguments: str | Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, cwd="/"
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small tree of sources without violations."""
    files = {
        "memory/slab.h": "#include <vector>\n",
        "link/link.h": '#include "memory/slab.h"\n',
        "offload/runner.h": '#include "link/link.h"\n',
        "offload/runner.cc": '#include "offload/runner.h"\n#include "kernels/isa/api.h"\n',
        "kernels/isa/api.h": "",
        "kernels/isa/avx2.cc": '#include "kernels/experts/experts.inc.h"\n#include "kernels/isa/api.h"\n',
        "kernels/experts/experts.inc.h": '#include "kernels/experts/rows.inc.h"\n',
        "kernels/experts/rows.inc.h": "",
        "bindings/module.cc": '#include <pybind11/pybind11.h>\n#include "offload/runner.h"\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_these_sources_pass() -> None:
    assert run() == (0, [])


def test_every_folder_of_these_sources_is_on_a_level() -> None:
    spec = importlib.util.spec_from_file_location("check_includes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = SCRIPT.parents[1] / "native" / "src"
    folders = {path.parent.relative_to(root).as_posix() for path in root.rglob("*.h")}
    assert folders == set(module.LEVEL_OF)


def test_downward_includes_pass(source: Path) -> None:
    assert run(source) == (0, [])


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [
        ("link/link.h", '#include "offload/runner.h"', "link includes upward: offload/runner.h"),
        ("memory/slab.h", '  #  include "link/link.h"', "memory includes upward: link/link.h"),
        (
            "kernels/isa/avx2.cc",
            '#include "offload/runner.h"',
            "kernels/isa includes upward: offload/runner.h",
        ),
        ("memory/slab.h", '#include "plan/plan.h"', "memory includes sideways: plan/plan.h"),
        ("offload/runner.h", "#include <pybind11/numpy.h>", "only bindings may include pybind11/numpy.h"),
        ("offload/runner.h", "#include <Python.h>", "only bindings may include Python.h"),
        ("link/link.h", '#include "link.h"', "link.h does not exist below the source directory"),
        (
            "offload/runner.cc",
            '#include "kernels/experts/rows.inc.h"',
            "kernels/experts/rows.inc.h is the body of a kernel: "
            "only kernels/isa/*.cc and other bodies include it",
        ),
    ],
)
def test_each_violation_is_reported_with_its_line(source: Path, name: str, line: str, problem: str) -> None:
    (source / "plan").mkdir()
    (source / "plan" / "plan.h").write_text("")
    (source / name).write_text(f"// a comment\n{line}\n")
    status, lines = run(source)
    assert status == 1
    assert f"{name}:2: {problem}" in lines


def test_a_circle_of_headers_is_reported(source: Path) -> None:
    (source / "link" / "a.h").write_text('#include "link/b.h"\n')
    (source / "link" / "b.h").write_text('#include "link/a.h"\n')
    assert run(source) == (1, ["link/a.h:1: circle: link/a.h -> link/b.h -> link/a.h"])


def test_a_folder_without_a_level_is_reported(source: Path) -> None:
    (source / "extra").mkdir()
    (source / "extra" / "a.h").write_text("")
    assert run(source) == (1, ["extra/a.h: folder extra is not in LEVELS"])
