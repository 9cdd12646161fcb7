"""``moechat config``: values, their sources, and changes that keep the rest of the file."""

from __future__ import annotations

import json
import stat
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moechat.cli.app import grammar
from moechat.cli.config.setting_keys import SettingKey, SettingKeys
from moechat.cli.config.settings_edit import SettingsEditor
from moechat.cli.config.settings_file import parse_settings

COMMENTED = """\
# my machine
ram = "2G"  # half of it

[run]
# for stories
temperature = 0.7
top_p = 0.9

[list]
json = true
"""


@pytest.fixture
def cli(cli: Cli, tmp_path: Path) -> Cli:
    """With a home of its own."""
    return replace(cli, home=tmp_path / "home")


def path_of(cli: Cli) -> Path:
    return cli.home / "config" / "config.toml"


def write(cli: Cli, text: str) -> None:
    path_of(cli).parent.mkdir(parents=True, exist_ok=True)
    path_of(cli).write_text(text)


def listed(cli: Cli, *arguments: str) -> dict[str, tuple[Any, str]]:
    done = cli.call("config", *arguments, "--json")
    assert done.status == 0, done.err
    return {row["key"]: (row["value"], row["source"]) for row in json.loads(done.out)}


def test_every_setting_is_listed_with_its_value_and_source(cli: Cli) -> None:
    write(cli, COMMENTED)
    with_variable = replace(cli, extra={"MOECHAT_CTX": "512"})
    rows = listed(with_variable, "list")
    assert rows["ram"] == ("2G", "config.toml")
    assert rows["ctx"] == ("512", "MOECHAT_CTX")
    assert rows["run.temperature"] == (0.7, "config.toml")
    assert rows["temperature"] == (None, "default")
    assert rows["dtype"] == ("auto", "default")
    assert set(SettingKeys(grammar()).general) <= rows.keys()
    changed = listed(with_variable, "--changed")
    assert {key for key, (_, source) in changed.items() if source in ("config.toml", "MOECHAT_CTX")} == {
        "ram",
        "ctx",
        "run.temperature",
        "run.top-p",
        "list.json",
    }
    assert all(source != "default" for _, source in changed.values())
    text = with_variable.call("config").out.decode()
    assert any(line.split() == ["ram", '"2G"', "config.toml"] for line in text.splitlines())


def test_one_value_is_printed_as_the_command_would_take_it(cli: Cli) -> None:
    write(cli, COMMENTED)
    assert cli.call("config", "get", "run.temperature").out == b"0.7\n"
    assert cli.call("config", "get", "run.ram").out == b"2G\n"
    assert cli.call("config", "get", "--", "--ram").out == b"2G\n"
    assert cli.call("config", "get", "run.top_p").out == b"0.9\n"
    overridden = replace(cli, extra={"MOECHAT_TEMPERATURE": "0.1"})
    assert overridden.call("config", "get", "run.temperature").out == b"0.1\n"
    unset = cli.call("config", "get", "seed")
    assert (unset.status, unset.out, "seed is not set" in unset.err) == (1, b"", True)
    assert cli.call("config", "get", "run", "--json").out == b'{\n "temperature": 0.7,\n "top-p": 0.9\n}\n'


def test_a_change_keeps_comments_and_all_other_lines(cli: Cli) -> None:
    write(cli, COMMENTED)
    for arguments in (
        ("run.temperature", "0.2"),
        ("run.top-p", "0.5"),
        ("ctx", "1024"),
        ("run.stop", "A", "B"),
    ):
        done = cli.call("config", "set", *arguments)
        assert (done.status, done.out, done.err) == (0, b"", "")
    changed = path_of(cli).read_text()
    expected = COMMENTED.replace("temperature = 0.7", "temperature = 0.2").replace(
        "top_p = 0.9", "top_p = 0.5"
    )
    expected = expected.replace("top_p = 0.5\n", 'top_p = 0.5\nstop = ["A", "B"]\n')
    expected = expected.replace("# half of it\n", "# half of it\nctx = 1024\n")
    assert changed == expected
    for key in ("ctx", "run.stop"):
        assert cli.call("config", "unset", key).status == 0
    assert tomllib.loads(path_of(cli).read_text())["run"] == {"temperature": 0.2, "top_p": 0.5}
    assert cli.call("config", "unset", "ctx").status == 1
    assert "# for stories" in path_of(cli).read_text()


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (("temprature", "1"), "there is no setting temprature", "do you mean temperature?"),
        (("run.temprature", "1"), "there is no setting run.temprature", "do you mean run.temperature?"),
        (("rnu.temperature", "1"), "there is no setting rnu.temperature", "do you mean run.temperature?"),
        (("ctx", "many"), "ctx is 'many'; it must be a whole number", "it sets --ctx"),
        (("run.temperature", "-1"), "--temperature is -1", ""),
        (("bits", "5"), "--bits is 5", "choose one of: 2, 3, 4, 6, 8, 16"),
        (("plan.bits", "5"), "--bits is 5", "choose one of: 2, 3, 4, 6, 8, 16"),
        (("ram", "much"), "'much' is not a size", "write a number"),
        (("serve.port", "99999"), "--port is 99999", ""),
        (("run.quiet", "perhaps"), "run.quiet is 'perhaps'; it must be true or false", ""),
        (("ctx", "1", "2"), "ctx takes one value, and 2 were given", "quotes"),
        (("run", "temperature"), "run is a table, and 'temperature' has no name", "NAME=VALUE"),
        (("api-key", "sk-123456789"), "secrets are not kept in the settings file", "MOECHAT_API_KEY"),
        (("rm.bits", "4"), "there is no setting rm.bits", ""),
        (("run.yes", "true"), "there is no setting run.yes", ""),
    ],
)
def test_a_wrong_key_or_value_changes_nothing(
    cli: Cli, arguments: tuple[str, ...], said: str, hint: str
) -> None:
    write(cli, COMMENTED)
    done = cli.call("config", "set", *arguments)
    assert (done.status, done.out) == (2, b"")
    assert said in done.err
    assert hint in done.err
    assert "sk-1234" not in done.err
    assert path_of(cli).read_text() == COMMENTED


