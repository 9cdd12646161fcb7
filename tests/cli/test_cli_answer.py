"""One answer from a real model: pipes, signals, exit statuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_support import PATIENCE_S, Cli
from gguf.constants import GGMLQuantizationType as Kind
from gguf_support import save_model, tensors_of, write_gguf

from moechat.cli.terminal.consoles import neutralise

GREEDY = ["--temperature", "0"]


def answer_json(cli: Cli, *arguments: str, stdin: bytes = b"") -> dict[str, Any]:
    result = cli.call("run", *arguments, "--json", "-q", stdin=stdin)
    assert (result.status, result.err) == (0, "")
    assert result.out.count(b"\n") == 1
    parsed: dict[str, Any] = json.loads(result.out)
    return parsed


def test_stdout_is_the_answer_and_nothing_else(cli: Cli, model: str) -> None:
    options = [model, "hello", "--max-tokens", "60", *GREEDY]
    answer = answer_json(cli, *options)
    assert answer["model"] == "tiny-chat"
    assert answer["finish_reason"] == "length"
    assert len(answer["tokens"]) == 60
    assert answer["statistics"]["output_tokens"] == 60
    assert answer["statistics"]["ttft_s"] > 0
    plain = cli.call("run", *options, "--stats", "-v")
    assert plain.status == 0
    assert plain.out.decode() == answer["text"] + "\n"
    for said in ("(cut off after 60 tokens)", "time to first token", "expert layers", "answer tokens"):
        assert said in plain.err
    assert "\x1b" not in plain.err


def test_stdin_and_argument_are_joined_into_one_prompt(cli: Cli, model: str) -> None:
    options = ["--max-tokens", "24", *GREEDY, "--completion"]
    whole = answer_json(cli, model, "some text\n\nand a question", *options)
    parts = answer_json(cli, model, "and a question", *options, stdin=b"some text\n")
    dash = answer_json(cli, model, "-", *options, stdin=b"some text\n\nand a question\n")
    assert whole["text"] == parts["text"] == dash["text"]
    # A byte a token: without the template nothing is added to the text.
    assert whole["statistics"]["prompt_tokens"] == len("some text\n\nand a question")


def test_chat_prompts_include_the_template_and_the_system_prompt(cli: Cli, model: str) -> None:
    plain = answer_json(cli, model, "hello", "--max-tokens", "1", *GREEDY)
    answer = answer_json(cli, model, "hello", "--max-tokens", "1", *GREEDY, "--system-prompt", "Be brief.")
    assert plain["statistics"]["prompt_tokens"] > len("hello")
    assert answer["statistics"]["prompt_tokens"] >= plain["statistics"]["prompt_tokens"] + len("Be brief.")


def test_the_same_seed_gives_the_same_answer(cli: Cli, model: str) -> None:
    options = [
        model,
        "hello",
        "--max-tokens",
        "40",
        "--temperature",
        "1.5",
        "--top-k",
        "100",
        "--top-p",
        "0.99",
    ]
    first = answer_json(cli, *options, "--seed", "7")
    assert first["statistics"]["seed"] == 7
    assert answer_json(cli, *options, "--seed", "7")["tokens"] == first["tokens"]
    assert answer_json(cli, *options, "--seed", "8")["tokens"] != first["tokens"]


def test_a_closed_pipe_ends_the_command_quietly(cli: Cli, model: str) -> None:
    result = cli.shell(f"$M run '{model}' hello -q --temperature 0 </dev/null | head -c 20", forked=True)
    assert (result.status, len(result.out), result.err) == (0, 20, "")


@pytest.mark.parametrize(
    "arguments",
    [
        "run '{model}' hello -q --temperature 0",
        "run '{model}' hello --json",
        "list --json",
        "plan demo",
        "help",
        "run --help",
        "--help",
        "--version",
    ],
)
def test_output_that_nobody_can_read_is_an_error(cli: Cli, model: str, arguments: str) -> None:
    started = {"forked": arguments.startswith(("run '", "plan"))}
    result = cli.shell(f"$M {arguments.format(model=model)} </dev/null >&-", **started)
    assert result.status == 1
    assert "error: the output cannot be written: standard output is closed\n" in result.err


def test_a_command_without_output_needs_no_stdout(cli: Cli) -> None:
    result = cli.shell("MOECHAT_HOME=$PWD/empty $M rm --leftovers --yes </dev/null >&-")
    assert result.status == 0
    assert "there are no leftovers" in result.err


@pytest.mark.parametrize("arguments", ["--version", "help", "list --json"])
def test_a_full_disk_is_reported_for_short_output_too(cli: Cli, arguments: str) -> None:
    result = cli.shell(f"$M {arguments} >/dev/full")
    assert result.status == 1
    assert "error: the output cannot be written: No space left on device\n" in result.err


def test_a_closed_stderr_pipe_does_not_lose_the_answer(cli: Cli, model: str) -> None:
    script = f"$M run '{model}' hello -v --stats --max-tokens 9 --temperature 0 </dev/null 2> >(exec true)"
    result = cli.shell(script, forked=True)
    assert result.status == 0
    assert result.out.endswith(b"\n")


def test_closed_stdin_and_stderr_are_tolerated(cli: Cli, model: str) -> None:
    result = cli.shell(f"$M run '{model}' hello -v --stats --max-tokens 3 --temperature 0 <&- 2>&-")
    assert result.status == 0
    assert result.out.endswith(b"\n")


def test_a_full_disk_is_reported(cli: Cli, model: str) -> None:
    result = cli.shell(
        f"$M run '{model}' hello -q --max-tokens 9 --temperature 0 </dev/null >/dev/full", forked=True
    )
    assert result.status == 1
    assert result.err.startswith("error: the output cannot be written: No space left on device\n")


def test_empty_stdin_without_a_prompt_is_a_usage_error(cli: Cli, model: str) -> None:
    result = cli.call("run", model)
    assert (result.status, result.out) == (2, b"")
    assert result.err == "error: the prompt is empty\nhint: give a prompt as an argument or on stdin\n"


def test_stdin_that_is_not_utf8_is_a_usage_error(cli: Cli, model: str) -> None:
    result = cli.call("run", model, stdin=b"ab\xff")
    assert (result.status, result.out) == (2, b"")
    assert "stdin is not UTF-8: byte 0xff at offset 2" in result.err


PICTURES = {
    "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "JPEG": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "GIF": b"GIF89a\1\0\1\0\x80",
    "WebP": b"RIFF\x24\0\0\0WEBPVP8 ",
}


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_is_named_as_such(cli: Cli, model: str, tmp_path: Path, kind: str) -> None:
    picture = tmp_path / "cat"
    picture.write_bytes(PICTURES[kind])
    hint = "hint: give a text file, or describe the picture in the prompt\n"
    result = cli.call("run", model, "hello", "--file", str(picture))
    assert (result.status, result.out) == (2, b"")
    assert result.err == f"error: {picture} is a picture ({kind}); models read text only here\n{hint}"
    result = cli.call("run", model, "hello", stdin=PICTURES[kind])
    assert (result.status, result.out) == (2, b"")
    assert result.err == f"error: stdin is a picture ({kind}); models read text only here\n{hint}"


def test_a_pdf_file_is_named_as_such(cli: Cli, model: str) -> None:
    result = cli.call("run", model, stdin=b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    assert (result.status, result.out) == (2, b"")
    assert result.err.startswith(
        "error: stdin is a PDF file; models read text only here\nhint: extract its text"
    )


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(cli: Cli, model: str) -> None:
    result = cli.call("run", model, "--completion", "--ctx", "100", stdin=b"x" * 150)
    assert (result.status, result.out) == (2, b"")
    assert "150 tokens" in result.err
    assert "100" in result.err


def test_a_dry_run_shows_what_plan_shows_and_loads_nothing(cli: Cli) -> None:
    dry = cli.call("run", "demo", "hello", "--dry-run", "--ctx", "100", "--json")
    planned = cli.call("plan", "demo", "--ctx", "100", "--json")
    assert (dry.status, dry.err) == (0, "")
    dry_facts, planned_facts = json.loads(dry.out), json.loads(planned.out)
    assert dry_facts["context"] == planned_facts["context"]
    assert dry_facts.keys() == planned_facts.keys()
    absent = cli.call("run", "org/absent", "--dry-run")
    assert (absent.status, absent.out) == (5, b"")  # it would be downloaded, and there is no network


def test_a_prompt_of_megabytes_is_refused_after_tokenizing_its_beginning(cli: Cli, model: str) -> None:
    result = cli.call("run", model, "--completion", "--ctx", "100", stdin=b"x" * 8_000_000)
    assert (result.status, result.out) == (2, b"")
    assert "8,000,000 characters, the first 65,536 of them more than" in result.err
    assert "the context holds 100" in result.err


def test_a_context_longer_than_the_models_is_refused(cli: Cli, model: str) -> None:
    result = cli.call("run", model, "hello", "--ctx", "8193")
    assert (result.status, result.out) == (4, b"")
    assert "8193" in result.err
    assert "8192" in result.err


def test_a_budget_too_small_is_refused_and_a_working_one_is_named(cli: Cli, model: str) -> None:
    refused = cli.call("run", model, "hello", "--ram", "64M", "--ctx", "300")
    assert (refused.status, refused.out) == (4, b"")
    assert "the memory budget is 64 MiB" in refused.err
    for part in ("process", "dense weights", "attention cache", "workspace", "margin", "experts"):
        assert part in refused.err
    least = re.search(r"at least (\d+M) with --ram", refused.err)
    assert least is not None
    # This process grows a little between the two.
    budget = f"{int(least[1][:-1]) + 64}M"
    options = ["--ctx", "300", "--system", "moepic", "--max-tokens", "2", "--stats", "-v"]
    answered = cli.call("run", model, "hello", "--ram", budget, *options)
    assert answered.status == 0
    assert "memory budget" in answered.err
    assert "memory attention cache bytes" in answered.err


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_an_answer_and_keeps_its_text(
    cli: Cli, model: str, number: signal.Signals, status: int
) -> None:
    process = cli.start("run", model, "hello", "-q", *GREEDY, forked=True)
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 16)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (status, b"")
    text = (first + out).decode()
    assert text.endswith("\n")
    count = str(len(text.rstrip("\n")))
    whole = answer_json(cli, model, "hello", *GREEDY, "--max-tokens", str(4 * int(count) + 16))["text"]
    assert whole.startswith(text.rstrip("\n"))


def test_the_error_for_a_damaged_store_names_the_file(cli: Cli, model: str, tmp_path: Path) -> None:
    store = next((cli.home / "data" / "models").iterdir())
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    experts = next(copy.glob("experts-*.safetensors"))
    data = bytearray(experts.read_bytes())
    data[-5000] ^= 1
    experts.write_bytes(data)
    result = cli.call("run", str(copy), "hello")
    assert (result.status, result.out) == (6, b"")
    assert experts.name in result.err
    with experts.open("r+b") as file:
        file.truncate(len(data) - 1)
    result = cli.call("run", str(copy), "hello")
    assert result.status == 6
    assert experts.name in result.err


def test_a_model_without_a_chat_template_only_completes_texts(cli: Cli, model: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("chat_template*"))
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    result = cli.call("run", str(bare), "hello", "--bits", "16")
    assert (result.status, result.out) == (2, b"")
    assert "has no chat template" in result.err
    assert f'moechat run {bare} --completion "' in result.err
    answer = answer_json(
        cli, str(bare), "hello", "--bits", "16", "--completion", "--max-tokens", "2", *GREEDY
    )
    assert len(answer["tokens"]) == 2


def test_a_gguf_file_without_a_vocabulary_is_refused_before_it_is_converted(cli: Cli, tmp_path: Path) -> None:
    config = save_model("olmoe", tmp_path / "source", num_hidden_layers=1)
    write_gguf("olmoe", config, tensors_of(tmp_path / "source"), tmp_path / "m.gguf", lambda *_: Kind.Q8_0)
    stores = list((cli.home / "data").glob("models/*"))
    for options in ([], ["--completion"]):
        result = cli.call("run", str(tmp_path / "m.gguf"), "hello", *options)
        assert (result.status, result.out) == (2, b"")
        assert "m.gguf has no tokenizer" in result.err
        assert "convert" not in result.err
    assert list((cli.home / "data").glob("models/*")) == stores


def test_a_model_without_a_tokenizer_is_refused_before_it_is_converted(
    cli: Cli, model: str, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*", "vocab*"))
    stores = sorted((cli.home / "data").glob("models/*"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello")
    for arguments in (
        ["run", str(bare), "hello"],
        ["run", str(bare), "hello", "--completion"],
        ["trace", str(bare), "--prompts", str(prompts), "--out", str(tmp_path / "t.npz")],
    ):
        result = cli.call(*arguments)
        assert (result.status, result.out) == (2, b"")
        assert f"error: {bare} has no tokenizer" in result.err
        assert "tokenizer.json" in result.err
        assert "chat template" not in result.err
    assert sorted((cli.home / "data").glob("models/*")) == stores


def test_files_are_sent_before_the_prompt(cli: Cli, tmp_path: Path) -> None:
    notes, plan = tmp_path / "notes of today.txt", tmp_path / "plan.md"
    notes.write_text("milk\n")
    plan.write_text("buy ```it```")
    options = ["--max-tokens", "3", *GREEDY]
    question = "notes of today.txt:\n```\nmilk\n```\n\nplan.md:\n````\nbuy ```it```\n````\n\nWhat is missing?"
    wanted = answer_json(cli, "demo", question, *options)
    given = answer_json(cli, "demo", "-f", str(notes), "--file", str(plan), "What is missing?", *options)
    assert given["tokens"] == wanted["tokens"]
    assert given["statistics"]["prompt_tokens"] == wanted["statistics"]["prompt_tokens"]
    piped = answer_json(cli, "demo", "-f", str(notes), *options, stdin=b"What?")
    assert piped["statistics"]["prompt_tokens"] < wanted["statistics"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["-f", "nowhere.txt", "hi"], "nowhere.txt cannot be read: No such file"),
        (["-f", ".", "hi"], "is not a file"),
        (["-f", "n.txt", "hi", "--completion"], "--completion continues a text"),
        (["-f", "n.txt", "--jsonl", "-"], "it excludes --file"),
    ],
)
def test_files_that_cannot_be_sent_are_refused_before_the_model_is_loaded(
    cli: Cli, more: list[str], said: str
) -> None:
    result = cli.call("run", "demo", *more)
    assert (result.status, result.out) == (2, b"")
    assert said in result.err


def test_control_characters_of_the_model_are_escaped_on_a_terminal(cli: Cli, model: str) -> None:
    options = [model, "hello", "--max-tokens", "200", *GREEDY]
    text = answer_json(cli, *options)["text"]
    assert any(ord(character) < 32 and character not in "\n\t" for character in text)
    session = cli.terminal("run", *options, "-q", "--raw", forked=True)
    shown = session.read()
    session.close()
    assert session.exitstatus == 0
    assert shown.replace("\r\n", "\n").removesuffix("\n") == neutralise(text).removesuffix("\n")


def test_json_on_a_terminal_is_plain_ascii(cli: Cli, model: str) -> None:
    options = ("--max-tokens", "100", "--json", "-q", *GREEDY)
    session = cli.terminal("run", model, "hello", *options, forked=True)
    shown = session.read().strip()
    session.close()
    assert shown.isascii()
    assert shown.isprintable()
    assert len(json.loads(shown)["tokens"]) == 100
