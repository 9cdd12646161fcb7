"""Options of a measurement and their syntax."""

from __future__ import annotations

from typing import Any

import pytest

from moechat.bench.options import BenchOptions, LinkChoice, parse_fractions, parse_link, parse_systems
from moechat.errors import UsageError


def test_settings_belong_to_the_system_before_them() -> None:
    systems = parse_systems("mixtral-offloading, auto ,auto:split=0.5,lookahead=2,moepic")
    assert [system.name for system in systems] == [
        "mixtral-offloading",
        "auto",
        "auto:split=0.5,lookahead=2",
        "moepic",
    ]
    assert systems[2].settings.split == 0.5
    assert systems[2].settings.lookahead == 2
    assert systems[1].settings.lookahead == 1


@pytest.mark.parametrize("text", ["nothing", "auto:split=2", "split=0.5", "auto:split", "auto:colour=red"])
def test_wrong_systems_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_systems(text)


def test_fractions_are_decimals_or_quotients() -> None:
    assert parse_fractions("0.25, 1/3,1") == (0.25, 1 / 3, 1.0)


@pytest.mark.parametrize("text", ["a", "1/0", "1/", "0.5;0.6"])
def test_wrong_fractions_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a fraction"):
        parse_fractions(text)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("file", LinkChoice()),
        ("sim:2G", LinkChoice("sim", bandwidth=2.0 * 2**30)),
        ("sim:16x", LinkChoice("sim", ratio=16.0)),
        ("sim:0.5x", LinkChoice("sim", ratio=0.5)),
    ],
)
def test_link_options_are_parsed(text: str, choice: LinkChoice) -> None:
    assert parse_link(text) == choice


@pytest.mark.parametrize(
    "text",
    [
        *("", "sim", "sim:", "sim:0x", "sim:0", "sim:fast", "file:2G", "cuda"),
        *("sim:-1x", "sim:1e5x", "sim:-1", "sim:9999T", "sim:99999999T"),
        *(f"sim:{'9' * 300}x", f"sim:{'9' * 400}x", f"sim:0.{'0' * 300}1x", "sim:1000001x"),
    ],
)
def test_wrong_links_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a link") as refused:
        parse_link(text)
    assert refused.value.hint is not None
    assert "sim:16x" in refused.value.hint


def test_a_setting_after_a_bare_system_is_explained() -> None:
    with pytest.raises(UsageError, match="'lookahead=2' follows the system 'auto'") as refused:
        parse_systems("moepic,auto,lookahead=2")
    assert refused.value.hint == "write auto:lookahead=2"


@pytest.mark.parametrize(("name", "most"), [("prefetch_bytes", 1 << 62), ("prefetch_experts", 1 << 20)])
def test_limits_of_prefetching_stay_within_what_the_runner_counts(name: str, most: int) -> None:
    (system,) = parse_systems(f"auto:{name}={most}")
    assert getattr(system.settings, name) == most
    for wrong in (most + 1, 10**24, -1):
        with pytest.raises(UsageError, match=f"{name} is {wrong}; it must be at least 0 and at most {most}"):
            parse_systems(f"auto:{name}={wrong}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"systems": ()},
        {"systems": parse_systems("auto,auto")},
        {"fractions": ()},
        {"fractions": (0.0,)},
        {"fractions": (1.5,)},
        {"fractions": (float("nan"),)},
        {"fractions": (0.5, 0.5)},
        {"accuracy": 1.5},
        {"tokens": 1},
        {"prompt_tokens": 0},
        {"warmup_tokens": -1},
        {"runs": 0},
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BenchOptions(**{"systems": parse_systems("auto"), **wrong})
