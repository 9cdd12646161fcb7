"""Sizes as people write them, and the user's directories."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.config import parse_size, user_paths
from moechat.errors import UsageError

POWER = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12G", 12 * 2**30),
        ("12g", 12 * 2**30),
        ("12GB", 12 * 2**30),
        ("12GiB", 12 * 2**30),
        (" 12 gib ", 12 * 2**30),
        ("1.5K", 1536),
        (".5M", 2**19),
        ("7.T", 7 * 2**40),
        ("4096", 4096),
        ("4096B", 4096),
        ("0", 0),
        ("0.1G", 107374182),
    ],
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "G",
        "12X",
        "-1G",
        "+1G",
        "1e9",
        "nan",
        "inf",
        "1,5G",
        "1 2G",
        "12GG",
        "12Gi",
        "٣G",
        "0x10",
        ".",
    ],
)
def test_the_error_for_an_invalid_size_gives_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert "12G" in (caught.value.hint or "")


def test_a_size_beyond_file_offsets_is_refused() -> None:
    assert parse_size(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(UsageError, match="larger than any memory"):
        parse_size(str(2**63))


@given(
    whole=st.integers(0, 10**6),
    decimals=st.text("0123456789", max_size=40),
    unit=st.sampled_from(["", "K", "M", "G", "T"]),
    suffix=st.sampled_from(["", "B", "iB", "ib"]),
)
def test_sizes_with_any_number_of_decimals_are_exact(
    whole: int, decimals: str, unit: str, suffix: str
) -> None:
    exact = Fraction(f"{whole}.{decimals or '0'}") * 2 ** POWER[unit]
    assert parse_size(f"{whole}.{decimals}{unit}{suffix}") == int(exact)


@given(st.text(max_size=12))
def test_any_text_is_parsed_as_a_size_or_refused(text: str) -> None:
    try:
        size = parse_size(text)
    except UsageError:
        return
    assert 0 <= size < 2**63


def test_the_home_variable_moves_every_directory(tmp_path: Path) -> None:
    paths = user_paths({"MOECHAT_HOME": str(tmp_path)})
    directories = {paths.data, paths.state, paths.cache, paths.config}
    assert len(directories) == 4
    assert all(directory.parent == tmp_path for directory in directories)
    assert paths.models == tmp_path / "data" / "models"
    assert list(tmp_path.iterdir()) == []


def test_the_home_variable_can_be_relative_or_start_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somebody")
    assert user_paths({"MOECHAT_HOME": "here"}).state == tmp_path / "here" / "state"
    assert user_paths({"MOECHAT_HOME": "~/there"}).state == Path("/somebody/there/state")


def test_a_home_variable_that_names_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="not a directory"):
        user_paths({"MOECHAT_HOME": str(file)})


def test_without_the_variable_the_system_directories_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere/data")
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere/state")
    for environment in ({}, {"MOECHAT_HOME": ""}):
        paths = user_paths(environment)
        assert paths.models == Path("/somewhere/data/moechat/models")
        assert paths.state == Path("/somewhere/state/moechat")


def test_the_error_for_an_unknown_users_home_names_the_user() -> None:
    with pytest.raises(UsageError, match="MOECHAT_HOME is ~no-such-user-here/x, and that user has no home"):
        user_paths({"MOECHAT_HOME": "~no-such-user-here/x"})
