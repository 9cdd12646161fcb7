"""Which tests run: all, those of continuous integration, or a quick selection.

A run without paths takes what fits into continuous integration: of every test as many of its parameter sets,
from the first on, as take :data:`USUAL_SECONDS`, one at least; tests whose first case takes more than
:data:`LONG_SECONDS` are left out. ``--all`` runs everything, and so do paths, for the tests that they name,
unless ``--usual`` is there too.
``--quick`` takes each test once, without slow ones.

The list of slow tests is recorded by processor time, children included, because the time on the clock depends
on what else the machine does.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from places import TESTS

SLOW_LIST = TESTS / "slow.txt"
SLOW_SECONDS = 0.5
USUAL_SECONDS = 0.7
LONG_SECONDS = 1.9
# Long, or the only tests of their kind: how many cases of each run always. Of auto these are four rows, in
# which every machine and every kind of routing occurs.
ALWAYS: Mapping[str, float] = {
    **dict.fromkeys(
        (
            # Every family, with the oldest transformers and the newest.
            "models/test_parity.py::test_sixteen_bit_store_gives_the_logits_and_tokens_of_transformers",
            "models/test_whole_model.py::test_one_token_equals_transformers_pass_bitwise",
            "offload/device/test_fused_layers.py::test_a_layer_that_is_not_its_parts_does_not_agree",
            "offload/device/test_fused_layers.py::test_a_layer_whose_code_does_more_is_left_alone",
            "offload/device/test_fused_layers.py::test_an_output_that_the_next_layer_does_not_read_is_reported",
            "offload/device/test_fused_layers.py::test_hooks_of_modules_that_are_bypassed_are_called",
            "offload/device/test_fused_layers.py::test_layers_are_recognised_in_every_type",
            "offload/device/test_fused_layers.py::test_layers_of_another_kind_are_left_alone",
            "offload/device/test_fused_layers.py::test_layers_of_families_are_a_few_launches_with_the_same_logits",
            "offload/device/test_fused_layers.py::test_layers_that_fail_or_differ_are_computed_step_by_step",
            "offload/device/test_fused_layers.py::test_sums_of_layers_are_added_at_once_if_the_model_does_more_with_them",
            "offload/device/test_state_graphs.py::test_a_new_cache_begins_with_states_of_zeros",
            "offload/device/test_state_graphs.py::test_states_stand_beside_packed_keys_and_weights",
            "offload/device/test_state_graphs.py::test_states_that_a_replay_does_not_write_are_noticed",
            "offload/device/test_state_graphs.py::test_states_that_move_are_not_replayed",
            "offload/device/test_state_graphs.py::test_without_memory_for_copies_of_states_the_host_launches_every_layer",
            "scripts/test_bench_linear_attention.py::test_a_model_without_linear_attention_is_an_error",
            "scripts/test_bench_linear_attention.py::test_both_ways_are_timed",
            "scripts/test_faults.py::test_nothing_falls_in_the_short_campaign",
            "fetch/test_checked_shards.py::test_a_byte_that_changes_on_the_disk_is_refused_and_fetched_again",
        ),
        float("inf"),
    ),
    "offload/test_same_tokens.py::test_a_loaded_engine_gives_the_same_logits_within_any_number_of_pages": 2,
    "offload/test_same_tokens.py::test_logits_do_not_depend_on_how_the_tier_is_run": 2,
    "simulate/test_auto_is_never_slower.py::test_auto_is_as_fast_as_the_best_fixed_strategy": 12,
    "simulate/test_auto_is_never_slower.py::test_auto_is_as_fast_as_the_best_preset": 12,
    "simulate/test_auto_is_never_slower.py::test_nothing_is_faster_than_the_oracle": 12,
}
HEADER = f"""\
# Tests that take more than {SLOW_SECONDS} s of processor time:
# number of cases, seconds of the first one, seconds of all, name.
# Written by: scripts/test --all --record-slow
"""
_PROPERTY = "processor seconds"


@dataclass(frozen=True)
class SlowTest:
    """A line of the list.

    Attributes:
        cases: How many cases the test has.
        first: Processor seconds of the first one.
        total: Of all.
    """

    cases: int
    first: float
    total: float

    @property
    def usual_cases(self) -> int:
        """How many of them, from the first on, run in continuous integration."""
        if self.first > LONG_SECONDS:
            return 0
        if self.cases == 1:
            return 1
        later = max((self.total - self.first) / (self.cases - 1), 0.001)
        return 1 + max(0, int((USUAL_SECONDS - self.first) / later))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moechat")
    group.addoption("--all", action="store_true", help="all tests; without paths, long ones are left out")
    group.addoption("--usual", action="store_true", help="leave long tests out of paths too")
    group.addoption("--quick", action="store_true", help="each test once, without those of tests/slow.txt")
    group.addoption("--record-slow", action="store_true", help="all tests; then write tests/slow.txt anew")


def function_of(node: str) -> str:
    """The test of a node without its parameters: ``room/file.py::name``."""
    path, _, name = node.partition("::")
    return f"{path.removeprefix('tests/')}::{name.partition('[')[0]}"


def slow_tests(list_path: Path = SLOW_LIST) -> dict[str, SlowTest]:
    """The list, by name of the test."""
    lines = (line.split() for line in list_path.read_text().splitlines() if not line.startswith("#"))
    return {name: SlowTest(int(cases), float(first), float(total)) for cases, first, total, name in lines}


def quick_cases(slow: Mapping[str, SlowTest], function: str, item: pytest.Item) -> int:
    """How many cases of a test a quick run takes."""
    left_out = item.get_closest_marker("slow") or (function in slow and slow[function].first > SLOW_SECONDS)
    return 0 if left_out else 1


def usual_cases(slow: Mapping[str, SlowTest], function: str) -> float:
    """The same for a run of continuous integration."""
    if function in ALWAYS:
        return ALWAYS[function]
    return slow[function].usual_cases if function in slow else float("inf")


def names_tests(config: pytest.Config) -> bool:
    """Whether the command line has paths; one of several processes asks the one that began them."""
    if hasattr(config, "workerinput"):
        return bool(config.workerinput["names_tests"])
    return config.args_source is not pytest.Config.ArgsSource.TESTPATHS


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["names_tests"] = names_tests(node.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick = config.getoption("quick")
    named = names_tests(config) and not config.getoption("usual")
    if not quick and (named or config.getoption("all") or config.getoption("record_slow")):
        return
    slow = slow_tests()
    kept, others, seen = [], [], defaultdict[str, int](int)
    for item in items:
        function = function_of(item.nodeid)
        most = quick_cases(slow, function, item) if quick else usual_cases(slow, function)
        seen[function] += 1
        (kept if seen[function] <= most else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = os.times()
    try:
        return (yield)
    finally:
        if item.config.getoption("record_slow"):
            item.user_properties.append((_PROPERTY, sum(os.times()[:4]) - sum(before[:4])))


class SlowRecorder:
    """Writes the list; of tests in several processes, the one that they report to."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, float]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties:
            if report.when == "call" and name == _PROPERTY:
                self._seconds[function_of(report.nodeid)].setdefault(report.nodeid, float(str(seconds)))

    def pytest_sessionfinish(self) -> None:
        lines = [
            f"{len(cases)} {next(iter(cases.values())):.1f} {sum(cases.values()):.1f} {function}"
            for function, cases in self._seconds.items()
            if sum(cases.values()) > SLOW_SECONDS
        ]
        SLOW_LIST.write_text(
            HEADER + "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line.split()[-1]))
        )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_slow") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SlowRecorder())
