"""What phases share: a directory, the preloaded library, a tiny model, and homes in known states."""

from __future__ import annotations

import re
import shutil
from functools import cached_property
from pathlib import Path

import moechat
from fault_injection.programs import Programs, Ran
from fault_injection.shim import Control, build_shim

DEMO = Path(moechat.__file__).parent / "hub" / "demo"
_ANSWER = ("--temperature", "0", "--max-tokens")
_LEAST = re.compile(r"give at least (\d+)M")
_SPARE_MIB = 3  # beyond the least budget: some pages, far from all experts


class Scene:
    """The shared things; each is made when it is first needed.

    Args:
        work: An empty directory, with links resolved.

    Attributes:
        work: The same.
        control: Sets the fault of the next run.
        programs: Starts the program.
    """

    def __init__(self, work: Path) -> None:
        self.work = work
        self.control = Control(work / "control")
        self.shim = build_shim(work)
        self.programs = Programs(work, self.control, self.shim)

    def close(self) -> None:
        """End processes."""
        self.programs.close()
        self.control.close()

    @cached_property
    def source(self) -> Path:
        """A tiny checkpoint that can chat."""
        from tiny import write_tiny_chat_model

        directory = self.work / "tiny"
        write_tiny_chat_model(directory)
        return directory

    @cached_property
    def converted(self) -> Path:
        """A home whose library has the store of :attr:`source`, verified."""
        home = self.work / "converted"
        done = self.programs.run(self.answer(self.source), home)
        if done.status != 0:
            raise RuntimeError(f"the undisturbed run failed: {done.summary}")
        return home

    @cached_property
    def plain_peak_bytes(self) -> int:
        """The most memory of a conversion and an answer of :attr:`source`."""
        done = self.undisturbed(self.answer(self.source), self.work / "plain")
        if done.status != 0:
            raise RuntimeError(f"the undisturbed run failed: {done.summary}")
        return done.peak_bytes

    @cached_property
    def store(self) -> Path:
        """The store there."""
        return next((self.converted / "data" / "models").glob("*/manifest.json")).parent

    @cached_property
    def small_budget(self) -> str:
        """A value of ``--ram`` with which the demo reads experts while it answers."""
        return self.budget_of(self.answer(DEMO))

    def budget_of(self, arguments: list[str]) -> str:
        """The same for one command, whose prompts count too."""
        refused = self.programs.run([*arguments, "--ram", "1M"], self.work / "budget")
        match = _LEAST.search(refused.err)
        if match is None:
            raise RuntimeError(f"no least budget in: {refused.err}")
        return f"{int(match[1]) + _SPARE_MIB}M"

    @staticmethod
    def answer(model: Path | str, prompt: str = "Hi", tokens: int = 6) -> list[str]:
        """The arguments of a short answer."""
        name = "demo" if model == DEMO else str(model)
        return ["run", name, prompt, *_ANSWER, str(tokens)]

    def undisturbed(self, arguments: list[str], home: Path, stdin: bytes = b"") -> Ran:
        """A run without faults."""
        self.control.disarm()
        return self.programs.run(arguments, home, stdin=stdin)


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file, and every directory, below a directory."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        is_file = not path.is_dir() or path.is_symlink()
        found[str(path.relative_to(directory))] = (status.st_size, status.st_mtime_ns) if is_file else (0, 0)
    return found


def replace_tree(source: Path | None, target: Path) -> None:
    """Make a directory a copy of another, or let it be missing."""
    shutil.rmtree(target, ignore_errors=True)
    if source is not None:
        shutil.copytree(source, target, symlinks=True)
