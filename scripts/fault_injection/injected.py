"""Faults of system calls, and kills at every change of a file, in a run of the program."""

from __future__ import annotations

import random
import shutil
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fault_injection.phase import Outcome, Phase, ended_badly, first_line
from fault_injection.programs import Ran
from fault_injection.scene import Scene, listing, replace_tree
from fault_injection.shim import Fault

# What each group of calls suffers: modes, and the errors of `once` and `forever`.
_ERRORS = {
    "open": ("EIO", "EMFILE", "ENOMEM"),
    "create": ("EIO", "ENOSPC", "EMFILE"),
    "read": ("EIO", "ENOMEM"),
    "write": ("EIO", "ENOSPC"),
    "sync": ("EIO", "ENOSPC"),
    "rename": ("EIO", "ENOSPC"),
    "mmap": ("ENOMEM", "EIO"),
    "truncate": ("EIO", "ENOSPC"),
    "link": ("EIO", "ENOSPC"),
    "uring": ("EIO", "ENOMEM"),
}
_INTERRUPTED = ("open", "read", "write", "uring")  # calls that a signal may interrupt
_SHORT = ("read", "write", "uring")
_WRONG = ("read", "uring")


@dataclass(frozen=True)
class Run:
    """A run of the program that faults disturb.

    Attributes:
        arguments: Of the command; the plain run that follows has the same.
        home: The state of ``MOECHAT_HOME`` before it; ``None``: not there.
        under: Directories with the files whose calls may fail.
        trusted: Of these, those whose contents have no checksum anywhere: wrong data is not tried there.
        uring: Whether the kernel has io_uring.
        check: Another command, run after both.
        repeats: The plain run after a disturbed one prints the same answer.
    """

    arguments: Sequence[str]
    home: Path | None
    under: tuple[Path, ...]
    trusted: tuple[Path, ...] = ()
    uring: bool = True
    check: Sequence[str] = ()
    repeats: bool = True


