"""Durable files that threads hash and write while the caller computes the next bytes."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any

from moechat.store.files import HUGE_PAGE_BYTES, DurableFile

# One is filled, one hashed, one written, the others wait between the threads.
_PIECES = 8


class PipelinedFile(DurableFile):
    """A :class:`DurableFile` whose :meth:`write` copies the bytes and returns.

    One thread hashes the pieces in order and gives each to another one, which writes it. They start with the
    first full piece. A failure is raised by a later :meth:`write`, at the latest by :meth:`commit`.

    Invariant: every buffer is in ``_free``, ``_full`` or ``_hashed``, with a thread, or is ``_piece``.
    """

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        """See :class:`DurableFile`."""
        super().__init__(path, mode)
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._full: SimpleQueue[memoryview | None] = SimpleQueue()
        self._hashed: SimpleQueue[memoryview | None] = SimpleQueue()
        self._made = 1
        self._threads: tuple[Thread, ...] = ()
        self._problem: BaseException | None = None

    def write(self, data: Any) -> None:
        """Append bytes (any C-contiguous buffer), which the caller may change afterwards.

        Raises:
            OSError: These or earlier bytes could not be written.
        """
        view = memoryview(data).cast("B")
        self._bytes += view.nbytes
        while view.nbytes:
            count = min(view.nbytes, HUGE_PAGE_BYTES - self._buffered)
            self._piece[self._buffered : self._buffered + count] = view[:count]
            self._buffered += count
            view = view[count:]
            if self._buffered == HUGE_PAGE_BYTES:
                self._hand_over()

    def commit(self) -> tuple[int, str]:
        """See :meth:`DurableFile.commit`."""
        self._stop()
        self._raise_problem()
        self._digest.update(self._piece[: self._buffered])
        return super().commit()

    def _hand_over(self) -> None:
        """Give the full piece to the threads and take a free one."""
        self._raise_problem()
        if not self._threads:
            works = {"hash": self._hash_pieces, "write": self._write_pieces}
            self._threads = tuple(
                Thread(target=work, name=f"moechat-{name}", daemon=True) for name, work in works.items()
            )
            for thread in self._threads:
                thread.start()
        self._full.put(self._piece)
        if self._made < _PIECES:
            self._made += 1
            self._piece = memoryview(bytearray(HUGE_PAGE_BYTES))
        else:
            self._piece = self._free.get()
        self._buffered = 0

    def _hash_pieces(self) -> None:
        while (piece := self._full.get()) is not None:
            self._digest.update(piece)
            self._hashed.put(piece)
        self._hashed.put(None)

    def _write_pieces(self) -> None:
        while (piece := self._hashed.get()) is not None:
            # After a failure pieces are still returned: the caller may wait for one.
            if self._problem is None:
                try:
                    self._write(piece)
                except BaseException as problem:
                    self._problem = problem
            self._free.put(piece)

    def _stop(self) -> None:
        """Wait until everything handed over is written, or has failed."""
        threads, self._threads = self._threads, ()
        if threads:
            self._full.put(None)
        for thread in threads:
            thread.join()

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        super().__exit__(kind, value, trace)
