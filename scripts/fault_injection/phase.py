"""What a phase of the campaign is, and how outcomes are judged."""

from __future__ import annotations

import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fault_injection.programs import SPARE_BYTES, Ran
from moechat import errors

# Exit statuses that a fault may have: success, and those of errors but "unexpected".
DOCUMENTED = {0} | {
    kind.exit_code
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.MoechatError) and kind.exit_code != 1
}


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        fell: What did not hold, in words that cases of the same cause share; empty if all held.
        detail: The text behind it.
        count: How much was tried: 1, or operations.
    """

    fell: str = ""
    detail: str = ""
    count: int = 1


class Phase(ABC):
    """One part of the campaign.

    Attributes:
        name: Its name on the command line.
        kind: Its class in the table.
        short: How many cases the short form tries.
    """

    name: str
    kind: str
    short: int = 2

    def open(self) -> None:  # noqa: B027 - nothing to do for most
        """Make what cases need."""

    def close(self) -> None:  # noqa: B027
        """End what :meth:`open` began."""

    @abstractmethod
    def cases(self, seed: int) -> Iterator[str]:
        """Cases in a random order that the seed determines, without an end or all that there are."""

    def coverage(self, done: Collection[str]) -> str:
        """How much of all that there is has been tried, in words; empty where there is no end.

        Args:
            done: Cases with a result, each behind the phase's name and a colon.
        """
        del done
        return ""

    @abstractmethod
    def run(self, case: str) -> Outcome:
        """Try a case; nothing of it remains for the next."""


def ended_badly(ran: Ran, answer: bytes | None, peak_bytes: int | None = None) -> Outcome:
    """Judge how a disturbed run ended.

    Args:
        ran: The run.
        answer: What it must print if its status is 0; ``None``: anything.
        peak_bytes: The peak of the undisturbed run; ``None``: not known.

    Returns:
        An outcome that fell, or one that held.
    """
    said = first_line(ran.err)
    if ran.stopped:
        return Outcome(f"{ran.stopped} ({said})" if said else ran.stopped, ran.err[-2000:])
    if ran.status < 0:
        return Outcome(f"ended by {signal.Signals(-ran.status).name}", ran.err[-2000:])
    if "Traceback (most recent call last)" in ran.err:
        return Outcome(f"traceback: {last_line(ran.err)}", ran.err[-2000:])
    if ran.status not in DOCUMENTED:
        return Outcome(f"exit {ran.status}: {said}", ran.err[-2000:])
    if ran.status == 0 and answer is not None and ran.out != answer:
        return Outcome("wrong answer", f"{ran.out[:200]!r} instead of {answer[:200]!r}; {ran.err[-500:]}")
    if peak_bytes is not None and ran.peak_bytes > peak_bytes + SPARE_BYTES:
        return Outcome("memory", f"{ran.peak_bytes >> 20} MiB instead of {peak_bytes >> 20}")
    return Outcome()


_PATH = re.compile(r"(?<![\w.])/[^\s'\":,;)]+")
_NUMBER = re.compile(r"\b(0x)?\d[\d.]*\b")


def first_line(err: str) -> str:
    """The first error of a text, without what differs between cases."""
    lines = [line for line in err.replace("\r", "\n").splitlines() if line.strip()]
    found = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return general(found)


def last_line(err: str) -> str:
    """The same of the last line."""
    lines = [line for line in err.splitlines() if line.strip()]
    return general(lines[-1]) if lines else ""


def general(line: str) -> str:
    """A message without paths and numbers."""
    return _NUMBER.sub("N", _PATH.sub("PATH", line))[:160]
