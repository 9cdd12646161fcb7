"""Starting: what is imported, help, version, usage errors. None of it needs torch."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
from cli_support import PATIENCE_S, PROGRAM, Cli

import moechat

HEAVY = ("torch", "transformers", "numpy", "safetensors", "huggingface_hub", "moechat.engine")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["download", "--help"],
        ["list"],
        ["--show-completion", "bash"],
        ["run", "mixtral", "hello"],
        ["run", "demo", "hello", "--temperature", "nan"],
        ["run"],
    ],
)
def test_nothing_heavy_is_imported(cli: Cli, arguments: list[str]) -> None:
    # The parser needs pydantic for numbers, which costs a fifth of the time of a short command; an answer
    # needs the formats of replies, which cost as much.
    short = "--help" in arguments or "list" in arguments
    heavy = (*HEAVY, "pydantic", "moechat.reply_formats") if short else HEAVY
    script = (
        "import sys\n"
        "from moechat.cli.main import main\n"
        f"main({arguments!r})\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=cli.environment, cwd=cli.directory
    )
    # Where the network is forbidden, a refusal says whether the cache of huggingface_hub has the model.
    allowed = ["[]", "['huggingface_hub']"] if "mixtral" in arguments else ["[]"]
    assert done.stderr.splitlines()[-1] in allowed


@pytest.mark.parametrize(
    "words",
    ["moechat\nrun\n", "moechat\nrun\ndemo\n--temperature\n0.5\n--sys", "moechat\nsessions\nexport\n"],
)
def test_a_completion_imports_nothing_heavy(cli: Cli, words: str) -> None:
    script = (
        "import sys\n"
        "from moechat.cli.main import main\n"
        "main([])\n"
        f"print([name for name in {(*HEAVY, 'pydantic')!r} if name in sys.modules], file=sys.stderr)\n"
    )
    asked = {"_MOECHAT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count("\n"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=cli.environment | asked,
        cwd=cli.directory,
    )
    assert done.stderr.splitlines()[-1] == "[]"
    assert ("--system" in done.stdout.split()) == ("--sys" in words)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["download", "--help"], ["list"], ["list", "--json"], []]
)
def test_frequent_commands_cost_little_processor_time(cli: Cli, tmp_path: Path, arguments: list[str]) -> None:
    """Without arguments: what the shell asks to complete a name."""
    for number in range(50):
        store = tmp_path / "home" / "data" / "models" / f"org--name{number}-4bit"
        store.mkdir(parents=True)
        files = ", ".join(f'"layer{layer}": {{"bytes": 4096}}' for layer in range(100))
        (store / "manifest.json").write_text(
            f'{{"source": {{"name": "org/name{number}", "revision": "0123"}}, "model_type": "olmoe", '
            f'"geometry": {{"bits": 4}}, "files": {{{files}}}}}'
        )
    completion = {
        "_MOECHAT_COMPLETE": "complete_bash",
        "COMP_WORDS": "moechat\nrun\norg/name4",
        "COMP_CWORD": "2",
    }
    asking = replace(cli, home=tmp_path / "home", extra={} if arguments else completion)

    def seconds(run: Callable[[], object]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def ours() -> None:
        result = asking.run(*arguments)
        assert result.status == 0
        assert result.out

    def parser_alone() -> None:
        subprocess.run([sys.executable, "-c", "import typer.main, rich.console"], check=True)

    # Processor time beside that of importing the parser, in turns, and the least of five: the clock on the
    # wall measures other processes too, and shared cores have slow hours. 1.2 to 2.2 where this was written,
    # where the parser takes 0.10 s and the promise is 0.3. Importing torch would make it 20.
    ratios = [seconds(ours) / seconds(parser_alone) for _ in range(5)]
    assert min(ratios) < 3


def test_version_prints_the_version_of_the_package(cli: Cli) -> None:
    result = cli.run("--version")
    assert (result.status, result.out, result.err) == (0, f"moechat {moechat.__version__}\n".encode(), "")


def test_help_lists_exactly_the_working_options(cli: Cli) -> None:
    text = cli.run("run", "--help").out.decode()
    # Descriptions name options too, with a colon behind them.
    offered = {word.rstrip(":,") for word in text.replace("│", " ").split() if word.startswith("--")}
    wanted = (
        "activation-bits bits completion concurrency continue ctx dense-bits deterministic device "
        "draft-tokens dry-run dtype file grammar help hide-thinking json jsonl kv-bits logprobs "
        "max-tokens min-p no-daemon no-save no-think no-tune prompt-cache quiet ram raw remote "
        "repetition-penalty schema seed session stats stop system system-prompt temperature "
        "template-option think threads top-k top-p tune verbose vram watch yes"
    )
    assert offered == {f"--{name}" for name in wanted.split()}


COMMANDS = """
run serve ps stop bench compare plan profile simulate trace tune count doctor download list show rm sessions
config
"""


@pytest.mark.parametrize("command", ["", *COMMANDS.split()])
def test_every_help_shows_examples_and_no_type_where_there_is_no_value(cli: Cli, command: str) -> None:
    words = command.split()
    text = cli.run(*words, "--help").out.decode()
    assert f"moechat {command}" in text.partition("Usage: ")[2].partition("--help")[2]
    assert "<bool>" not in text
    assert "[@revision]" in text or command not in ("run", "download")


def test_the_installed_command_is_the_same_program(cli: Cli) -> None:
    command = Path(sys.executable).with_name("moechat")
    if not command.exists():
        pytest.skip("the package is not installed here")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, env=cli.environment)
    assert done.stdout == f"moechat {moechat.__version__}\n"


def test_a_missing_command_shows_the_help_and_is_a_usage_error(cli: Cli) -> None:
    result = cli.run()
    assert result.status == 2
    assert b"Usage: moechat" in result.out
    assert result.err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["run"], "MODEL"),
        (["run", "demo", "one", "two"], "two"),
        (["run", "demo", "hi", "--bits", "many"], "--bits"),
        (["run", "demo", "hi", "--bits", "5"], "--bits is 5"),
        (["run", "demo", "hi", "--device", "gpu"], "choose one of: cpu, cuda, cuda:N"),
        (["run", "demo", "hi", "--device", "cuda:x"], "--device is 'cuda:x'"),
        (["run", "demo", "hi", "--device", "cpu", "--vram", "2G"], "--vram needs a GPU"),
        (["run", "demo", "hi", "--vram", "0"], "--vram is 0"),
        (["run", "demo", "hi", "--dtype", "int8"], "--dtype is 'int8'"),
        (
            ["run", "demo", "hi", "--temperature", "-0.1"],
            "--temperature is -0.1; it must be at least 0 and at most 100",
        ),
        (["run", "demo", "hi", "--temperature", "nan"], "--temperature is nan"),
        (["run", "demo", "hi", "--top-p", "0"], "--top-p is 0.0; it must be above 0 and at most 1"),
        (["run", "demo", "hi", "--top-k", "-1"], "--top-k is -1"),
        (["run", "demo", "hi", "--min-p", "1.1"], "--min-p is 1.1"),
        (["run", "demo", "hi", "--repetition-penalty", "inf"], "--repetition-penalty is inf"),
        (["run", "demo", "hi", "--seed", "-1"], "--seed is -1"),
        (["run", "demo", "hi", "--ctx", "1"], "--ctx is 1"),
        (["run", "demo", "hi", "--ram", "much"], "'much' is not a size"),
        (["run", "demo", "hi", "--ram", "0"], "--ram is 0"),
        (["run", "demo", "hi", "--system", "magic"], "--system is 'magic'"),
        (["run", "demo", "hi", "--max-tokens", "0"], "--max-tokens is 0"),
        (["run", "demo", "hi", "--threads", "0"], "--threads is 0"),
        (["run", "demo", "hi", "--dense-bits", "5"], "--dense-bits is 5"),
        (["run", "demo", "hi", "--activation-bits", "4"], "--activation-bits is 4"),
        (["plan", "demo", "--dense-bits", "2"], "--dense-bits is 2"),
        (["run", "demo", "hi", "--kv-bits", "4"], "--kv-bits is 4"),
        (["run", "demo", "hi", "--completion", "--system-prompt", "x"], "--system-prompt"),
        (["run", "demo", "hi", "-q", "-v"], "exclude each other"),
    ],
)
def test_usage_errors_name_the_wrong_argument(cli: Cli, arguments: list[str], said: str) -> None:
    result = cli.run(*arguments)
    assert (result.status, result.out) == (2, b"")
    assert result.err.startswith("error: ")
    assert said in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run", "demo", "--temp", "1"], "did you mean --temperature or --template-option?"),
        (["run", "demo", "--temprature=1"], "did you mean --temperature or --template-option?"),
        (["run", "demo", "--max_tokens", "1"], "did you mean --max-tokens?"),
        (["run", "demo", "--no-t"], "did you mean --no-think or --no-tune?"),
        (["run", "demo", "--top", "1"], "did you mean --top-k or --top-p?"),
        (["run", "demo", "--xyzzy"], "moechat run --help lists its options"),
        (["sessions", "export", "1", "--form", "md"], "did you mean --format?"),
        (["list", "-x"], "moechat list --help lists its options"),
    ],
)
def test_an_unknown_option_suggests_those_that_begin_or_look_like_it(
    cli: Cli, arguments: list[str], hint: str
) -> None:
    result = cli.call(*arguments)
    assert result.status == 2
    assert "has no option -" in result.err
    assert f"hint: {hint}" in result.err


def test_arguments_that_are_not_utf8_are_refused(cli: Cli) -> None:
    done = subprocess.run(
        [os.fsencode(part) for part in PROGRAM] + [b"run", b"demo", b"caf\xe9"],
        env=cli.environment,
        cwd=cli.directory,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert b"the prompt is not UTF-8 (character 4)" in done.stderr


def test_an_unknown_model_is_reported_before_stdin_is_read(cli: Cli) -> None:
    process = cli.start("run", "mixtrall", stdin=subprocess.PIPE)
    assert process.wait(timeout=30) == 3  # stdin is still open
    _, err = process.communicate()
    assert err == b"error: there is no model 'mixtrall'\nhint: did you mean mixtral?\n"


def test_an_early_interrupt_shows_no_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moechat.cli.main._prepare_standard_streams", interrupted)
    result = cli.call("--version")
    assert (result.status, result.out, result.err) == (130, b"", "")


def test_a_home_that_cannot_be_created_is_reported_with_a_hint(cli: Cli, model: str) -> None:
    result = Cli(cli.directory, Path("/proc/nobody")).call("run", model, "hi", "--bits", "8")
    assert (result.status, result.out) == (9, b"")
    assert "error: converting failed at /proc/nobody" in result.err
    assert "hint: set MOECHAT_HOME to a directory that can be written to" in result.err


def test_a_traceback_is_shown_only_with_debug(cli: Cli) -> None:
    result = Cli(cli.directory, cli.home, {"MOECHAT_DEBUG": "1"}).run("run", "mixtrall", "hi")
    assert result.status == 3
    assert "Traceback" in result.err
    assert "Error: there is no model 'mixtrall'" in result.err
    assert result.err.endswith("hint: did you mean mixtral?\n")


def test_control_characters_in_names_do_not_reach_the_terminal(cli: Cli) -> None:
    result = cli.run("run", "./\x1b]0;title\x07", "hi")
    assert result.status == 3
    assert "\x1b" not in result.err
    assert "\x07" not in result.err


def test_colours_appear_only_on_terminals_that_allow_them(cli: Cli) -> None:
    def shown(**extra: str) -> str:
        session = Cli(cli.directory, cli.home, extra).terminal("run", "mixtrall", "hi")
        text: str = session.read()
        session.close()
        assert session.exitstatus == 3
        return text

    assert "\x1b[" in shown()
    assert shown(NO_COLOR="1").replace("\x1b[1m", "").replace("\x1b[0m", "").count("\x1b[3") == 0
    assert "\x1b" not in shown(TERM="dumb")
    assert "\x1b" not in cli.run("run", "mixtrall", "hi").err


def test_an_unsupported_instruction_set_is_refused(cli: Cli) -> None:
    done = subprocess.run(
        [*PROGRAM, "run", "demo", "hello"],
        env={**cli.environment, "MOECHAT_ISA": "sse9"},
        cwd=cli.directory,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "MOECHAT_ISA=sse9 is not an instruction set" in done.stderr
    assert "unset MOECHAT_ISA" in done.stderr


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 0), ("SIGTERM", -signal.SIGTERM)])
def test_signals_while_the_interpreter_ends_leave_no_traceback(cli: Cli, number: str, status: int) -> None:
    script = (
        "import os, signal, sys\n"
        "from moechat.cli.main import main\n"
        "status = main()\n"
        f"os.kill(os.getpid(), signal.{number})\n"
        "sys.exit(status)\n"
    )
    command = [sys.executable, "-c", script, "--version"]
    done = subprocess.run(command, capture_output=True, env=cli.environment, cwd=cli.directory)
    assert (done.returncode, done.stderr) == (status, b"")
    assert moechat.__version__.encode() in done.stdout


def test_the_process_ends_after_threads_and_cleaning_up_but_frees_no_objects(cli: Cli) -> None:
    script = (
        "import atexit, sys, threading, time\n"
        "from moechat.cli.main import main\n"
        "class Freed:\n"
        "    def __del__(self):\n"
        "        print('freed', flush=True)\n"
        "kept = Freed()\n"
        "status = main()\n"
        "atexit.register(print, 'cleaned up')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "sys.exit(status)\n"
    )
    for arguments, status in ((["--version"], 0), (["--no-such-option"], 2)):
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, capture_output=True, env=cli.environment, cwd=cli.directory, text=True)
        assert done.returncode == status
        assert done.stdout.splitlines()[-2:] == ["thread", "cleaned up"]


every_signal = pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)


def ended(cli: Cli, script: str) -> tuple[int, bytes]:
    """Exit status and messages of a script that runs the command in a way of its own."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, env=cli.environment, cwd=cli.directory, timeout=60)
    return done.returncode, done.stderr


