"""Options of pytest: a quick run, and the list of slow tests that it leaves out.

A quick run takes every test once, with the first of its parameter sets, and leaves out those of
``tests/slow.txt``. That list is recorded by processor time, children included, because the time on the clock
depends on what else the machine does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import TESTS

SLOW_LIST = TESTS / "slow.txt"
SLOW_SECONDS = 0.5
HEADER = f"""\
# Tests whose first case takes more than {SLOW_SECONDS} s of processor time: a quick run leaves them out.
# Written by: pytest --record-slow
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moechat")
    group.addoption("--quick", action="store_true", help="each test once, without those of tests/slow.txt")
    group.addoption("--record-slow", action="store_true", help="write tests/slow.txt anew after a whole run")


def function_of(item: pytest.Item) -> str:
    """The test of an item without its parameters: ``room/file.py::name``."""
    path, _, name = item.nodeid.partition("::")
    return f"{path.removeprefix('tests/')}::{name.partition('[')[0]}"


def slow_tests(list_path: Path = SLOW_LIST) -> set[str]:
    lines = list_path.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("quick"):
        return
    left_out = slow_tests()
    kept, others, seen = [], [], set()
    for item in items:
        function = function_of(item)
        quick = function not in seen and function not in left_out and not item.get_closest_marker("slow")
        seen.add(function)
        (kept if quick else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


class SlowRecorder:
    """Measures the processor time of the first case of every test, and writes the list of slow ones."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._first: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = os.times()
        try:
            return (yield)
        finally:
            function = function_of(item)
            if self._first.setdefault(function, item.nodeid) == item.nodeid:
                self._seconds[function] = sum(os.times()[:4]) - sum(before[:4])

    def pytest_sessionfinish(self) -> None:
        slow = sorted(name for name, seconds in self._seconds.items() if seconds > SLOW_SECONDS)
        SLOW_LIST.write_text(HEADER + "".join(f"{name}\n" for name in slow))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_slow"):
        if config.getoption("numprocesses", None):
            raise pytest.UsageError("--record-slow needs all tests in one process")
        config.pluginmanager.register(SlowRecorder())