class Injected(Phase):
    """Faults at every index of every call of a run.

    Args:
        scene: See there.
        name: Of the phase; with ``kills`` it begins with ``kill-``.
        kills: The run is killed at a change of a file, in place of faults.
    """

    def __init__(self, scene: Scene, name: str, *, kills: bool = False) -> None:
        self.name = name
        self.kind = "kills" if kills else "I/O faults"
        # The short form has a kill and faults of two kinds of runs.
        self.short = {"load": 3, "page-uring": 1, "kill-convert": 1}.get(name, 0)
        self._scene = scene
        self._kills = kills
        self.home = scene.work / f"home-{name}"

    @abstractmethod
    def prepare(self) -> Run:
        """The run; made once."""

    def start(self, run: Run) -> Ran:
        """Run the program."""
        return self._scene.programs.run(run.arguments, self.home)

    def open(self) -> None:
        self._run = self.prepare()
        under = self._run.under
        self._calls, self._reference = self._tally(under)
        if self._reference.status != 0:
            raise RuntimeError(f"{self.name}: the undisturbed run failed: {self._reference.summary}")
        self._checked = tuple(one for one in under if one not in self._run.trusted)
        self._checked_calls = self._calls
        if self._checked != under and not self._kills:
            self._checked_calls, _ = self._tally(self._checked)
        self._plainly()
        self._names = set(listing(self.home))
        self._said = self._checks()
        self._fresh = False

    def close(self) -> None:
        self._scene.control.disarm()
        shutil.rmtree(self.home, ignore_errors=True)

    def cases(self, seed: int) -> Iterator[str]:
        found = [*(self._kill_points() if self._kills else self._faults())]
        random.Random(f"{seed}:{self.name}").shuffle(found)
        return map(str, by_rounds(found))

    def coverage(self, done: Collection[str]) -> str:
        every = [*(self._kill_points() if self._kills else self._faults())]
        tried = [fault for fault in every if f"{self.name}:{fault}" in done]
        calls, of = (len({(fault.group, fault.index) for fault in faults}) for faults in (tried, every))
        return f"{calls} of {of} calls, {len(tried)} of {len(every)} faults"

    def run(self, case: str) -> Outcome:
        fault = Fault.parse(case)
        self._restore()
        run, control = self._run, self._scene.control
        under = self._checked if fault.mode == "wrong" else run.under
        control.arm([*under], fault, uring=run.uring)
        ran = self.start(run)
        fired, where = control.fired(), control.where()
        control.disarm()
        detail = f"at {where}" if fired else "not reached"
        if self._kills and ran.status == -9 and not ran.stopped:
            outcome = Outcome()
        else:
            outcome = ended_badly(ran, self._reference.out, self._reference.peak_bytes)
        if not outcome.fell:
            outcome = self._afterwards()
        if outcome.fell:
            self._fresh = False
            return Outcome(outcome.fell, f"{detail}; {outcome.detail}")
        return Outcome(detail=detail)

    def _afterwards(self) -> Outcome:
        """The plain run after a disturbed one."""
        if self._fresh and _lasting(listing(self.home)) == _lasting(self._before):
            return Outcome()  # nothing changed, so nothing needs to be shown
        self._fresh = False
        again = self._plainly()
        bad = ended_badly(again, self._reference.out if self._run.repeats else None)
        if bad.fell or again.status != 0:
            return Outcome(f"next run: {bad.fell or first_line(again.err)}", again.err[-1000:])
        left = set(listing(self.home)) - self._names
        if left:
            return Outcome(f"left behind: {_general_names(left)}", ", ".join(sorted(left)))
        said = self._checks()
        if not self.right(said):
            return Outcome("next check is wrong", f"{said!r} instead of {self._said!r}")
        return Outcome()

    def right(self, said: bytes) -> bool:
        """Whether a check's answer after all is as it must be."""
        return said == self._said

    def _checks(self) -> bytes:
        if not self._run.check:
            return b""
        done = self._scene.undisturbed([*self._run.check], self.home)
        # Not what it says of its progress, which depends on how busy the machine is.
        return done.out if done.status == 0 else done.err.encode()

    def _restore(self) -> None:
        if not self._fresh:
            replace_tree(self._run.home, self.home)
            self._before = listing(self.home)
            self._fresh = True

    def _plainly(self) -> Ran:
        self._scene.control.arm([], None, uring=self._run.uring)
        return self.start(self._run)

    def _tally(self, under: tuple[Path, ...]) -> tuple[dict[str, int], Ran]:
        """Calls of an undisturbed run by group, and that run."""
        replace_tree(self._run.home, self.home)
        self._scene.control.arm([*under], None, uring=self._run.uring)
        ran = self.start(self._run)
        counts = self._scene.control.counts()
        self._scene.control.disarm()
        return counts, ran

    def _faults(self) -> Iterator[Fault]:
        for group, errors in _ERRORS.items():
            for index in range(self._calls[group]):
                for error in errors:
                    yield Fault(group, index, "once", error)
                    yield Fault(group, index, "forever", error)
                if group in _INTERRUPTED:
                    yield Fault(group, index, "once", "EINTR")
                if group in _SHORT:
                    yield Fault(group, index, "short")
            if group in _WRONG:
                for index in range(self._checked_calls[group]):
                    yield Fault(group, index, "wrong")

    def _kill_points(self) -> Iterator[Fault]:
        for index in range(self._calls["change"]):
            yield Fault("change", index, "kill")
            yield Fault("change", index, "torn")


def by_rounds(faults: Sequence[Fault]) -> Iterator[Fault]:
    """First one fault of every call, then a second one of every call, and so on; else in the order given."""
    rounds: dict[int, list[Fault]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for fault in faults:
        call = fault.group, fault.index
        rounds.setdefault(seen[call], []).append(fault)
        seen[call] += 1
    return chain.from_iterable(rounds.values())


def _lasting(files: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Files without those that every run writes anew."""
    return {
        name: entry for name, entry in files.items() if not name.startswith(("state/used", "state/routing"))
    }


def _general_names(names: set[str]) -> str:
    ends = {Path(name).suffix or Path(name).name for name in names}
    return ", ".join(sorted(ends))
