"""Measures bandwidth and latency of a link, with the engine's own link."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.errors import MoechatError
from moechat.hardware.resident_pages import touched_pages

WINDOW_BYTES = 64 << 20
_WAIT_SECONDS = 0.2
_STOP_SECONDS = 2.0
_LEAST_SAMPLES = 5


@dataclass(frozen=True)
class Moved:
    """Bytes moved by a link, and the time."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


def stream(
    link: _native.Link,
    unit_bytes: int,
    record_bytes: int,
    *,
    seconds: float,
    window: npt.NDArray[np.uint8] | None = None,
    once: bool = False,
    seed: int = 0,
    stall_seconds: float = 30.0,
) -> Moved:
    """Keep a link busy with units in random order, like a prefetcher.

    Args:
        link: A link that is not open yet; it is stopped at the end.
        unit_bytes: Contiguous bytes that are requested together, such as an expert.
        record_bytes: Bytes of one transfer, such as a block; divides ``unit_bytes``.
        seconds: Time after which no more units are requested.
        window: uint8, C-contiguous, page-aligned memory for units in flight, at least two units; ``None``
            allocates 64 MiB or two units.
        once: Read no unit twice, even if that ends the measurement early.
        seed: Random seed of the order.
        stall_seconds: Time without any arrival after which an error is raised.

    Raises:
        MoechatError: A read fails, or the link stalls.
        ValueError: No region holds a unit, or the window does not hold two.
    """
    records = unit_bytes // record_bytes
    units = _units(link, unit_bytes)
    order = np.random.default_rng(seed).permutation(len(units)).tolist()
    if window is None:
        window = touched_pages(1, max(WINDOW_BYTES, 2 * unit_bytes))
    if window.size < 2 * unit_bytes:
        raise ValueError(f"a window of {window.size} bytes does not hold two units of {unit_bytes}")
    places = min(len(units), window.size // unit_bytes)
    target = window.reshape(-1)[: places * unit_bytes].reshape(places * records, record_bytes)
    free, left, held = list(range(places)), [0] * places, [(0, 0)] * places
    asked = moved = 0
    most = len(units) if once else None
    link.open(places * records)
    started = arrived = time.perf_counter()
    try:
        while True:
            now = time.perf_counter()
            batch = []
            while free and now - started < seconds and (most is None or asked < most):
                place = free.pop()
                region, base = held[place] = units[order[asked % len(units)]]
                asked += 1
                left[place] = records
                batch += [
                    (place * records + part, region, base + part * record_bytes, record_bytes, _native.DEMAND)
                    for part in range(records)
                ]
            if batch:
                link.submit(batch, target)
            if len(free) == places:
                return Moved(moved, time.perf_counter() - started)
            if not link.wait(_WAIT_SECONDS):
                _check(link, time.perf_counter() - arrived, stall_seconds)
            for slot, error in link.poll():
                place, part = divmod(slot, records)
                if error:
                    region, base = held[place]
                    raise _unreadable(link, region, base + part * record_bytes, error)
                moved += record_bytes
                arrived = time.perf_counter()
                left[place] -= 1
                if not left[place]:
                    free.append(place)
    finally:
        link.stop(_STOP_SECONDS)


def latency(
    link: _native.Link,
    unit_bytes: int,
    record_bytes: int,
    *,
    seconds: float,
    window: npt.NDArray[np.uint8] | None = None,
    once: bool = False,
    seed: int = 0,
    stall_seconds: float = 30.0,
) -> float:
    """Seconds from the request of one unit on the idle link to its last byte; the median of several.

    Args:
        link: A link that is not open yet; it is stopped at the end.
        unit_bytes: As for :func:`stream`; a unit is requested when none is in flight.
        record_bytes: As for :func:`stream`.
        seconds: Time for samples; up to three times as long until there are 5.
        window: As for :func:`stream`, but one unit is enough; ``None`` allocates one.
        once: Read no unit twice, even if that ends the measurement early.
        seed: Random seed of the order.
        stall_seconds: As for :func:`stream`.

    Raises:
        MoechatError: A read fails, or the link stalls.
        ValueError: No region or not the window holds a unit.
    """
    places = _units(link, unit_bytes)
    order = np.random.default_rng(seed).permutation(len(places)).tolist()
    records = unit_bytes // record_bytes
    if window is None:
        window = touched_pages(1, unit_bytes)
    if window.size < unit_bytes:
        raise ValueError(f"a window of {window.size} bytes does not hold a unit of {unit_bytes}")
    target = window.reshape(-1)[: records * record_bytes].reshape(records, record_bytes)
    link.open(records)
    samples: list[float] = []
    started = time.perf_counter()
    try:
        while _goes_on(len(samples), len(places) if once else None, time.perf_counter() - started, seconds):
            region, base = places[order[len(samples) % len(order)]]
            asked = arrived = time.perf_counter()
            link.submit(
                [
                    (part, region, base + part * record_bytes, record_bytes, _native.DEMAND)
                    for part in range(records)
                ],
                target,
            )
            left = records
            while left:
                if not link.wait(_WAIT_SECONDS):
                    _check(link, time.perf_counter() - arrived, stall_seconds)
                for part, error in link.poll():
                    if error:
                        raise _unreadable(link, region, base + part * record_bytes, error)
                    arrived = time.perf_counter()
                    left -= 1
            samples.append(arrived - asked)
        return statistics.median(samples)
    finally:
        link.stop(_STOP_SECONDS)


def _goes_on(count: int, most: int | None, taken: float, seconds: float) -> bool:
    """Whether to take another sample: at least one, and several unless each takes very long."""
    if count == 0:
        return True
    if most is not None and count >= most:
        return False
    return taken < seconds or (count < _LEAST_SAMPLES and taken < 3 * seconds)


def _units(link: _native.Link, unit_bytes: int) -> list[tuple[int, int]]:
    """Region and offset of all units of that size."""
    units = [
        (region, at * unit_bytes)
        for region in range(link.regions())
        for at in range(link.region_bytes(region) // unit_bytes)
    ]
    if not units:
        raise ValueError(f"no region of the link holds {unit_bytes} bytes")
    return units


def _unreadable(link: _native.Link, region: int, offset: int, error: int) -> MoechatError:
    if reason := link.failure():
        return MoechatError(f"{link.name()} has failed: {reason}")
    return MoechatError(f"{link.describe(region, offset)} cannot be read: {os.strerror(error)}")


def _check(link: _native.Link, silent: float, stall_seconds: float) -> None:
    if reason := link.failure():
        raise MoechatError(f"{link.name()} has failed: {reason}")
    if silent > stall_seconds:
        raise MoechatError(f"nothing has come from {link.describe(0, 0)} for {silent:.0f} s")
