"""Checks the imports inside moechat: downward between rooms, no circles between files.

The rooms stand on levels (:data:`LEVELS`, top to bottom). A module may import rooms of lower levels and
modules of its own room; never a higher room, never another room of its own level. And no file may import
itself through others. Both rules count every import: at the top of a module, inside a function, under
``TYPE_CHECKING``, in ``import_module("...")``. A late import, or one for types only, avoids the error at run
time; but to read or change one file of a circle one still needs all of them.

Usage: ``python scripts/check_imports.py [--file-names] [PACKAGE_DIRECTORY]``: one line per violation,
exit status 1 if there are any. ``--file-names`` lists file names that occur in several rooms instead.
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
    frozenset({"bench", "chat", "remote", "serve"}),
    frozenset({"engine"}),
    frozenset({"tuner", "fetch", "tune"}),
    frozenset({"loading", "planning"}),
    frozenset({"calibration"}),
    frozenset({"offload"}),
    frozenset({"budget"}),
    frozenset({"simulate"}),
    frozenset({"options"}),
    frozenset({"outline"}),
    frozenset({"models", "configurator", "predict"}),
    frozenset({"sizes"}),
    frozenset({"store", "hub", "hardware", "routing", "manual"}),
    frozenset({"confined", "geometry", "history", "kept_results", "reply_formats", "trials"}),
    frozenset({"atomic_file", "config", "safe_text", "sampling_ranges", "steps", "validation"}),
    frozenset({"errors"}),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# Importable from anywhere, importing nothing of the package.
EVERYWHERE = "_native"

# The package itself hands out the engine's API (`moechat.load`, ...) lazily. So these two files may import
# the rooms given here, inside functions only; and a use of any name of the package, other than those of
# PACKAGE_NAMES, counts as an import of the engine.
ENTRY_FILES = {
    "__init__.py": frozenset({"engine", "options", "planning"}),
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


def _modules(package: Path) -> dict[str, Path]:
    """Files of the package by dotted name below it; the package's own ``__init__.py`` has the empty name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _import_graph(
    trees: dict[str, ast.Module], paths: dict[str, Path], package: Path
) -> dict[str, list[str]]:
    """The modules that each module imports, sorted; a name that is no module counts for its room's
    ``__init__.py``.
    """
    graph = {}
    for module, tree in trees.items():
        targets = set()
        for found in find_imports(tree, paths[module].relative_to(package).parent.parts):
            target = found.target
            while target and target not in trees:
                target = target.rpartition(".")[0]
            targets.add(target)
        graph[module] = sorted(targets - {module, ""})
    return graph


def find_circles(graph: dict[str, list[str]]) -> list[list[str]]:
    """One shortest circle of imports for each group of modules that reach each other, sorted."""
    reachable = {module: _reachable(graph, module) for module in graph}
    circles = []
    seen: set[str] = set()
    for module in sorted(graph):
        if module in seen or module not in reachable[module]:
            continue
        seen |= {other for other in reachable[module] if module in reachable[other]}
        circles.append(_shortest_circle(graph, module))
    return circles


def _reachable(graph: dict[str, list[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph[module]
    return found


def _shortest_circle(graph: dict[str, list[str]], start: str) -> list[str]:
    paths = [[start]]
    seen: set[str] = set()
    for path in paths:  # grows: a breadth-first search
        for target in graph[path[-1]]:
            if target == start:
                return path
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    raise AssertionError(f"{start} is in no circle")


def repeated_file_names(package: Path) -> dict[str, list[str]]:
    """Paths by file name, for the names that occur in several rooms; ``__init__.py`` is left out."""
    by_name: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        if path.name != "__init__.py":
            by_name.setdefault(path.name, []).append(str(path.relative_to(package.parent)))
    return {name: paths for name, paths in sorted(by_name.items()) if len(paths) > 1}


def check(package: Path) -> list[str]:
    """All violations in a package directory, as ``path:line: reason``.

    Raises:
        SyntaxError: A module does not parse.
    """
    complaints = []
    trees = {}
    modules = _modules(package)
    stubs = {str(path.relative_to(package)): path for path in package.rglob("*.pyi")}
    for name, path in sorted({**modules, **stubs}.items(), key=lambda item: item[1]):
        shown = path.relative_to(package.parent)
        room = _room_of(path, package)
        entry = ENTRY_FILES.get(room + ".py") if path.parent == package else None
        if room == EVERYWHERE:
            continue
        if entry is None and room not in LEVEL_OF:
            complaints.append(f"{shown}:1: {PACKAGE}.{room} is no room of the design")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        if name in modules:
            trees[name] = tree
        location = path.relative_to(package).parent.parts
        for found in find_imports(tree, location):
            if complaint := _complaint(room, entry, found):
                complaints.append(f"{shown}:{found.line}: {complaint}")
    for circle in find_circles(_import_graph(trees, modules, package)):
        shown = modules[circle[0]].relative_to(package.parent)
        chain = " -> ".join(f"{PACKAGE}.{module}" for module in [*circle, circle[0]])
        complaints.append(f"{shown}:1: imports itself: {chain}")
    return complaints


def main(arguments: list[str]) -> int:
    """Check the package given, by default the one beside this script; returns the exit status."""
    names = [argument for argument in arguments if argument != "--file-names"]
    package = Path(names[0]) if names else Path(__file__).resolve().parent.parent / PACKAGE
    if "--file-names" in arguments:
        for name, paths in repeated_file_names(package).items():
            print(f"{name}: {', '.join(paths)}")
        return 0
    complaints = check(package)
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
