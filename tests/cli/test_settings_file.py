"""Options from variables and from the settings file: precedence, refusals, and messages."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import Cli, Result
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from moechat.chat.chat_options import Generation
from moechat.cli.app import grammar
from moechat.cli.commands.run_arguments import RunOptions

STORY = ("run", "demo", "Once upon a time", "--completion", "--json")


@pytest.fixture
def cli(cli: Cli, tmp_path: Path) -> Cli:
    """With a home of its own."""
    return replace(cli, home=tmp_path / "home")


def settings(cli: Cli, text: str | bytes) -> None:
    path = cli.home / "config" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def with_variables(cli: Cli, **variables: str) -> Cli:
    return replace(cli, extra={**cli.extra, **variables})


def tokens(result: Result) -> int:
    assert result.status == 0, result.err
    return int(json.loads(result.out)["statistics"]["output_tokens"])


def test_the_command_line_wins_over_variables_and_variables_over_the_file(cli: Cli) -> None:
    settings(cli, "max-tokens = 5\n[run]\nmax_tokens = 4\ntemperature = 0\n[bench]\nruns = 9\n")
    assert tokens(cli.call(*STORY)) == 4
    assert tokens(with_variables(cli, MOECHAT_MAX_TOKENS="3").call(*STORY)) == 3
    assert tokens(with_variables(cli, MOECHAT_MAX_TOKENS="3").call(*STORY, "--max-tokens", "2")) == 2


def test_a_setting_for_all_commands_applies_where_the_option_exists(cli: Cli) -> None:
    settings(cli, 'system = "moepic"\n')
    assert cli.call("list").status == 0
    result = cli.call("plan", "mixtral", "--gpu", "rtx3060-12g", "--json")
    assert json.loads(result.out)["system"] == "moepic"


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ('vrm = "8G"', "sets 'vrm', which is no option", "do you mean vram?"),
        ("[runn]\nctx = 5", "sets 'runn', which is no command", "do you mean run?"),
        ("[list]\nctx = 5", "sets 'ctx', which is no option of list", ""),
        ("yes = true", "sets 'yes', which is no option", ""),
        ("ctx = [1]", "sets ctx to a list", "a value is a string in quotes"),
        ("ctx =", "cannot be parsed", "it is TOML"),
        (b"ctx = 5 # \xff", "cannot be parsed", "it is TOML"),
        ("ctx = " + "[" * 5000 + "]" * 5000, "cannot be parsed", "it is TOML"),
        ("[run]\nctx = 'many'", "config.toml says ctx = 'many'; it must be a whole number", "it sets --ctx"),
        ("max-tokens = true", "says max-tokens = true, but it needs a value", "give it a value"),
        ("leftovers = true", "sets 'leftovers', which is no option", ""),
        ("[rm]\nbits = 4", "sets 'bits', which is no option of rm", ""),
        ("[show]\nbits = 4", "sets 'bits', which is no option of show", ""),
        ("bits = 5", "--bits is 5 (--bits is from config.toml)", "choose one of: 2, 3, 4, 6, 8, 16"),
        ("ram = 'much'", "'much' is not a size (--ram is from config.toml)", "write a number"),
        ("#" + "x" * (1 << 20), "has more than 1,048,576 bytes", ""),
    ],
)
def test_invalid_settings_are_usage_errors(cli: Cli, text: str | bytes, said: str, hint: str) -> None:
    settings(cli, text)
    result = cli.call("run", "demo", "hello")
    assert result.status == 2
    assert said in result.err
    assert hint in result.err
    assert result.out == b""


def test_help_version_and_doctor_work_with_a_broken_file(cli: Cli) -> None:
    settings(cli, "what is this")
    assert cli.call("run", "--help").status == 0
    assert cli.call("--version").status == 0
    found = json.loads(cli.call("doctor", "--json").out)
    assert any("cannot be parsed" in finding["fact"] for finding in found["findings"])


def test_an_invalid_variable_is_a_usage_error(cli: Cli) -> None:
    result = with_variables(cli, MOECHAT_CTX="many").call("run", "demo", "hello")
    assert result.status == 2
    assert "error: MOECHAT_CTX is 'many'; it must be a whole number" in result.err
    assert "hint: it sets --ctx" in result.err
    result = with_variables(cli, MOECHAT_CTX="many").call("run", "demo", "hello", "--ctx", "few")
    assert "MOECHAT_CTX" not in result.err
    assert "error: --ctx is 'few'; it must be a whole number" in result.err
    assert "hint: moechat run --help describes it" in result.err
    result = with_variables(cli, MOECHAT_BITS="5").call("run", "demo", "hello")
    assert "--bits is 5 (--bits is from MOECHAT_BITS)" in result.err
    result = with_variables(cli, MOECHAT_SYSTEMS="magic").call("bench", "demo")
    assert "(--systems is from MOECHAT_SYSTEMS)" in result.err


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("ctx", "3.5", "a whole number"),
        ("seed", "9" * 5000, "a whole number"),
        ("temperature", "hot", "a number"),
        ("raw", "maybe", "true or false"),
    ],
)
def test_a_wrong_value_has_one_form_of_message_wherever_it_comes_from(
    cli: Cli, option: str, value: str, wanted: str
) -> None:
    typed = cli.call("run", "demo", "hello", f"--{option}", value)
    if option != "raw":  # a flag takes no value
        assert (typed.status, f"; it must be {wanted}\n" in typed.err) == (2, True)
        assert f"error: --{option} is '" in typed.err
    variable = with_variables(cli, **{f"MOECHAT_{option.upper()}": value}).call("run", "demo", "hello")
    assert (variable.status, f"; it must be {wanted}\n" in variable.err) == (2, True)
    settings(cli, f"[run]\n{option} = '{value}'\n")
    line = cli.call("run", "demo", "hello")
    assert (line.status, f"; it must be {wanted}\n" in line.err) == (2, True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bits = 5", "error: --bits is 5 (--bits is from [run] in "),
        ("ctx = 'many'", "config.toml says ctx = 'many'; it must be a whole number"),
        ("ram = 0", "error: --ram is 0; it must be more than 0 bytes (--ram is from [run] in "),
    ],
)
def test_a_plan_refuses_the_same_values_for_run_as_run_does(cli: Cli, line: str, said: str) -> None:
    settings(cli, f"[run]\n{line}\n")
    planned = cli.call("plan", "demo")
    assert planned.status == cli.call("run", "demo", "hello").status == 2
    assert said in planned.err
    assert planned.out == b""
    assert cli.call("plan", "--help").status == 0


def test_correct_values_for_another_command_change_nothing(cli: Cli) -> None:
    settings(cli, "[run]\nbits = 4\nram = '2G'\nverbose = true\ntemperature = 0\n")
    result = cli.call("plan", "demo", "--json")
    assert result.status == 0
    assert json.loads(result.out)["memory"]["tiers"][0]["given"] is False


def test_a_wrong_argument_is_named_as_in_the_help(cli: Cli) -> None:
    result = cli.call("sessions", "show", "abc")
    assert result.status == 2
    assert "error: ID is 'abc'; it must be a whole number" in result.err
    assert "hint: moechat sessions show --help describes it" in result.err


def test_a_pipe_in_place_of_the_file_does_not_block(cli: Cli) -> None:
    path = cli.home / "config" / "config.toml"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    process = cli.start("list")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "is not a file" in err.decode()
    path.unlink()
    path.symlink_to("/dev/null")
    assert cli.call("list").status == 0


def test_names_to_delete_or_show_are_never_taken_from_settings(cli: Cli) -> None:
    models = cli.home / "data" / "models"
    for bits in (4, 8):
        store = models / f"org--name-{bits}bit"
        store.mkdir(parents=True)
        (store / "manifest.json").write_text(
            '{"source": {"name": "org/name", "revision": "0123"}, "model_type": "x", '
            f'"geometry": {{"bits": {bits}}}, "files": {{}}}}'
        )
    left = models / ".org--other-4bit.partial"
    left.mkdir()
    everywhere = with_variables(
        cli, MOECHAT_BITS="8", MOECHAT_LEFTOVERS="1", MOECHAT_SOURCES="1", MOECHAT_YES="1"
    )
    settings(cli, "bits = 8\n")
    assert everywhere.call("rm", "org/name").status == 2, "it asks, and nobody is there"
    assert everywhere.call("rm", "org/name", "--yes").status == 0
    assert [path.name for path in models.iterdir()] == [left.name]


def test_an_alias_of_a_command_has_the_same_settings(cli: Cli) -> None:
    settings(cli, "[list]\njson = true\n")
    assert cli.call("list").out == cli.call("ls").out == b"[]\n"


def test_typed_options_override_conflicting_settings(cli: Cli, tmp_path: Path) -> None:
    settings(cli, '[run]\ncontinue = true\nquiet = true\nvram = "10G"\n')
    typed = ("--device", "cpu", "--max-tokens", "2")
    done = cli.run("run", "demo", "--completion", "Once", *typed, forked=True)
    assert (done.status, done.err) == (0, "")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    done = cli.run("run", "demo", "--jsonl", str(prompts), "-v", *typed, forked=True)
    assert done.status == 0, done.err
    assert done.out.startswith(b'{"line": 1')
    # Of two that were typed none gives way, and neither of two that were not.
    assert cli.run("run", "demo", "hi", "--vram", "1G", "--device", "cpu", forked=True).status == 2
    settings(cli, "[run]\nquiet = true\nverbose = true\n")
    assert "--quiet and --verbose exclude each other" in cli.run("run", "demo", "hi", forked=True).err


def test_json_for_all_commands_does_not_apply_to_the_program_itself(cli: Cli) -> None:
    settings(cli, "json = true\n")
    assert cli.run("list").out == b"[]\n"
    assert cli.run("doctor").out.startswith(b"{")


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [("CTX", "5000", 4), ("RAM", "100M", 4), ("SYSTEM", "oracle", 2), ("CTX", "1", 2)],
)
def test_an_error_names_the_variable_that_set_the_value(
    cli: Cli, variable: str, value: str, status: int
) -> None:
    done = with_variables(cli, **{f"MOECHAT_{variable}": value}).run("run", "demo", "hi", forked=True)
    assert done.status == status
    assert f"(--{variable.lower()} is from MOECHAT_{variable})" in done.err


def test_settings_of_a_chat_show_their_source() -> None:
    chosen = Generation({"top_p": 0.5, "seed": 1}, {"seed": "from MOECHAT_SEED"})
    assert chosen.origin("seed") == "from MOECHAT_SEED"
    assert chosen.origin("top_p") == "from the command line"
    assert chosen.origin("top_k") == "the model's own"
    assert chosen.with_text("seed", "3").origin("seed") == "set here"
    assert chosen.with_text("seed", "default").origin("seed") == "the model's own"


def test_load_options_show_their_source() -> None:
    options = RunOptions(model="demo", ctx=512, ram="2G", origins={"ram": "from config.toml"})
    assert options.chat.loading == (
        ("ram", "2G", "from config.toml"),
        ("ctx", "512", "from the command line"),
    )


def test_every_option_has_a_variable_of_its_own() -> None:
    from moechat.cli.config.settings_file import options_of, variable_of

    taken = {"MOECHAT_HOME", "MOECHAT_DEBUG", "MOECHAT_ISA", "MOECHAT_CUDA_GRAPHS", "MOECHAT_CUDA_DRIVER"}
    taken |= {"MOECHAT_RUN_AHEAD"}
    for of in grammar().built().values():
        assert not taken & {variable_of(name) for name in options_of(of)}


_KEYS = st.sampled_from(
    ("ram", "vram", "ctx", "threads", "temperature", "system", "color", "presets", "remotes", "run", "model")
) | st.text("ab-_.\"' \t", min_size=1, max_size=4)
_VALUES = st.sampled_from(
    (
        *(
            "1",
            "-1",
            "1e400",
            "nan",
            "inf",
            "true",
            '"x"',
            '"12G"',
            "[1, 2]",
            "{a = 1}",
            "1979-05-27T07:32:00Z",
        ),
        *('"""', "'''a\nb'''", "0x" + "f" * 5000, "[" * 2000, '"\\ud800"', '"\\u0000"', "", "{", "[[]]"),
    )
)
_LINES = st.builds("{} = {}".format, _KEYS, _VALUES) | st.builds("[{}]".format, _KEYS) | st.text(max_size=6)


@given(lines=st.lists(_LINES, max_size=6), ending=st.sampled_from((b"", b"\xff", b"\x00", b"\r\n")))
@hypothesis_settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_settings_file_is_used_or_refused_by_its_name(cli: Cli, lines: list[str], ending: bytes) -> None:
    text = "\n".join(lines).encode("utf-8", "surrogatepass") + ending
    settings(cli, text)
    result = cli.call("list")
    assert result.status in (0, 2), result.err
    if result.status:
        assert result.err.startswith("error: ")
        assert "config.toml" in result.err or result.err.count("\n") <= 2
