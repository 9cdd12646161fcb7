"""The state of the machine and the stream of it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serve_support import PATIENCE_S, ServerProcess, serving, sse_events
from tiny import write_tiny_chat_model

import moechat
from moechat.offload.settings import OffloadOptions
from moechat.serve.counters import Counters
from moechat.serve.machine_state import Link, StateReader

STREAM = "/moechat/state/stream"
LONG = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "stream": True,
    "max_tokens": 1000,
    "logit_bias": {"0": -100, "4": -100},
}


def event_stream(response: httpx.Response) -> Iterator[Any]:
    return (data for _, data in sse_events(response.iter_lines()))


def test_the_state_has_model_memory_and_map(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    )
    assert answer.status_code == 200
    state = client.get("/moechat/state").json()
    assert state["model"]["name"] == "demo"
    assert state["model"]["context"] == 1024
    assert state["answers"]["running"] == state["answers"]["waiting"] == 0
    assert state["answers"]["prompt_total"] is None
    memory = state["memory"]
    assert sum(part["nbytes"] for part in memory["parts"]) <= memory["budget_bytes"]
    assert [part["name"] for part in memory["parts"]][-1] == "experts"
    found = state["map"]
    assert len(found["places"]) == len(found["layers"])
    assert sum(found["counts"].values()) == sum(map(len, found["places"]))
    assert state["loading"] is None


def test_a_stream_follows_an_answer_at_most_five_times_a_second(demo: ServerProcess) -> None:
    with demo.client() as client, client.stream("GET", STREAM) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        states = event_stream(response)
        first = next(states)
        assert first["map"] is not None
        time.sleep(0.3)  # the first state is older than the gap between two
        with client.stream("POST", "/v1/chat/completions", json=LONG) as answer:
            seen = [next(states)]
            while not seen[-1]["answers"]["running"]:
                seen.append(next(states))
            for _ in answer.iter_lines():
                pass
        # Experts are mapped, so the map does not change and is not sent again.
        assert all(state["map"] is None for state in seen)
        while seen[-1]["answers"]["running"]:
            seen.append(next(states))
        assert seen[-1]["answers"]["tokens_per_s"] == 0
        assert seen[-1]["answers"]["last_tokens_per_s"] > 1
        assert min(later["at"] - state["at"] for state, later in pairwise(seen)) > 0.15
    demo.wait_idle()


def test_at_most_eight_clients_follow(demo: ServerProcess) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(demo.client())
        following = []
        for _ in range(8):
            response = stack.enter_context(client.stream("GET", STREAM))
            assert response.status_code == 200
            following.append(event_stream(response))  # dropping it would end the stream
            assert next(following[-1])["model"]["name"] == "demo"
        with client.stream("GET", STREAM) as ninth:
            assert ninth.status_code == 429
            assert ninth.read()
        assert client.get("/moechat/state").status_code == 200
    with demo.client() as client:
        for _ in range(PATIENCE_S * 20):  # those who left are no longer counted
            with client.stream("GET", STREAM) as again:
                if again.status_code == 200:
                    return
            time.sleep(0.05)
    raise AssertionError("eight clients have left, and a new one may not follow")


def test_a_model_in_pages_has_link_hits_and_places(tmp_path: Path) -> None:
    write_tiny_chat_model(tmp_path / "model")
    counters = Counters()
    reader = StateReader(counters)
    with moechat.load(tmp_path / "model", offload=OffloadOptions(pages=6)) as engine:
        near = engine.loaded.near
        assert near is not None
        worker: Any = SimpleNamespace(
            loaded="tiny", loading=None, active=1, drawn=0, prompt=None, waiting=0, engine=engine
        )
        first = reader.read(worker)
        assert first.hits == {"last": None, "all": None}
        assert first.link == Link(0.0, 0.0, 0.0)
        for _ in engine.generate([5, 60, 7], max_new_tokens=12, temperature=0.0):
            worker.drawn += 1
        near.drain()
        counters.answered(engine.stats)
        state = reader.read(worker)
        assert state.answers.tokens_per_s > 1
        assert state.link is not None
        assert 0 < state.link.busy <= 1
        assert state.link.demand_bytes_per_s > 0
        rates = engine.stats.hit_rates
        assert state.hits["last"] == state.hits["all"] == pytest.approx(rates)
        assert state.map is not None
        assert sum(state.map.counts.values()) == near.runner.residency().size
        assert (
            state.map.counts["memory"] == (near.runner.residency() == near.geometry.blocks_per_expert).sum()
        )
        assert state.memory is not None
        held = near.runner.residency().sum() * near.geometry.record_bytes
        assert state.memory.experts_used_bytes == held <= state.memory.parts[-1].nbytes
        assert state.more is not None
        assert state.more.all_experts_bytes > 0
        json.dumps(state.to_json())


def test_the_state_of_a_server_without_a_loaded_model(tmp_path: Path) -> None:
    with serving(tmp_path, "--keep-alive", "0.01", ready=False) as server, server.client() as client:
        server.wait_ready()
        for name, told in (("default", "started without MODEL"), ("", "names no model")):
            body = {"model": name, "messages": LONG["messages"]}
            refused = client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 404
            assert told in refused.json()["error"]["message"]
        state = client.get("/moechat/state").json()
        assert state["model"] is state["map"] is state["memory"] is state["link"] is None
        with client.stream("GET", STREAM) as response:
            states = event_stream(response)
            assert next(states)["model"] is None
            body = {"model": "demo", "messages": LONG["messages"], "max_tokens": 2}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            seen = [next(states)]
            while seen[-1]["model"] is None:
                seen.append(next(states))
            assert any(one["loading"] for one in seen[:-1]) or len(seen) == 1
            # Unused for 0.6 s, it is unloaded.
            while next(states)["model"] is not None:
                pass


@pytest.mark.parametrize("path", ["/moechat/state", STREAM])
def test_the_state_needs_the_key(tmp_path: Path, path: str) -> None:
    (tmp_path / "key").write_text("secret-1234567890")
    key = ("--api-key-file", str(tmp_path / "key"))
    with serving(tmp_path, "demo", *key) as server, server.client() as client:
        assert client.get(path).status_code == 401
        headers = {"authorization": "Bearer secret-1234567890"}
        with client.stream("GET", path, headers=headers) as response:
            assert response.status_code == 200


def test_streams_end_when_the_server_does(tmp_path: Path) -> None:
    with serving(tmp_path, "demo") as server, server.client() as client:
        with client.stream("GET", STREAM) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).partition(" ")[2])["model"]
            begun = time.monotonic()
            server.process.send_signal(signal.SIGSTOP)
            server.process.send_signal(signal.SIGCONT)
            server.process.terminate()
            for _ in lines:
                pass
            assert time.monotonic() - begun < 4
        server.process.wait(PATIENCE_S)
        server.process.poll = lambda: None  # type: ignore[method-assign]
