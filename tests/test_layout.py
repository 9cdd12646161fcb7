"""The layout of the tests: rooms as in the package, helpers in ``tests/support``."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from places import ROOT, SCRIPTS, TESTS
from selection import slow_tests

ROOMS = sorted(file.parent.name for file in (ROOT / "moechat").glob("*/__init__.py"))
# Beside the rooms of the package: its single modules, the native core, the developers' scripts, a GPU, other
# programs.
OTHERS = {"config", "native", "scripts", "gpu", "peers", "support", "data"}


def test_every_room_of_the_package_has_tests() -> None:
    assert len(ROOMS) > 10
    assert [room for room in ROOMS if not list((TESTS / room).rglob("test_*.py"))] == []


def test_every_folder_of_tests_is_named_for_a_room() -> None:
    folders = {path.name for path in TESTS.iterdir() if list(path.rglob("*.py"))}
    assert folders - set(ROOMS) - OTHERS == {"conftest.py", "test_layout.py"} & folders


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their names alone."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_changes_the_search_path_of_modules() -> None:
    """pytest and the start of a child set it; see ``pythonpath`` in pyproject.toml."""
    change = re.compile(r"sys\.path(\.(insert|append|extend|remove)\b|\[.*\] *=|\s*\+?=)")
    files = [path for folder in (TESTS, SCRIPTS) for path in folder.rglob("*") if path.is_file()]
    sources = [path for path in files if path.suffix in ("", ".py") and "__pycache__" not in path.parts]
    assert len(sources) > 200
    assert [str(path) for path in sources if change.search(path.read_text())] == []


def top_level_names(path: Path) -> set[str]:
    """Functions, classes and assigned names of a file; state machines of hypothesis are assigned."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def missing_tests(nodes: set[str]) -> list[str]:
    """Tests without parameters, ``room/file.py::name``, that do not exist."""
    split = [node.split("::") for node in sorted(nodes)]
    names = {file: top_level_names(TESTS / file) for file, *_ in split if (TESTS / file).is_file()}
    return ["::".join(test) for test in split if test[1] not in names.get(test[0], ())]


def test_the_list_of_slow_tests_names_existing_tests() -> None:
    assert len(slow_tests()) > 100
    assert missing_tests(slow_tests()) == []


def test_scripts_name_existing_tests() -> None:
    files = [path for path in SCRIPTS.rglob("*") if path.is_file() and path.suffix in ("", ".py")]
    nodes = {node for path in files for node in re.findall(r"tests/([\w/]+\.py::\w+)", path.read_text())}
    assert nodes
    assert missing_tests(nodes) == []
