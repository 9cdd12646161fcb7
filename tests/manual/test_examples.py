"""Every example of README, guide for contributors and manual: it runs, or at least parses, as printed."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tomllib
from collections.abc import Iterator

import pytest
from cli_support import PATIENCE_S, PROGRAM, Cli
from hub_checkpoint import write_hub_checkpoint
from hub_server import REPOSITORY, Hub
from manual_examples import ANY, Block, all_blocks, commands, matches, steps
from places import ROOT
from terminal_support import Terminal

from moechat.cli.app import grammar, parse
from moechat.cli.config.setting_checks import check_settings
from moechat.cli.config.settings_file import read_settings
from moechat.config import user_paths

CONSOLE = all_blocks("console")
PYTHON = all_blocks("python")
SHELL = all_blocks("sh")


def named(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks]


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(directory=tmp_path_factory.mktemp("cwd"), home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    checkpoint = tmp_path_factory.mktemp("hub") / "moe-chat"
    write_hub_checkpoint(checkpoint)
    with Hub().running() as running:
        running.add(REPOSITORY, checkpoint)
        yield running


class Runner:
    """Runs commands of examples; the same command with the same input once."""

    def __init__(self, cli: Cli, request: pytest.FixtureRequest) -> None:
        self._cli = cli
        self._request = request
        self._outputs: dict[tuple[str, ...], str] = {}

    def output(self, command: str, lines: list[str]) -> str:
        """What a terminal would show, typed lines included."""
        key = (command, *lines)
        if key not in self._outputs:
            self._outputs[key] = self._run(command, lines)
        return self._outputs[key]

    def _run(self, command: str, lines: list[str]) -> str:
        words = next(iter(commands(command)))
        if words[0] != "moechat":
            done = subprocess.run(
                ["bash", "-c", command], cwd=self._cli.directory, capture_output=True, text=True, check=True
            )
            return done.stdout + done.stderr
        if lines:
            return self._chat(words[1:], lines)
        if words[1] == "download":
            return self._download(words[1:])
        result = self._cli.call(*words[1:])
        return result.out.decode() + result.err

    def _chat(self, arguments: list[str], lines: list[str]) -> str:
        environment = self._cli.environment | {"NO_COLOR": "1"}
        terminal = Terminal(
            [*PROGRAM, *arguments],
            cwd=self._cli.directory,
            environment=environment,
            columns=120,
            rows=50,
            patience_s=PATIENCE_S,
        )
        try:
            for line in lines[:-1]:
                terminal.wait_prompt()
                terminal.enter(line)
            terminal.wait_prompt()
            terminal.enter(lines[-1], whole=False)
            assert terminal.end() == 0
            return terminal.shown
        finally:
            terminal.close()

    def _download(self, arguments: list[str]) -> str:
        hub: Hub = self._request.getfixturevalue("hub")
        extra = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}
        extra["HF_HOME"] = str(self._cli.home / "hf")
        result = Cli(self._cli.directory, self._cli.home, extra).run(*arguments)
        return result.out.decode() + result.err


@pytest.fixture(scope="module")
def runner(cli: Cli, request: pytest.FixtureRequest) -> Runner:
    return Runner(cli, request)


@pytest.mark.parametrize("block", CONSOLE, ids=named(CONSOLE))
def test_a_console_example_prints_its_output(block: Block, runner: Runner) -> None:
    for command, expected in steps(block):
        typed = [line.removeprefix(">>> ") for line in expected.splitlines() if line.startswith(">>> ")]
        printed = runner.output(command, typed)
        assert matches(expected, printed, varying=block.varying), f"$ {command}\n{printed}"


@pytest.mark.parametrize("block", PYTHON, ids=named(PYTHON))
def test_a_python_example_prints_its_output(block: Block) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, block.name, "exec"), {"__name__": "__example__"})
    assert block.after is not None
    assert block.after.language == "text", "a Python example is followed by its output"
    assert matches(block.after.text, printed.getvalue()), printed.getvalue()


@pytest.mark.parametrize("block", SHELL, ids=named(SHELL))
def test_commands_of_a_shell_example_parse(block: Block, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(cli.home))
    for words in commands(block.text):
        program, *arguments = words[1:] if words[0].endswith("/python") and len(words) > 1 else words
        if program in ("moechat", "scripts/moechat") and arguments != [ANY]:
            assert callable(parse(arguments)), words
        elif program.startswith(("scripts/", ".ci/")):
            require_options(program, arguments)
        else:
            assert program in {"echo", "git", "python3", "-m", "llama/bin/pip"}, f"unknown program in {words}"


def require_options(program: str, arguments: list[str]) -> None:
    """The script exists, and its source has the options; pytest's are not looked at."""
    path = ROOT / program
    assert path.is_file(), program
    if program in ("scripts/test", ".ci/run"):
        return
    sources = [path, *path.parent.glob("*.py")]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    for argument in arguments:
        if argument.startswith("--"):
            # Python programs declare options as strings, shell scripts compare with them.
            shell = rf"(!= {argument} |^\s*{argument}\))"
            named = f'"{argument}"' in text or re.search(shell, text, re.MULTILINE) is not None
            assert named, f"{program} has no option {argument}"


def test_the_settings_of_the_manual_are_accepted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(block.text for block in all_blocks("toml"))
    (cli.home / "config").mkdir(exist_ok=True)
    (cli.home / "config" / "config.toml").write_text(text)
    monkeypatch.setenv("MOECHAT_HOME", str(cli.home))
    try:
        assert tomllib.loads(text).keys() >= {"run", "presets", "remotes"}
        assert callable(parse(["run", "demo"]))
        assert list(check_settings(grammar(), read_settings(user_paths()), {})) == []
    finally:
        (cli.home / "config" / "config.toml").unlink()


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a b\n", "a b\n", True),
        ("a b\n", "a c\n", False),
        ("a …\n", "a c d\n", True),
        ("…\nlast\n", "1\n2\nlast\n", True),
        ("…\nlast\n", "1\n2\n", False),
        ("first\n…\n", "first\n", True),
        ("first\n", "first\nsecond\n", False),
        ("loading    263 ms\n", "loading  1.3 s\n", True),
        ("size  15.1 MiB\n", "size  9 GiB\n", True),
        ("store in /home/me/x\n", "store in /tmp/y/x\n", True),
        ("12 tokens\n", "13 tokens\n", False),
    ],
)
def test_examples_are_compared_with_care(expected: str, printed: str, same: bool) -> None:
    assert matches(expected, printed) is same


def test_all_numbers_of_a_varying_example_are_compared_by_form() -> None:
    assert matches("C 2  39 %  ██░░\n", "C 3  8.5 %  █░░░\n", varying=True)
    assert not matches("C 2  39 %\n", "C 2  39 of\n", varying=True)
