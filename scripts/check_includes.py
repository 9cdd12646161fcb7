"""Checks the includes between the native sources.

The folders of ``native/src`` stand on levels (:data:`LEVELS`, top to bottom). A file may include files of its
own folder and of lower levels. ``*.inc.h`` files are bodies of kernels, compiled once per instruction set:
only the units ``kernels/isa/*.cc`` and other bodies include them, and to these includes the levels do not
apply. No header may include itself through others, and only ``bindings`` may include pybind11 or Python.

Usage: ``python scripts/check_includes.py [SOURCE_DIRECTORY]``: one line per violation, exit status 1 if any.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Folders that share a level do not include each other.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"bindings"}),
    frozenset({"simulate"}),
    frozenset({"offload"}),
    frozenset({"kernels/decode"}),
    frozenset({"kernels/dense"}),
    frozenset({"kernels/experts"}),
    frozenset({"kernels/isa"}),
    frozenset({"kernels/layout", "kernels/threads", "cache"}),
    frozenset({"link"}),
    frozenset({"cuda"}),
    frozenset({"memory", "plan"}),
)
LEVEL_OF = {folder: level for level, folders in enumerate(LEVELS) for folder in folders}

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
_PYTHON = re.compile(r"^(pybind11/|Python\.h$)")


def check(source: Path) -> list[str]:
    """Returns one line per violation under ``source``, in the order of files and lines."""
    files = sorted(path for path in source.rglob("*") if path.suffix in (".h", ".cc"))
    found: list[str] = []
    edges: dict[str, dict[str, str]] = {}  # file -> included file -> "file:line" of the include
    for path in files:
        name = path.relative_to(source).as_posix()
        folder = name.rpartition("/")[0]
        if folder not in LEVEL_OF:
            found.append(f"{name}: folder {folder or '.'} is not in LEVELS")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = _INCLUDE.match(line)
            if match is None:
                continue
            place, target = f"{name}:{number}", match[2]
            if _PYTHON.match(target):
                if folder != "bindings":
                    found.append(f"{place}: only bindings may include {target}")
            elif match[1] == '"':
                problem = _problem(source, name, folder, target)
                if problem:
                    found.append(f"{place}: {problem}")
                else:
                    edges.setdefault(name, {}).setdefault(target, place)
    return found + [
        f"{edges[circle[0]][circle[1]]}: circle: {' -> '.join(circle)}" for circle in _circles(edges)
    ]


def _problem(source: Path, name: str, folder: str, target: str) -> str | None:
    if not (source / target).is_file():
        return f"{target} does not exist below the source directory"
    target_folder = target.rpartition("/")[0]
    is_kernel_unit = folder == "kernels/isa" and name.endswith(".cc")
    if target.endswith(".inc.h"):
        if is_kernel_unit or name.endswith(".inc.h"):
            return None
        return f"{target} is the body of a kernel: only kernels/isa/*.cc and other bodies include it"
    if target_folder == folder or target_folder not in LEVEL_OF:  # an unknown folder has a line of its own
        return None
    if LEVEL_OF[target_folder] <= LEVEL_OF[folder]:
        direction = "sideways" if LEVEL_OF[target_folder] == LEVEL_OF[folder] else "upward"
        return f"{folder} includes {direction}: {target}"
    return None


def _circles(edges: dict[str, dict[str, str]]) -> list[list[str]]:
    """Returns the circles that a depth-first search meets: the files along each, the first of them twice."""
    found: list[list[str]] = []
    done: set[str] = set()
    path: list[str] = []

    def visit(file: str) -> None:
        if file in path:
            found.append([*path[path.index(file) :], file])
            return
        if file in done:
            return
        path.append(file)
        for target in sorted(edges.get(file, {})):
            visit(target)
        done.add(path.pop())

    for file in sorted(edges):
        visit(file)
    return found


def main() -> int:
    """Prints the violations; returns the exit status."""
    default = Path(__file__).resolve().parents[1] / "native" / "src"
    found = check(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
