"""Measures a link into a GPU: blocks of one size, submitted in batches, so many in flight."""

from __future__ import annotations

import os
import time

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.errors import MoechatError

_WAIT_SECONDS = 0.2
_STALL_SECONDS = 10.0
_STOP_SECONDS = 2.0


def sustained(
    link: _native.Link,
    target: npt.NDArray[np.uint8],
    *,
    seconds: float,
    rounds: int = 1,
) -> list[float]:
    """Keep a link busy and measure its bandwidth several times.

    Transfers read the only region in order, from the start again at its end. They are submitted in batches of
    a quarter of those in flight, so that the link never waits for the host, and prepared before, because at
    64 KiB the interpreter would else be slower than PCIe 5.

    Args:
        link: A link of one region that is not open yet; it is stopped at the end.
        target: uint8 ``[in flight, bytes of a transfer]``.
        seconds: Time after which a round submits no more.
        rounds: Rounds; between them the link runs empty.

    Returns:
        Bytes per second of each round, from its first request to its last byte.

    Raises:
        MoechatError: A transfer fails, or the link stalls.
        ValueError: The region is smaller than the target.
    """
    depth, unit = target.shape
    batch = max(1, depth // 4)
    depth = depth // batch * batch
    count = link.region_bytes(0) // unit // depth * depth
    if count == 0:
        raise ValueError(f"a region of {link.region_bytes(0)} bytes is smaller than {depth} x {unit}")
    transfers = [(at % depth, 0, at * unit, unit, _native.DEMAND) for at in range(count)]
    batches = [transfers[at : at + batch] for at in range(0, count, batch)]
    places = depth // batch
    left = [0] * places  # unfinished transfers of the batch in each place
    link.open(depth)
    try:
        found, at = [], 0
        for _ in range(rounds):
            moved, started = 0, time.perf_counter()
            arrived = started
            while True:
                # At least one batch in each place, so that slow links give a figure too.
                while (moved + unit * sum(left) < unit * depth or arrived - started < seconds) and not left[
                    at % places
                ]:
                    link.submit(batches[at % len(batches)], target)
                    left[at % places] = batch
                    at += 1
                if not any(left):
                    break
                _wait(link, arrived)
                for slot, error in link.poll():
                    if error:
                        raise MoechatError(f"{link.name()} cannot copy: {os.strerror(error)}")
                    moved += unit
                    left[slot // batch] -= 1
                    arrived = time.perf_counter()
            found.append(moved / (arrived - started))
        return found
    finally:
        link.stop(_STOP_SECONDS)


def waits(
    link: _native.Link, target: npt.NDArray[np.uint8], *, seconds: float, most: int = 200
) -> list[float]:
    """Seconds from the request of one transfer on the idle link until the host sees its last byte.

    Args:
        link: As for :func:`sustained`.
        target: uint8 ``[1, bytes of a transfer]``.
        seconds: Time for samples; at least three are taken.
        most: Samples at most.

    Raises:
        MoechatError: A transfer fails, or the link stalls.
    """
    unit = target.shape[1]
    count = max(1, link.region_bytes(0) // unit)
    found: list[float] = []
    link.open(1)
    started = time.perf_counter()
    try:
        while len(found) < 3 or (len(found) < most and time.perf_counter() - started < seconds):
            transfer = [(0, 0, len(found) % count * unit, unit, _native.DEMAND)]
            asked = time.perf_counter()
            link.submit(transfer, target)
            done: list[tuple[int, int]] = []
            while not done:
                _wait(link, asked)
                done = link.poll()
            found.append(time.perf_counter() - asked)
            if done[0][1]:
                raise MoechatError(f"{link.name()} cannot copy: {os.strerror(done[0][1])}")
        return found
    finally:
        link.stop(_STOP_SECONDS)


def _wait(link: _native.Link, since: float) -> None:
    if link.wait(_WAIT_SECONDS):
        return
    if reason := link.failure():
        raise MoechatError(f"{link.name()} has failed: {reason}")
    silent = time.perf_counter() - since
    if silent > _STALL_SECONDS:
        raise MoechatError(f"{link.name()} has moved nothing for {silent:.0f} s")
