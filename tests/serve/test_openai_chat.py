"""Chats and completions, as the openai package and a parser of our own see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai_clients import openai_client
from serve_support import ServerProcess, sse_events

import moechat

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture
def api(demo: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai_client(demo) as client:
        yield client


def test_a_chat_has_text_reason_and_usage(api: openai.OpenAI) -> None:
    found = api.chat.completions.create(model="demo", messages=STORY, max_tokens=20, seed=1)
    choice = found.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert found.usage is not None
    assert found.usage.completion_tokens == 20
    assert found.usage.total_tokens == found.usage.prompt_tokens + 20
    again = api.chat.completions.create(model="demo", messages=STORY, max_completion_tokens=20, seed=1)
    assert again.choices[0].message.content == choice.message.content


def test_a_stream_has_the_text_of_the_whole_answer(api: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "messages": STORY, "max_tokens": 30, "temperature": 0}
    whole = api.chat.completions.create(**options).choices[0].message.content
    chunks = list(api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert len({(c.id, c.created, c.object) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("parts", [False, True])
def test_a_predicted_answer_is_the_same_and_its_tokens_are_counted(api: openai.OpenAI, parts: bool) -> None:
    options: Any = {"model": "demo", "messages": STORY, "max_tokens": 80, "temperature": 0}
    text = api.chat.completions.create(**options).choices[0].message.content
    assert text is not None
    content = [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:]}] if parts else text
    found = api.chat.completions.create(**options, prediction={"type": "content", "content": content})
    assert found.choices[0].message.content == text
    assert found.usage is not None
    details = found.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > 20
    assert details.rejected_prediction_tokens is not None


def test_the_form_of_a_stream_is_exact(client: httpx.Client) -> None:
    body = {"messages": STORY, "max_tokens": 3, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [data for _, data in sse_events(response.iter_lines())]
    assert events[-1] == "[DONE]"
    assert [event["object"] for event in events[:-1]] == ["chat.completion.chunk"] * 5
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(event["choices"][0]["delta"]) == {"content"} for event in events[1:4])
    assert events[4]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "length", "logprobs": None}
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer(client: httpx.Client, stream: bool) -> None:
    body = {"messages": STORY, "max_tokens": 60, "temperature": 0, "stop": [" fox", "\0"]}
    free = client.post("/v1/chat/completions", json={**body, "stop": None}).json()["choices"][0]
    assert " fox" in free["message"]["content"]
    found, reason = chat_text(client, {**body, "stream": stream})
    assert found == free["message"]["content"].partition(" fox")[0]
    assert reason == "stop"


def chat_text(client: httpx.Client, body: dict[str, Any]) -> tuple[str, str]:
    if not body.get("stream"):
        choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        events = [data["choices"][0] for _, data in sse_events(response.iter_lines()) if data != "[DONE]"]
    return "".join(event["delta"].get("content", "") for event in events), events[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_of_tokens(api: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": "demo", "messages": STORY, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    if stream:
        found = [
            entry
            for chunk in api.chat.completions.create(**options, stream=True)
            if chunk.choices and chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or []
        ]
    else:
        logprobs = api.chat.completions.create(**options).choices[0].logprobs
        assert logprobs is not None
        found = logprobs.content or []
    assert len(found) == 4
    for entry in found:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= max(entry.logprob, entry.top_logprobs[1].logprob)
        assert bytes(entry.bytes or []).decode() == entry.token


def test_a_bias_keeps_tokens_out(api: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "messages": STORY, "max_tokens": 1, "temperature": 0, "logprobs": True}
    first = api.completions.create(model="demo", prompt="Once", max_tokens=1, temperature=0, logprobs=1)
    assert first.choices[0].logprobs is not None
    text = api.chat.completions.create(**options).choices[0].message.content
    ids = {str(token): -100 for token in range(3000)}
    other = api.chat.completions.create(**options, logit_bias=ids).choices[0].message.content
    assert other != text


SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "owl"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


def test_an_answer_follows_a_json_schema(api: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    found = api.chat.completions.create(model="demo", messages=STORY, max_tokens=100, response_format=wanted)
    assert found.choices[0].finish_reason == "stop"
    value = json.loads(found.choices[0].message.content or "")
    assert value["animal"] in ("fox", "owl")
    assert value["legs"] in range(9)


def test_an_answer_can_be_any_json_object(api: openai.OpenAI) -> None:
    vocabulary = json.loads((Path(moechat.__file__).parent / "hub/demo/tokenizer.json").read_text())["model"][
        "vocab"
    ]
    # The demo has never seen JSON; it would write strings without end.
    ends = {str(vocabulary[text]): 30 for text in ('"', "}")}
    found = api.chat.completions.create(
        model="demo", messages=STORY, max_tokens=200, response_format={"type": "json_object"}, logit_bias=ends
    )
    assert found.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(found.choices[0].message.content or ""), dict)


def test_a_completion_continues_a_text(api: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    found = api.completions.create(**options)
    assert found.choices[0].text.startswith(",")
    assert found.choices[0].finish_reason == "length"
    stream = list(api.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in stream) == found.choices[0].text
    echoed = api.completions.create(**options, echo=True)
    assert echoed.choices[0].text == "Once upon a time" + found.choices[0].text
    probable = api.completions.create(**options, logprobs=2).choices[0].logprobs
    assert probable is not None
    assert "".join(probable.tokens or []) == found.choices[0].text
    assert probable.text_offset is not None
    assert probable.text_offset[0] == 0


def test_a_completion_takes_token_ids(client: httpx.Client) -> None:
    text = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3, "temperature": 0}).json()
    assert text["usage"]["prompt_tokens"] >= 1
    ids = client.post("/v1/completions", json={"prompt": [[5, 6, 7]], "max_tokens": 3}).json()
    assert ids["usage"]["prompt_tokens"] == 3


def test_the_prompt_of_a_second_turn_is_reused(api: openai.OpenAI) -> None:
    first = api.chat.completions.create(model="demo", messages=STORY, max_tokens=40, temperature=0)
    answer = first.choices[0].message.content
    more: Any = [*STORY, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    second = api.chat.completions.create(model="demo", messages=more, max_tokens=2)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 10


def test_models_are_listed(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["demo"]
    assert api.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-9")


# ---- errors


def test_a_prompt_that_is_too_long_says_both_numbers(api: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(openai.BadRequestError) as failed:
        api.chat.completions.create(model="demo", messages=long)
    assert failed.value.code == "context_length_exceeded"
    assert "1024" in str(failed.value)
    assert [int(n) for n in str(failed.value).replace(",", "").split() if n.isdigit() and int(n) > 1024]


BAD = [
    ({"n": 2}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"seed": "x"}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"prediction": "x"}, "prediction"),
    ({"prediction": {"type": "audio", "content": "x"}}, "prediction"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"prediction": {"type": "content", "content": [{"type": "text", "text": 3}]}}, "prediction"),
    ({"web_search_options": {"x": 1}}, "web_search_options"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"tools": [{"type": "browser"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0]",
    ),
    ({"chat_template_kwargs": {"tokenize": False}}, "tokenize"),
    ({"model": 7}, "model"),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=[str(change)[:60] for change, _ in BAD])
def test_a_wrong_field_is_named(client: httpx.Client, change: dict[str, Any], named: str) -> None:
    response = client.post("/v1/chat/completions", json={"messages": STORY, "max_tokens": 2, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


@pytest.mark.parametrize("n", [0, 2, -1, True, "1"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_another_number_of_answers_than_one_is_refused(client: httpx.Client, n: Any, path: str) -> None:
    response = client.post(path, json={"messages": STORY, "prompt": "x", "max_tokens": 2, "n": n})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "n")
    assert "only 1 is supported" in error["message"]


def test_unknown_fields_and_nulls_are_ignored(client: httpx.Client) -> None:
    body = {"messages": STORY, "max_tokens": 2, "user": "me", "whatever": [1], "stop": None, "tools": None}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_fields_of_chats_without_effect_are_accepted(client: httpx.Client) -> None:
    body = {"messages": STORY, "max_tokens": 2, "verbosity": "low", "store": True, "service_tier": "auto"}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, None),
        ("/v1/chat/completions", b"[]", 400, None),
        ("/v1/chat/completions", b"\xff", 400, None),
        ("/v1/chat/completions", b"[" * 100_000, 400, None),
        ("/v1/chat/completions", b'{"messages": ' + b'[{"a":' * 200 + b"1" + b"}]" * 200 + b"}", 400, None),
        ("/v1/embeddings", b'{"input": "x"}', 400, "unsupported_endpoint"),
        ("/v1/nowhere", b"{}", 404, None),
        ("/v1/completions", b"{}", 400, None),
        ("/v1/completions", b'{"prompt": ""}', 400, None),
        ("/v1/completions", b'{"prompt": [1, 999999999]}', 400, None),
        ("/v1/completions", b'{"prompt": "x", "suffix": "y"}', 400, "unsupported_parameter"),
        ("/v1/completions", b'{"prompt": "x", "best_of": 3}', 400, "unsupported_parameter"),
    ],
)
def test_other_errors_have_the_same_form(
    client: httpx.Client, path: str, body: bytes, status: int, code: str | None
) -> None:
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["message"]


def test_an_unknown_model_is_not_found(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as failed:
        api.chat.completions.create(model="/etc/passwd", messages=STORY)  # type: ignore[arg-type]
    assert failed.value.code == "model_not_found"
    assert "there is only demo" in str(failed.value)


def test_a_wrong_method_is_refused(client: httpx.Client) -> None:
    assert client.get("/v1/chat/completions").status_code == 405
    assert client.delete("/v1/models").status_code == 405
