"""Many requests: fairness, limits, leaving clients, loading and unloading."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_support import PATIENCE_S, ServerProcess, serving, sse_events

# The demo ends its answers with these tokens.
ENDLESS = {"0": -100, "4": -100}
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def body(**changes: Any) -> dict[str, Any]:
    return {"messages": STORY, "max_tokens": 40, "temperature": 0, **changes}


def text_of(client: httpx.Client, **changes: Any) -> str:
    response = client.post("/v1/chat/completions", json=body(**changes))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two answers at a time and a short queue."""
    with serving(tmp_path_factory.mktemp("small"), "demo", "--parallel", "2", "--queue", "2") as server:
        yield server


def test_answers_side_by_side_have_the_text_of_each_alone(small: ServerProcess) -> None:
    questions = ["Who are you?", "Can I get a small latte, please?"] * 3
    prompts = [[{"role": "user", "content": question}] for question in questions]
    with small.client() as client:
        alone = [text_of(client, messages=prompt) for prompt in prompts[:2]]
        with ThreadPoolExecutor(3) as pool:  # two are answered, one waits
            found = list(pool.map(lambda prompt: text_of(client, messages=prompt), prompts))
    assert found == alone * 3


def test_two_answers_advance_in_turns(small: ServerProcess) -> None:
    small.wait_idle()
    order: list[str] = []
    started = threading.Barrier(2)

    def follow(name: str) -> None:
        with small.client() as client:
            started.wait(PATIENCE_S)
            with client.stream(
                "POST", "/v1/chat/completions", json=body(stream=True, max_tokens=60)
            ) as response:
                for _, data in sse_events(response.iter_lines()):
                    if data != "[DONE]" and data["choices"][0]["delta"].get("content"):
                        order.append(name)

    threads = [threading.Thread(target=follow, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(order) >= 100
    middle = order[20:-20]
    # Neither has to wait for the end of the other.
    assert 0.3 < middle.count("a") / len(middle) < 0.7


def test_a_full_queue_refuses_and_says_when_to_come_again(small: ServerProcess) -> None:
    small.wait_idle()

    async def ask_many() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=small.url, timeout=PATIENCE_S) as client:
            asked = [client.post("/v1/chat/completions", json=body(max_tokens=150)) for _ in range(12)]
            return await asyncio.gather(*asked)

    found = asyncio.run(ask_many())
    refused = [response for response in found if response.status_code == 429]
    assert {response.status_code for response in found} == {200, 429}
    # Two are answered and two wait; more are taken as those end.
    assert 4 <= len(found) - len(refused) < 12
    for response in refused:
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_computed_for_a_client_that_has_left(small: ServerProcess, stream: bool) -> None:
    small.wait_idle()
    cancelled = small.metric("answers_cancelled_total")
    tokens = small.metric("output_tokens_total")
    endless = body(stream=stream, max_tokens=1000, logit_bias=ENDLESS)
    with small.client() as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=endless) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=endless, timeout=0.3)
    small.wait_idle()
    assert small.metric("answers_cancelled_total") == cancelled + 1
    assert small.metric("output_tokens_total") == tokens  # complete answers only
    with small.client() as client:
        assert text_of(client)


def test_a_client_that_leaves_the_queue_is_forgotten(small: ServerProcess) -> None:
    small.wait_idle()
    with small.client() as client, ThreadPoolExecutor(2) as pool:
        long = [pool.submit(text_of, client, max_tokens=250, logit_bias=ENDLESS) for _ in range(2)]
        while small.metric("answers_running") < 2:
            time.sleep(0.01)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body(), timeout=0.2)
        assert all(future.result() for future in long)
    small.wait_idle()


