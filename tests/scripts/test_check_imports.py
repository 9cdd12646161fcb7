"""The import checker: it accepts this package, and finds every kind of upward import."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from places import SCRIPTS

SCRIPT = SCRIPTS / "check_imports.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_imports", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_imports"] = module
    spec.loader.exec_module(module)
    return module


check_imports = load_script()


def complaints(tmp_path: Path, files: dict[str, str]) -> list[str]:
    """Complaints of the checker about a package with these files, without the path before the line number."""
    package = tmp_path / "moechat"
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found: list[str] = check_imports.check(package)
    return [line.removeprefix("moechat/") for line in found]


def test_this_package_passes() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, cwd="/")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_violations_fail_the_script(tmp_path: Path) -> None:
    complaints(tmp_path, {"store/__init__.py": "import moechat.cli\n"})
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "moechat")], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stdout == "moechat/store/__init__.py:1: store imports upward: moechat.cli\n"


DOWNWARD = {
    "cli/main.py": "from moechat.chat import x\nfrom moechat import load\nimport moechat\nmoechat.load\n",
    "cli/app.py": "from moechat.cli.main import main\nfrom . import main\nfrom .main import main\n",
    "chat/__init__.py": "from moechat.engine import Engine\nfrom moechat.store import store\n",
    "engine.py": "from moechat.offload import x\nfrom moechat import _native\nimport os, torch\n",
    "offload/__init__.py": "from moechat.models import x\nfrom ..store import y\n",
    "models/__init__.py": "import moechat.store.expert_refs\nfrom moechat.errors import MoechatError\n",
    "store/__init__.py": "import moechat\nfrom moechat import _native, __version__\nmoechat.__version__\n",
    "store/deep/inner.py": "from ... import errors\nfrom ...geometry import x\nfrom ..convert import y\n",
    "geometry.py": "from moechat import config, errors\n",
    "config.py": "from moechat.errors import UsageError\n",
    "errors.py": "import os\n",
    "_native.pyi": "from moechat.engine import x\n",
    "__init__.py": "def __getattr__(name):\n    from moechat import engine\n    return engine\n",
    "__main__.py": "def start():\n    from moechat.cli.main import main\n",
}


def test_downward_imports_are_accepted(tmp_path: Path) -> None:
    assert complaints(tmp_path, DOWNWARD) == []


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("store/a.py", "from moechat.cli import main\n", 1),
        ("store/a.py", "import os\nimport moechat.engine as e\n", 2),
        ("store/a.py", "from moechat import engine\n", 1),
        ("store/a.py", "from .. import engine\n", 1),
        ("store/a.py", "from ..models.dense import x\n", 1),
        ("store/deep/a.py", "from ...models import x\n", 1),
        ("store/a.py", "def f():\n    from moechat.models import x\n", 2),
        ("store/a.py", "class C:\n    import moechat.models\n", 2),
        ("store/a.py", "try:\n    import moechat.models\nexcept ImportError:\n    pass\n", 2),
        ("store/a.py", "if TYPE_CHECKING:\n    from moechat.models import x\n", 2),
        (
            "store/a.py",
            "import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    import moechat.models\n",
            5,
        ),
        ("store/a.py", "import importlib\nimportlib.import_module('moechat.models.dense')\n", 2),
        ("store/a.py", "f = lambda n: __import__(f'moechat.models.{n}')\n", 1),
        ("store/a.py", "from moechat import load\n", 1),
        ("store/a.py", "from moechat import *\n", 1),
        ("store/a.py", "import moechat\n\nmoechat.load('demo')\n", 3),
        ("store/a.py", "import moechat as m\nm.engine.load('demo')\n", 2),
        ("store/a.py", "import moechat.errors\nmoechat.models.dense\n", 2),
        ("store/a.pyi", "from moechat.models import x\n", 1),
        ("store/__init__.py", "from moechat.hub import names\n", 1),
        ("hub/names.py", "from moechat.store import store\n", 1),
        ("chat/a.py", "from moechat.serve import x\n", 1),
        ("simulate/a.py", "from moechat.offload import x\n", 1),
        ("models/a.py", "from moechat.offload import x\n", 1),
        ("engine.py", "from moechat.chat import x\n", 1),
        ("geometry.py", "from moechat.store import x\n", 1),
        ("config.py", "from moechat.geometry import x\n", 1),
        ("errors.py", "from moechat import config\n", 1),
        ("store/a.py", "from moechat.utils import x\n", 1),
        ("utils/a.py", "", 1),
        ("helpers.py", "import os\n", 1),
        ("__init__.py", "from moechat.engine import load\n", 1),
        ("__init__.py", "def f():\n    from moechat.store import x\n", 2),
        ("__main__.py", "from moechat.cli.main import main\n", 1),
    ],
)
def test_every_upward_import_is_found(tmp_path: Path, file: str, text: str, line: int) -> None:
    found = complaints(tmp_path, {**DOWNWARD, file: text})
    found = [line for line in found if "imports itself" not in line]  # some of these make a circle as well
    assert len(found) == 1
    assert found[0].startswith(f"{file}:{line}: ")


def test_every_pair_of_rooms_has_one_direction_at_most(tmp_path: Path) -> None:
    rooms = list(check_imports.LEVEL_OF)
    allowed = {
        (importer, imported)
        for importer in rooms
        for imported in rooms
        if not complaints(tmp_path / importer / imported, {f"{importer}.py": f"import moechat.{imported}\n"})
    }
    assert all((room, room) in allowed for room in rooms)
    for importer in rooms:
        for imported in rooms:
            if importer != imported:
                level_of = check_imports.LEVEL_OF
                assert ((importer, imported) in allowed) == (level_of[importer] < level_of[imported])


CIRCLES = [
    pytest.param("from moechat.store import b\n", "from moechat.store import a\n", id="at the top"),
    pytest.param("from . import b\n", "from .a import x\n", id="relative"),
    pytest.param("from moechat.store.b import x\n", "def f():\n    import moechat.store.a\n", id="late"),
    pytest.param(
        "if TYPE_CHECKING:\n    from moechat.store.b import x\n",
        "from moechat.store.a import x\n",
        id="types only",
    ),
    pytest.param(
        "from moechat.store.b import x\n",
        "import importlib\nimportlib.import_module('moechat.store.a')\n",
        id="dynamic",
    ),
]


@pytest.mark.parametrize(("first", "second"), CIRCLES)
def test_two_files_that_import_each_other_are_found(tmp_path: Path, first: str, second: str) -> None:
    found = complaints(tmp_path, {**DOWNWARD, "store/a.py": first, "store/b.py": second})
    assert found == ["store/a.py:1: imports itself: moechat.store.a -> moechat.store.b -> moechat.store.a"]


def test_a_circle_over_several_files_is_named_once_and_by_its_shortest_way(tmp_path: Path) -> None:
    files = {
        "store/a.py": "from moechat.store import b, c\n",
        "store/b.py": "from moechat.store import c\n",
        "store/c.py": "from moechat.store import d\n",
        "store/d.py": "from moechat.store import a\n",
        "store/outside.py": "from moechat.store import a\n",
    }
    found = complaints(tmp_path, {**DOWNWARD, **files})
    assert [line.partition("imports itself: ")[2] for line in found] == [
        "moechat.store.a -> moechat.store.c -> moechat.store.d -> moechat.store.a"
    ]


def test_a_file_that_uses_the_package_of_its_room_imports_its_init(tmp_path: Path) -> None:
    files = {
        "store/__init__.py": "from moechat.store.a import x\n",
        "store/a.py": "from moechat.store import x\n",
    }
    found = complaints(tmp_path, {**DOWNWARD, **files})
    assert found == ["store/__init__.py:1: imports itself: moechat.store -> moechat.store.a -> moechat.store"]


def test_files_that_share_an_import_make_no_circle(tmp_path: Path) -> None:
    files = {
        "store/a.py": "from moechat.store import b, c\n",
        "store/b.py": "from moechat.store import c\n",
        "store/c.py": "from moechat import _native\n",
    }
    assert complaints(tmp_path, {**DOWNWARD, **files}) == []


def test_file_names_of_several_rooms_are_listed(tmp_path: Path) -> None:
    complaints(tmp_path, {"store/a.py": "", "hub/a.py": "", "hub/b.py": "", "hub/__init__.py": ""})
    command = [sys.executable, str(SCRIPT), "--file-names", str(tmp_path / "moechat")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "a.py: moechat/hub/a.py, moechat/store/a.py\n"


def test_a_file_that_does_not_parse_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError):
        complaints(tmp_path, {"store/a.py": "def\n"})
