"""``moechat run`` where a server of the same user has the model in memory."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_support import PATIENCE_S, ServerProcess, run, serving

import moechat
from moechat import Engine, Grammar, PromptTooLongError, UsageError
from moechat.chat.chat_options import Generation
from moechat.chat.pending_reply import start_reply
from moechat.errors import ModelNotFoundError, NoModelError
from moechat.history.conversation import Conversation, Turn
from moechat.remote.server_engine import ServerEngine, ask_server
from moechat.serve.private_socket import private_socket
from moechat.serve.registry import running_servers

STORY = "Tell me a story about a fox."
GREEDY = ["--temperature", "0", "--max-tokens", "12"]
ANSWERS = "has demo in memory and answers"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("home")
        patch.setenv("MOECHAT_HOME", str(directory))
        patch.delenv("MOECHAT_NO_DAEMON")
        yield directory


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ServerProcess]:
    with serving(home, "demo") as found:
        yield found


@pytest.fixture(scope="module")
def there(server: ServerProcess) -> Iterator[ServerEngine]:
    path = running_servers()[0].socket
    facts = ask_server(path)
    assert facts is not None
    engine = ServerEngine(path, facts)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def here(home: Path) -> Iterator[Engine]:
    with moechat.load("demo") as engine:
        yield engine


def test_the_answer_is_that_of_a_model_loaded_here(server: ServerProcess) -> None:
    asked = ["demo", STORY, *GREEDY, "--json", "--logprobs", "2"]
    shared, own = run(*asked), run(*asked, "--no-daemon")
    assert (shared.returncode, own.returncode) == (0, 0)
    found, wanted = json.loads(shared.stdout), json.loads(own.stdout)
    assert found.keys() == wanted.keys()
    assert found["statistics"].keys() == wanted["statistics"].keys()
    for key in ("model", "text", "tokens", "logprobs", "finish_reason"):
        assert found[key] == wanted[key]
    # The answer came from the server: it counted it, and it has loaded the model long before.
    assert server.metric("answers_running") == 0
    assert found["statistics"]["peak_rss_bytes"] != wanted["statistics"]["peak_rss_bytes"]


@pytest.mark.parametrize("form", ["", "schema", "grammar"])
def test_it_starts_without_torch(server: ServerProcess, tmp_path: Path, form: str) -> None:
    rules = tmp_path / "rules"
    rules.write_text('start: "a"' if form == "grammar" else '{"enum": ["a"]}')
    given = f", '--{form}', {str(rules)!r}" if form else ""
    code = (
        "import sys; from moechat.cli.main import main\n"
        f"assert main(['run', 'demo', 'hello', '--max-tokens', '2', '-q'{given}]) == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)


def test_verbose_says_which_server_answers(server: ServerProcess) -> None:
    done = run("demo", "hi", *GREEDY, "-v")
    assert f"number {server.process.pid} {ANSWERS}" in done.stderr
    assert "memory budget bytes" in done.stderr


@pytest.mark.parametrize("other", [["--ctx", "512"], ["--ram", "2G"], ["--no-daemon"], ["--tune"]])
def test_a_model_with_other_options_is_loaded_here(server: ServerProcess, other: list[str]) -> None:
    done = run("demo", "hi", *GREEDY, "-v", *other)
    assert done.returncode == 0
    assert ANSWERS not in done.stderr


def test_the_options_of_the_server_are_its_own_where_they_are_the_same(home: Path) -> None:
    with serving(home, "demo", "--ctx", "256"):
        assert ANSWERS in run("demo", "hi", *GREEDY, "-v", "--ctx", "256").stderr
        assert ANSWERS not in run("demo", "hi", *GREEDY, "-v", "--ctx", "255").stderr


def test_errors_are_those_of_the_engine(server: ServerProcess) -> None:
    long = "word " * 3000
    shared, own = run("demo", "-", stdin=long), run("demo", "-", "--no-daemon", stdin=long)
    assert (shared.returncode, shared.stderr) == (own.returncode, own.stderr)
    assert shared.returncode == 2


def test_a_pipe_that_closes_ends_the_answer(server: ServerProcess) -> None:
    command = f"{sys.executable} -m moechat run demo '{STORY}' --max-tokens 800 -q --raw | head -c 5"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
    )
    assert len(done.stdout) == 5
    assert done.stderr == b""
    server.wait_idle()


def test_ctrl_c_ends_the_answer_and_the_server_goes_on(server: ServerProcess) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "moechat", "run", "demo", STORY, "--max-tokens", "900", "--seed", "1", "-q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    server.wait_idle()
    assert run("demo", "hi", *GREEDY).returncode == 0


def test_a_server_that_was_killed_is_no_obstacle(home: Path) -> None:
    log = home / "killed.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "moechat", "serve", "demo", "--port", "0"],
            stdin=subprocess.DEVNULL,
            stderr=file,
        )
    while b"listening" not in log.read_bytes():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert run("demo", "hi", *GREEDY).returncode == 0


def test_what_the_engine_tells_is_told_by_the_server(there: ServerEngine, here: Engine) -> None:
    messages = [{"role": "user", "content": "Who are you, 狐?"}]
    assert there.encode(messages) == here.encode(messages)
    assert there.encode("Once upon") == here.encode("Once upon")
    for token in range(0, here.decoder.vocabulary, 97):
        assert there.token_text(token) == here.token_text(token)
        assert there.token_bytes(token) == here.token_bytes(token)
    assert (there.name, there.context_length) == (here.name, here.context_length)
    assert there.has_chat_template
    assert there.describe().to_json().keys() == here.describe().to_json().keys()
    wanted = here.describe().rows(lambda size: f"{size / 1024:.0f} KiB")
    found = there.describe().rows(lambda size: f"{size / 1024:.0f} KiB")
    assert [name for name, _ in found] == [name for name, _ in wanted]
    assert there.expert_map().places == here.expert_map().places
    assert there.expert_map().counts() == here.expert_map().counts()
    changed = there.sampling.override(temperature=0.5, top_k=None)
    assert vars(changed) == vars(here.sampling.override(temperature=0.5))
    assert there.notices() == []


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 5},
        {"stop": "the", "max_new_tokens": 40},
        {"logit_bias": {20: 3.5}, "presence_penalty": 0.5},
        {"grammar": Grammar.json_schema({"enum": ["fox", "owl"]})},
    ],
)
def test_answers_have_the_same_steps(there: ServerEngine, here: Engine, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 10, "temperature": 0.0, **options}
    progress: list[tuple[int, int]] = []
    tokens = here.encode([{"role": "user", "content": STORY}])
    here.drop_prompt_cache()
    wanted = list(here.generate(tokens, **options))
    found = list(there.generate(tokens, progress=lambda *done: progress.append(done), **options))
    assert found == wanted
    assert there.stats.output_tokens == here.stats.output_tokens
    assert progress[-1] == (len(tokens), len(tokens))


def test_a_prompt_that_is_too_long_is_refused_at_once(there: ServerEngine) -> None:
    with pytest.raises(PromptTooLongError, match="1024"):
        there.generate([5] * 2000)
    for prompt, options in (([5], {"temperature": -1.0}), ([1 << 40], {}), ([5], {"foo": 1})):
        with pytest.raises(UsageError):
            list(there.generate(prompt, **options))


def test_requests_that_make_no_sense_are_refused(there: ServerEngine) -> None:
    transport = httpx.HTTPTransport(uds=running_servers()[0].socket)
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as http:
        for path in ("encode", "texts", "generate", "map"):
            for body in (b"", b"[]", b"{}", b'{"tokens": "x", "options": 1, "model": 5}', b"\xff"):
                response = http.post(f"/engine/{path}", content=body)
                assert response.status_code == 400, (path, body)
                assert response.json()["error"]["class"] == "UsageError"
    assert there.encode("still there")


def test_a_server_without_a_model_is_not_used_and_one_that_is_gone_is_named(home: Path) -> None:
    with serving(home):
        path = max(running_servers(), key=lambda found: found.started).socket
        assert ask_server(path) is None
        facts = {"name": "x", "model": "x", "context_length": 8, "has_chat_template": True}
        engine = ServerEngine(path, facts)
        with pytest.raises(ModelNotFoundError):
            engine.encode("x")
    with pytest.raises(NoModelError, match="has ended"):
        engine.encode("x")
    engine.close()


def test_a_model_that_was_unloaded_or_replaced_meanwhile_answers_all_the_same(home: Path) -> None:
    copied = home / "other"
    shutil.copytree(Path(moechat.__file__).parent / "hub" / "demo", copied)
    template = copied / "chat_template.jinja"
    template.write_text("another template {% for m in messages %}{{ m.content }}{% endfor %}")
    with serving(home, "--keep-alive", "0.03") as server:
        path = max(running_servers(), key=lambda found: found.started).socket
        messages = [{"role": "user", "content": "Who are you?"}]
        ask = {"model": "demo", "messages": messages, "max_tokens": 2}
        with server.client() as client:
            assert client.post("/v1/chat/completions", json=ask).status_code == 200
            facts = ask_server(path)
            assert facts is not None
            engine = ServerEngine(path, facts)
            wanted = engine.encode(messages)
            for _ in range(PATIENCE_S * 10):
                if client.get("/health").json()["model"] is None:
                    break
                time.sleep(0.1)
        assert ask_server(path) is None
        assert engine.encode(messages) == wanted
        assert list(engine.generate(wanted, max_new_tokens=3))
        engine.close()


def test_a_server_that_computes_a_long_pass_tells_what_it_has(server: ServerProcess, home: Path) -> None:
    # What it has is noted when it is loaded, so the thread that computes is not asked.
    body = {"prompt": "word " * 900, "max_tokens": 1, "model": "demo"}
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(4)]
        begun = time.monotonic()
        assert ask_server(running_servers()[0].socket) is not None
        assert time.monotonic() - begun < 2
        for request in busy:
            assert request.result().status_code == 200


def test_a_long_conversation_asks_the_server_once_a_question(there: ServerEngine) -> None:
    asked: list[Any] = []
    own = there._connection.stream

    def count(method: str, path: str, body: Any = None) -> Any:
        asked.append(path)
        return own(method, path, body)

    there._connection.stream = count  # type: ignore[method-assign]
    conversation = Conversation()
    for number in range(30):
        conversation.add(Turn(f"Question {number} " * 6, "An answer. " * 6))
    generation = Generation({"max_tokens": 8, "temperature": 0.0})
    try:
        pending = start_reply(there, conversation, "And now?", generation)
        assert pending.first_sent > 0
        assert list(pending.steps)
    finally:
        there._connection.stream = own  # type: ignore[method-assign]
    assert asked.count("/engine/generate") == 1


def test_the_socket_is_private(server: ServerProcess) -> None:
    path = Path(running_servers()[0].socket)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_socket_that_nobody_answers_is_not_waited_for(tmp_path: Path) -> None:
    with private_socket(tmp_path) as silent:
        assert silent is not None
        begun = time.monotonic()
        assert ask_server(silent.getsockname()) is None
        assert time.monotonic() - begun < 10
    assert ask_server(str(tmp_path / "absent")) is None


def test_a_long_path_gets_a_socket_elsewhere_which_is_private_too(tmp_path: Path) -> None:
    with private_socket(tmp_path / ("long" * 40)) as found:
        assert found is not None
        path = Path(found.getsockname())
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.parent.exists()


def test_a_place_that_cannot_be_written_gives_no_socket(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with private_socket(tmp_path / "file") as found:
        assert found is None
