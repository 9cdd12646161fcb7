"""Durable files that are hashed and written by a thread while the caller computes the next bytes."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any

from moechat.store.files import HUGE_PAGE_BYTES, DurableFile

# One is filled, one hashed or written, the others wait between the two threads.
_PIECES = 6


class PipelinedFile(DurableFile):
    """A :class:`DurableFile` whose :meth:`write` copies the bytes and returns.

    A thread, started with the first full piece, hashes and writes the pieces in order. Its failure is raised
    by a later :meth:`write`, at the latest by :meth:`commit`.

    Invariant: every buffer is in ``_free``, in ``_full``, with the thread, or is ``_piece``.
    """

    def __init__(self, path: Path) -> None:
        """See :class:`DurableFile`."""
        super().__init__(path)
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._full: SimpleQueue[memoryview | None] = SimpleQueue()
        self._made = 1
        self._thread: Thread | None = None
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
        """Give the full piece to the thread and take a free one."""
        self._raise_problem()
        if self._thread is None:
            self._thread = Thread(target=self._work, name="moechat-write", daemon=True)
            self._thread.start()
        self._full.put(self._piece)
        if self._made < _PIECES:
            self._made += 1
            self._piece = memoryview(bytearray(HUGE_PAGE_BYTES))
        else:
            self._piece = self._free.get()
        self._buffered = 0

    def _work(self) -> None:
        while (piece := self._full.get()) is not None:
            # After a failure pieces are still returned: the caller may wait for one.
            if self._problem is None:
                try:
                    self._digest.update(piece)
                    self._write(piece)
                except BaseException as problem:
                    self._problem = problem
            self._free.put(piece)

    def _stop(self) -> None:
        """Wait until everything handed over is written, or has failed."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            self._full.put(None)
            thread.join()

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        super().__exit__(kind, value, trace)