@every_signal
def test_a_signal_while_a_class_is_made_keeps_its_status(
    cli: Cli, number: signal.Signals, status: int
) -> None:
    script = (
        "import os, sys\n"
        "from moechat.cli import app, main\n"
        "class Part:\n"
        "    def __set_name__(self, owner, name):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        for _ in range(1000): pass\n"
        "def command():\n"
        "    type('Whole', (), {'part': Part()})\n"
        "    return 0\n"
        "app.parse = lambda _: command\n"
        "sys.exit(main.main())\n"
    )
    assert ended(cli, script) == (status, b"")


@every_signal
def test_a_signal_while_an_error_is_reported_keeps_its_status(
    cli: Cli, number: signal.Signals, status: int
) -> None:
    script = (
        "import os, sys\n"
        "from moechat.cli import app, main\n"
        "from moechat.errors import MoechatError\n"
        "class Late(MoechatError):\n"
        "    def __str__(self):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        for _ in range(1000): pass\n"
        "        return 'too late'\n"
        "def command():\n"
        "    raise Late('')\n"
        "app.parse = lambda _: command\n"
        "sys.exit(main.main())\n"
    )
    assert ended(cli, script) == (status, b"")


@every_signal
def test_a_signal_at_the_very_end_keeps_its_status(cli: Cli, number: signal.Signals, status: int) -> None:
    script = (
        "import os, sys\n"
        "from moechat.cli import app, main\n"
        "last = main._stop_handling_signals\n"
        "def late():\n"
        "    main._stop_handling_signals = last\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    for _ in range(1000): pass\n"
        "    last()\n"
        "main._stop_handling_signals = late\n"
        "app.parse = lambda _: lambda: 0\n"
        "sys.exit(main.main())\n"
    )
    assert ended(cli, script) == (status, b"")