def test_a_model_can_be_asked_for_by_name_and_replaces_the_one_before(
    tools_model: Path, tmp_path: Path
) -> None:
    subprocess.run(
        [sys.executable, "-m", "moechat", "run", str(tools_model), "hello", "--max-tokens", "1", "-q"],
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    with serving(tmp_path) as server, server.client() as client:
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        other = next(name for name in names if name.startswith("tools-model"))
        assert "demo" in names
        assert client.get("/health").json()["model"] is None
        unnamed = client.post("/v1/chat/completions", json=body())
        assert unnamed.status_code == 404
        assert other in unnamed.json()["error"]["message"]
        for name in ("demo", other, "demo"):
            response = client.post("/v1/chat/completions", json=body(model=name, max_tokens=2))
            assert response.status_code == 200, response.text
            assert response.json()["model"] == client.get("/health").json()["model"]
        for path in (str(tools_model), "../tools-model", "mixtral"):
            assert client.post("/v1/chat/completions", json=body(model=path)).status_code == 404
        # Two models asked for at once: one after the other, and both are answered.
        with ThreadPoolExecutor(6) as pool:
            found = list(
                pool.map(lambda name: text_of(client, model=name, max_tokens=5), ["demo", other] * 3)
            )
        assert len(set(found[::2])) == len(set(found[1::2])) == 1


def test_an_unused_model_is_unloaded_and_loaded_again(tmp_path: Path) -> None:
    with serving(tmp_path, "demo", "--keep-alive", "0.02") as server, server.client() as client:
        first = text_of(client)
        for _ in range(PATIENCE_S * 20):
            if client.get("/health").json()["model"] is None:
                break
            time.sleep(0.05)
        assert server.metric("model_loaded") == 0
        assert text_of(client) == first
        assert server.metric("model_loads_total") == 2


def test_while_it_loads_the_server_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, "demo", ready=False) as server, server.client() as client:
        early = client.post("/v1/chat/completions", json=body(max_tokens=1))
        if early.status_code != 200:  # loading takes a second, and may be over
            assert early.status_code == 503
            assert early.json()["error"]["code"] == "model_loading"
            assert early.headers["retry-after"]
        server.wait_ready()
        assert text_of(client, max_tokens=1)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_status(tmp_path: Path) -> None:
    for arguments, status, fact in (
        (["demo", "--ram", "64M"], 4, "memory budget"),
        (["./nowhere"], 3, "no directory"),
        (["demo", "--ctx", "99999"], 4, "context"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "moechat", "serve", *arguments, "--port", "0"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == status, done.stderr
        assert fact in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_answers_and_server_soon(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "moechat", "serve", "demo", "--port", "0"],
            stderr=file,
            cwd=tmp_path,
            # A parent may have it ignored, as nohup does.
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
    try:
        while b"is ready" not in log.read_bytes():
            assert process.poll() is None
            time.sleep(0.05)
        url = log.read_text().partition("listening on ")[2].partition("/v1")[0]
        while httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code != 200:
            time.sleep(0.05)
        endless = body(stream=True, max_tokens=1000, logit_bias=ENDLESS)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=endless, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = list(lines)
        assert process.wait(PATIENCE_S) == 128 + number
        # The client is told why its answer ends.
        assert (
            json.loads([line for line in rest if line.startswith("data: ")][-1][6:])["error"]["code"]
            == "shutting_down"
        )
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_signal_while_the_model_loads_ends_the_server_with_its_status(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moechat", "serve", "demo", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stderr is not None
        assert "listening on" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM, rest
    assert "error" not in rest


def test_a_client_whose_prompt_is_read_is_told_that_the_server_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moechat", "serve", "demo", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stderr is not None
        url = process.stderr.readline().partition("listening on ")[2].partition("/v1")[0]
        assert "is ready" in process.stderr.readline()
        long = body(stream=True, messages=[{"role": "user", "content": "word " * 900}])
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=long, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)  # the prompt was accepted
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert json.loads(rest[-1][6:])["error"]["code"] == "shutting_down"


def test_all_answers_under_way_are_told_that_the_server_ends(tmp_path: Path) -> None:
    with serving(tmp_path, "demo", "--parallel", "3") as server:
        endless = body(stream=True, max_tokens=1000, logit_bias=ENDLESS)
        begun = threading.Barrier(4)

        def follow() -> str:
            with server.client().stream("POST", "/v1/chat/completions", json=endless) as response:
                lines = response.iter_lines()
                for _ in range(6):  # the role, and a token
                    next(lines)
                begun.wait(PATIENCE_S)
                return [line for line in lines if line.startswith("data: ")][-1]

        with ThreadPoolExecutor(3) as pool:
            last = [pool.submit(follow) for _ in range(3)]
            begun.wait(PATIENCE_S)
            server.may_end = True
            server.process.terminate()
            found = [json.loads(future.result(PATIENCE_S)[6:]) for future in last]
        assert [one["error"]["code"] for one in found] == ["shutting_down"] * 3


def test_the_model_in_memory_tells_its_context(small: ServerProcess) -> None:
    with small.client() as client:
        assert [card["context_length"] for card in client.get("/v1/models").json()["data"]] == [1024]