def test_values_that_exclude_each_other_are_refused(cli: Cli) -> None:
    assert cli.call("config", "set", "run", "quiet=true").status == 0
    refused = cli.call("config", "set", "run.verbose", "true")
    assert refused.status == 2
    assert "run.verbose was not changed: --quiet and --verbose exclude each other" in refused.err


def test_a_new_file_is_for_its_owner_and_an_old_one_keeps_its_mode(cli: Cli) -> None:
    assert cli.call("config", "set", "ctx", "512").status == 0
    assert stat.S_IMODE(path_of(cli).stat().st_mode) == 0o600
    assert path_of(cli).read_text() == "ctx = 512\n"
    path_of(cli).chmod(0o644)
    assert cli.call("config", "set", "ctx", "1024").status == 0
    assert stat.S_IMODE(path_of(cli).stat().st_mode) == 0o644
    assert [path.name for path in path_of(cli).parent.iterdir()] == ["config.toml"]


def test_a_wrong_line_can_be_mended_and_removed(cli: Cli) -> None:
    write(cli, "ctx = 'many'\nvrm = 3\n[runn]\nx = 1\n")
    assert cli.call("list").status == 2
    assert cli.call("config", "path").out.decode().strip() == str(path_of(cli))
    assert cli.call("config", "set", "ctx", "512").status == 0
    assert cli.call("config", "unset", "vrm").status == 0
    assert cli.call("config", "unset", "runn").status == 0
    assert path_of(cli).read_text().strip() == "ctx = 512"
    assert cli.call("list").status == 0


def test_a_file_that_is_not_toml_is_not_overwritten(cli: Cli) -> None:
    write(cli, "what is this")
    done = cli.call("config", "set", "ctx", "512")
    assert done.status == 2
    assert "cannot be parsed" in done.err
    assert path_of(cli).read_text() == "what is this"


def test_a_variable_that_overrides_the_file_is_mentioned(cli: Cli) -> None:
    done = replace(cli, extra={"MOECHAT_CTX": "256"}).call("config", "set", "ctx", "512")
    assert done.status == 0
    assert "MOECHAT_CTX is set, and overrides the file" in done.err


def test_the_editor_opens_the_file_which_is_checked_afterwards(cli: Cli, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf \'ctx = "many"\\n\' > "$2"\ntest "$1" = --wait\n')
    editor.chmod(0o755)
    done = replace(cli, extra={"VISUAL": f"{editor} --wait", "EDITOR": "false"}).call("config", "edit")
    assert done.status == 2
    assert "says ctx = 'many'; it must be a whole number" in done.err
    failed = replace(cli, extra={"VISUAL": "", "EDITOR": "false"}).call("config", "edit")
    assert "false ended with status 1" in failed.err


def test_secrets_in_a_file_written_by_hand_are_not_shown(cli: Cli) -> None:
    write(cli, '[remotes.big]\nurl = "http://me:hunter2@host/v1"\nkey = "sk-123456789"\n')
    for arguments in (("config",), ("config", "--json"), ("config", "get", "remotes.big"), ("doctor",)):
        done = cli.call(*arguments)
        assert b"hunter2" not in done.out, arguments
        assert b"sk-1234" not in done.out, arguments
        assert b"(hidden)" in done.out, arguments


_KEYS = SettingKeys(grammar())
_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_PLACES = st.sampled_from(
    [
        (SettingKey((), "system-prompt"), _TEXT),
        (SettingKey((), "ctx"), st.integers(2, 1 << 20)),
        (SettingKey(("run",), "temperature"), st.floats(0, 100)),
        (SettingKey(("run",), "stop"), st.lists(_TEXT, min_size=1, max_size=3)),
        (SettingKey(("run",), "raw"), st.booleans()),
        (SettingKey(("presets", "a"), "system"), _TEXT),
        (SettingKey(("presets", "b-c"), "model"), _TEXT),
        (SettingKey(("remotes", "a"), "url"), _TEXT),
    ]
)
_STARTS = ["", COMMENTED, "[run]\n[list]\n", "#end"]
_CHANGE = _PLACES.flatmap(lambda place: st.tuples(st.just(place[0]), st.none() | place[1]))


@given(changes=st.lists(_CHANGE, max_size=12), start=st.sampled_from(_STARTS))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_sequence_of_changes_leaves_what_was_set_last(
    changes: list[tuple[SettingKey, Any]], start: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "changes.toml"
    path.write_text(start)
    comments = [line for line in start.splitlines() if line.startswith("#")]
    expected: dict[str, Any] = {"run.temperature": 0.7} if start == COMMENTED else {}
    for key, value in changes:
        editor = SettingsEditor(path)  # as each command does
        if value is None:
            assert editor.unset(key) == (str(key) in expected)
            expected.pop(str(key), None)
        else:
            editor.set(key, value)
            expected[str(key)] = value
        editor.save()
    found = parse_settings(path.read_text(), path)
    for key, _ in changes:
        own = {"presets": found.presets, "remotes": found.remotes}
        table: Any = found.general if not key.table else found.of.get(key.table[0], {})
        if key.table and key.table[0] in own:
            table = own[key.table[0]].get(key.table[1], {})
        assert table.get(key.name) == expected.get(str(key))
    if not any(value is None for _, value in changes):
        assert all(comment in path.read_text() for comment in comments)
