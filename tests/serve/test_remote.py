"""``run --remote``: chat, pipes and prompts files over another server, moechat's own and broken ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from serve_support import PATIENCE_S, ServerProcess, run, serving

from moechat.remote.engine import RemoteEngine

STORY = "Tell me a story about a fox."


def test_an_answer_is_that_of_the_server(demo: ServerProcess) -> None:
    options = ["--temperature", "0", "--max-tokens", "25", "-q"]
    here = run("demo", STORY, *options)
    there = run("default", STORY, "--remote", f"{demo.url}/v1", *options)
    assert (there.returncode, there.stderr) == (0, "")
    assert there.stdout == here.stdout
    variable = run("demo", STORY, *options, MOECHAT_REMOTE=demo.url)
    assert variable.stdout == here.stdout
    text = run("demo", "Once upon a time", "--completion", "--remote", demo.url, *options)
    assert text.stdout == run("demo", "Once upon a time", "--completion", *options).stdout


@pytest.mark.parametrize("remote", [False, True])
def test_values_for_the_chat_template_reach_it_here_and_there(
    tools: ServerProcess, tools_model: Path, remote: bool
) -> None:
    where = ["default", "--remote", tools.url] if remote else [str(tools_model)]
    options = [*where, STORY, "--json", "--max-tokens", "5", "--temperature", "0"]

    def thinks(*more: str, **extra: str) -> bool:
        done = run(*options, *more, **extra)
        assert done.returncode == 0, done.stderr
        return "thinking" in json.loads(done.stdout)

    assert not thinks()
    assert thinks("--think")
    assert thinks("--template-option", "enable_thinking=true")
    assert not thinks("--no-think", "--template-option", "other=1")
    assert thinks(MOECHAT_TEMPLATE_OPTION="enable_thinking=true")
    assert thinks(MOECHAT_THINK="1")


def test_it_starts_without_torch(demo: ServerProcess) -> None:
    code = (
        "import sys; from moechat.cli.main import main\n"
        f"assert main(['run', 'demo', 'hello', '--remote', '{demo.url}', '--max-tokens', '2', '-q']) == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)


def test_json_has_text_reason_and_measurements(demo: ServerProcess) -> None:
    done = run("demo", STORY, "--remote", demo.url, "--json", "--max-tokens", "9", "--stop", "never")
    found = json.loads(done.stdout)
    assert found["model"] == "demo"
    assert found["finish_reason"] == "length"
    assert found["statistics"]["output_tokens"] == 9
    assert found["statistics"]["prompt_tokens"] > 5
    assert found["statistics"]["ttft_s"] > 0


def test_an_answer_follows_a_schema(demo: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["fox", "owl"]}')
    done = run("demo", "An animal?", "--remote", demo.url, "--schema", str(tmp_path / "schema.json"), "-q")
    assert json.loads(done.stdout) in ("fox", "owl")


def test_thinking_is_shown_apart(tools: ServerProcess) -> None:
    engine = RemoteEngine(tools.url)
    messages = [{"role": "user", "content": "x"}]
    steps = engine.generate(messages, max_new_tokens=10, chat_template_kwargs={"enable_thinking": True})  # type: ignore[arg-type]
    text = "".join(step.text for step in steps)
    assert text.startswith("<think>")
    assert text.endswith("</think>")


def test_a_prompts_file_is_answered_in_order_and_side_by_side(demo: ServerProcess, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": STORY, "id": n, "max_tokens": 3 + n % 5, "seed": n} for n in range(20)
    ]
    lines[7] = {"prompt": "word " * 5000, "id": 7}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("demo", "--remote", demo.url, "--jsonl", str(tmp_path / "prompts.jsonl"), "--concurrency", "4")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["id"] for one in found] == list(range(20))
    assert "1024" in found[7]["error"]
    assert [one["statistics"]["output_tokens"] for one in found if "error" not in one] == [
        3 + n % 5 for n in range(20) if n != 7
    ]
    assert done.returncode == 2


def test_ctrl_c_ends_a_prompts_file_at_once(demo: ServerProcess, tmp_path: Path) -> None:
    line = json.dumps({"prompt": STORY, "max_tokens": 900}) + "\n"
    (tmp_path / "prompts.jsonl").write_text(line * 40)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "moechat",
            "run",
            "demo",
            "--remote",
            demo.url,
            "-q",
            "--jsonl",
            "prompts.jsonl",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    while demo.metric("answers_running") == 0:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert time.monotonic() - started < 5
    assert b"Traceback" not in err
    demo.wait_idle()


def test_a_chat_goes_on_over_the_server(demo: ServerProcess, tmp_path: Path) -> None:
    options = ["--temperature", "0", "--max-tokens", "12", "-q"]
    environment = {"MOECHAT_HOME": str(tmp_path)}
    import pexpect

    chat = pexpect.spawn(
        sys.executable,
        ["-m", "moechat", "run", "default", "--remote", demo.url, *options],
        encoding="utf-8",
        timeout=PATIENCE_S,
        dimensions=(40, 120),
        env={**os.environ, **environment, "TERM": "dumb"},
    )
    chat.sendline(STORY)
    chat.expect("Once upon a time")
    chat.sendline("/show")
    chat.expect(demo.url.removeprefix("http://"))
    chat.sendline("/bye")
    chat.expect(pexpect.EOF)
    listed = subprocess.run(
        [sys.executable, "-m", "moechat", "sessions"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )
    assert "fox" in listed.stdout


# ---- keys and errors


def test_the_key_is_sent_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("very-secret-key")
    with serving(tmp_path, "demo", "--api-key-file", str(tmp_path / "key")) as server:
        good = run(
            "demo",
            "hello",
            "--remote",
            server.url,
            "--max-tokens",
            "2",
            "-v",
            MOECHAT_API_KEY="very-secret-key",
        )
        assert good.returncode == 0, good.stderr
        wrong = run("demo", "hello", "--remote", server.url, MOECHAT_API_KEY="very-wrong-key")
        none = run("demo", "hello", "--remote", server.url)
    assert wrong.returncode == none.returncode == 3
    assert "MOECHAT_API_KEY" in none.stderr
    for done in (good, wrong, none):
        assert "secret" not in done.stderr + done.stdout
        assert "wrong-key" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "fact"),
    [
        (["--remote", "http://127.0.0.1:9", "hi"], 5, "127.0.0.1:9"),
        (["--remote", "ftp://x", "hi"], 2, "no URL"),
        (["--remote", "http://user:password@x/", "hi"], 2, "password"),
        (["--remote", "http://x", "--ram", "4G", "hi"], 2, "--ram"),
        (["--remote", "http://x", "--logprobs", "1", "--json", "hi"], 2, "--logprobs"),
        (["--remote", "http://x", "--concurrency", "0", "hi"], 2, "--concurrency"),
    ],
)
def test_wrong_options_and_places_are_named(
    arguments: list[str], status: int, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("default", *arguments)
    assert done.returncode == status, done.stderr
    assert fact in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_model_is_named(demo: ServerProcess) -> None:
    done = run("gpt-9", "hi", "--remote", demo.url)
    assert done.returncode == 3
    assert "demo" in done.stderr
