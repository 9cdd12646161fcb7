"""Verifies the files of a loaded store again, while the program waits for its user.

A disk can return other bytes than were written to it. Records that a link reads are compared with their
checksums at each read. Mapped files are not, so they are hashed again here, those that no process has hashed
for a day; other files when their verification has expired. One thread of the lowest priority reads piece by
piece into one buffer. It stops after the piece at hand when work comes, and goes on at the next wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from moechat.errors import MoechatError, StoreDamagedError
from moechat.store.file_check import Damage
from moechat.store.stamps import EXPIRES_S, status_of
from moechat.store.store import Store

MAPPED_EXPIRES_S = 86400.0
_LOOK_AGAIN_S = 3600.0  # in a process that lives long
_LEAST_PRIORITY = 19


class BackgroundCheck:
    """The pass over the files of one store. Its methods are for one thread at a time.

    Args:
        store: Held, and verified by :meth:`Store.ensure_verified`.
        state_dir: With its record; without one nothing is done.
        mapped: Experts are computed from mapped files. May be changed later.

    Attributes:
        mapped: See there.
    """

    def __init__(self, store: Store, state_dir: Path, *, mapped: bool) -> None:
        self.mapped = mapped
        self._store = store
        self._state_dir = state_dir
        self._process = os.getpid()
        self._experts = {record.file for record in store.manifest.stored_layers}
        self._due: deque[str] = deque()
        self._looked_at: float | None = None
        self._steps: Iterator[None] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._damage: StoreDamagedError | None = None
        self._notes: list[str] = []

    @property
    def running(self) -> bool:
        """Whether a file is being read."""
        return self._thread is not None and self._thread.is_alive()

    def idle(self) -> None:
        """Nothing else is to be done: begin or go on; returns at once."""
        if self.running or self._damage is not None or os.getpid() != self._process:
            return
        if self._steps is None and not self._due and not self._look():
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name="moechat-check", daemon=True
        )
        self._thread.start()

    def busy(self) -> None:
        """Work has come: end within the piece. Costs nothing where nothing runs."""
        thread = self._thread
        if thread is None:
            return
        self._thread = None
        self._stop.set()
        thread.join()

    def wait(self, seconds: float) -> None:
        """Wait until the pass has ended, at most so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """End for good."""
        self.busy()
        self._steps = None
        self._due.clear()
        self._looked_at = time.monotonic() + 1e9

    def require_no_damage(self) -> None:
        """Raise what a pass has found wrong in files that the model computes from.

        Raises:
            StoreDamagedError: A mapped file is damaged: answers may be wrong.
        """
        if self._damage is not None:
            raise self._damage

    def take_notes(self) -> list[str]:
        """Damage of files that are compared when they are read, as sentences, since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _look(self) -> bool:
        """Find what is due; whether anything is."""
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at < _LOOK_AGAIN_S:
            return False
        self._looked_at = now
        with suppress(MoechatError, OSError):
            self._due.extend(self._store.due_files(self._state_dir, self._expires))
        return bool(self._due)

    def _is_mapped(self, name: str) -> bool:
        return self.mapped or name not in self._experts

    def _expires(self, name: str) -> float:
        return MAPPED_EXPIRES_S if self._is_mapped(name) else EXPIRES_S

    def _run(self, stop: threading.Event) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        while not stop.is_set():
            if self._steps is None:
                if not self._due or self._damage is not None:
                    return
                self._steps = self._check(self._due.popleft())
            for _ in self._steps:
                if stop.is_set():
                    return
            self._steps = None

    def _check(self, name: str) -> Iterator[None]:
        """Read one file, a piece at a time."""
        path = self._store.path / name
        try:
            earlier = self._store.verification(self._state_dir)
            if earlier is None or not self._store.is_in_place():
                return
            before = status_of(os.stat(path))
            check = self._store.file_check(name, earlier)
            found: Damage | None = None
            for step in check.steps():
                found = step
                yield
            if not self._store.is_in_place():
                return
            if found is not None:
                self._report(name, found)
            elif status_of(os.stat(path)) == before == earlier.files[name].status:
                self._store.note_file(name, before, check, self._state_dir)
        except (MoechatError, OSError, KeyError):  # of this pass: the next start looks closely
            return

    def _report(self, name: str, found: Damage) -> None:
        self._store.forget_file(name, self._state_dir)
        error = self._store.damaged(found.message)
        if self._is_mapped(name):
            self._damage = error
        else:
            self._notes.append(f"{error}; {error.hint}")
