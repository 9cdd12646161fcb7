"""Checks that imports inside moechat go downward only.

The rooms stand on levels (:data:`LEVELS`, top to bottom). A module may import rooms of lower levels and
modules of its own room; never a higher room, never another room of its own level. It makes no difference
whether an import stands at the top of a module, inside a function, under ``TYPE_CHECKING`` or in
``import_module("...")``.

Usage: ``python scripts/check_imports.py [PACKAGE_DIRECTORY]``: one line a violation, exit status 1 if any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "moechat"

# Rooms that share a level do not import each other. The last three levels are single modules.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"cli"}),
    frozenset({"bench", "chat", "serve", "tune"}),
    frozenset({"engine"}),
    frozenset({"tuner"}),
    frozenset({"loading", "planning", "statistics"}),
    frozenset({"offload", "simulate"}),
    frozenset({"models", "configurator", "predict"}),
    frozenset({"store", "hub", "hardware", "routing"}),
    frozenset({"geometry"}),
    frozenset({"config"}),
    frozenset({"errors"}),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# Importable from anywhere, importing nothing of the package.
EVERYWHERE = "_native"

# The package itself hands out the engine's API (`moechat.load`, ...) lazily. So these two files may import
# the rooms given here, inside functions only; and whoever uses a name of the package, other than those of
# PACKAGE_NAMES, uses the engine.
ENTRY_FILES = {
    "__init__.py": frozenset({"engine", "planning"}),
    "__main__.py": frozenset({"engine", "cli"}),
}
PACKAGE_NAMES = frozenset({"__version__", "__file__", "__path__", "__name__", "__doc__"})


@dataclass(frozen=True)
class Import:
    """One imported module or name of the package.

    Attributes:
        target: Dotted path below the package: ``"store.convert.convert"``.
        line: Line number in the importing file.
        lazy: The import runs when a function is called, or never (``TYPE_CHECKING``).
    """

    target: str
    line: int
    lazy: bool


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _dynamic_target(node: ast.Call) -> ast.expr | None:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return node.args[0] if name in {"import_module", "__import__"} and node.args else None


def _leading_text(expression: ast.expr) -> str | None:
    """The text of a string, or the constant beginning of an f-string; ``None`` for anything else."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return expression.value
    if isinstance(expression, ast.JoinedStr) and expression.values:
        return _leading_text(expression.values[0])
    return None


def _below_package(name: str) -> str | None:
    """``"store.convert"`` for ``"moechat.store.convert"``, ``""`` for ``"moechat"``, ``None`` for others."""
    if name == PACKAGE:
        return ""
    return name.removeprefix(PACKAGE + ".") if name.startswith(PACKAGE + ".") else None


def _names_of_package(tree: ast.Module) -> frozenset[str]:
    """The names that ``import`` statements anywhere in the module bind to the package itself."""
    return frozenset(
        alias.asname or PACKAGE
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == PACKAGE or (alias.name.startswith(PACKAGE + ".") and alias.asname is None)
    )


def _base_of(node: ast.ImportFrom, location: tuple[str, ...]) -> str | None:
    """What ``from ... import`` imports from, below the package; ``None`` for other packages."""
    if node.level == 0:
        return _below_package(node.module or "")
    kept = len(location) - (node.level - 1)
    if kept < 0:
        return None  # Python itself refuses to go above the package
    return ".".join((*location[:kept], *filter(None, [node.module])))


def find_imports(tree: ast.Module, location: tuple[str, ...]) -> Iterator[Import]:
    """All imports of the package in one module.

    Args:
        tree: The module's syntax tree.
        location: Path of the module's directory below the package: ``("store",)``; empty at its root.
    """

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if target := _below_package(alias.name):
                    yield Import(target, node.lineno, lazy)
        elif isinstance(node, ast.Attribute):
            # `import moechat` imports no room by itself; `moechat.load` then does.
            if isinstance(node.value, ast.Name) and node.value.id in names_of_package:
                yield Import(node.attr, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, location)
            if base is not None:
                for alias in node.names:
                    yield Import(f"{base}.{alias.name}".lstrip("."), node.lineno, lazy)
        elif isinstance(node, ast.Call) and (argument := _dynamic_target(node)) is not None:
            text = _leading_text(argument)
            if text is not None and (target := _below_package(text.rstrip("."))) is not None:
                yield Import(target, node.lineno, lazy)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lazy = True
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for statement in node.body:
                yield from visit(statement, True)
            for statement in node.orelse:
                yield from visit(statement, lazy)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy)

    names_of_package = _names_of_package(tree)
    yield from visit(tree, lazy=False)


def _room_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).parts
    return parts[0].removesuffix(".pyi").removesuffix(".py")


def _complaint(room: str, entry: frozenset[str] | None, found: Import) -> str | None:
    """Why this import is not allowed, or ``None``."""
    target = found.target.partition(".")[0]
    if target == EVERYWHERE:
        return None
    if target not in LEVEL_OF:
        if "." in found.target:
            return f"imports {PACKAGE}.{target}, which is no room of the design"
        if target in PACKAGE_NAMES:
            return None
        target = "engine"  # one of the names that the package loads lazily
    if entry is not None:
        if target in entry:
            return None if found.lazy else f"imports {PACKAGE}.{target} at the top; only inside a function"
        if LEVEL_OF[target] >= LEVEL_OF["geometry"]:
            return None
        return f"imports {PACKAGE}.{target}; allowed: the lowest modules and {', '.join(sorted(entry))}"
    if target == room or LEVEL_OF[target] > LEVEL_OF[room]:
        return None
    if LEVEL_OF[target] == LEVEL_OF[room]:
        return f"{room} and {target} stand on one level and do not import each other"
    return f"{room} imports upward: {PACKAGE}.{target}"


def check(package: Path) -> list[str]:
    """All violations in a package directory, as ``path:line: reason``.

    Raises:
        SyntaxError: A module does not parse.
    """
    complaints = []
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        shown = path.relative_to(package.parent)
        room = _room_of(path, package)
        entry = ENTRY_FILES.get(room + ".py") if path.parent == package else None
        if room == EVERYWHERE:
            continue
        if entry is None and room not in LEVEL_OF:
            complaints.append(f"{shown}:1: {PACKAGE}.{room} is no room of the design")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        location = path.relative_to(package).parent.parts
        for found in find_imports(tree, location):
            if complaint := _complaint(room, entry, found):
                complaints.append(f"{shown}:{found.line}: {complaint}")
    return complaints


def main(arguments: list[str]) -> int:
    """Check the package given, by default the one beside this script; returns the exit status."""
    package = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / PACKAGE
    complaints = check(package)
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