@every_signal
def test_a_signal_during_a_finaliser_is_not_lost(cli: Cli, number: signal.Signals, status: int) -> None:
    script = (
        "import os, sys, time\n"
        "from moechat.cli import app, main\n"
        "class Freed:\n"
        "    def __del__(self):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        for _ in range(1000): pass\n"
        "def command():\n"
        "    del sys.modules['freed'].it\n"
        "    time.sleep(20)\n"
        "    return 0\n"
        "freed = sys.modules['freed'] = type(sys)('freed')\n"
        "freed.it = Freed()\n"
        "app.parse = lambda _: command\n"
        "sys.exit(main.main())\n"
    )
    assert ended(cli, script) == (status, b"")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_while_libraries_are_imported_end_the_program_soon_and_silently(
    cli: Cli, number: signal.Signals, status: int
) -> None:
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3):
        process = cli.start("run", "demo", "hello")
        maps = Path(f"/proc/{process.pid}/maps")
        while "torch" not in maps.read_text():
            assert process.poll() is None
        time.sleep(delay_s)
        process.send_signal(number)
        assert (*process.communicate(timeout=PATIENCE_S), process.returncode) == (b"", b"", status)


def test_an_interrupt_while_libraries_are_imported_shows_the_cursor_again(cli: Cli) -> None:
    terminal = cli.terminal("run", "demo", "hello")
    terminal.expect_exact("loading")
    terminal.kill(signal.SIGINT)
    terminal.expect_exact("\x1b[?25h")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
