"""Anthropic's messages, as its own package sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from serve_support import PATIENCE_S, ServerProcess, sse_events

from moechat.serve.anthropic_input import chat_messages
from moechat.serve.api_errors import ApiError
from moechat.serve.fields import Fields

STORY: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a day.",
    "input_schema": {
        "type": "object",
        "properties": {"day": {"enum": ["today", "tomorrow"]}},
        "required": ["day"],
    },
}

FORMAT: Any = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}


def client_of(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", timeout=PATIENCE_S, max_retries=0)


def clearing(**keep: Any) -> dict[str, Any]:
    return {"edits": [{"type": "clear_thinking_20251015", **keep}]}


@pytest.fixture
def api(demo: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with client_of(demo) as client:
        yield client


def test_a_message_has_text_reason_and_usage(api: anthropic.Anthropic) -> None:
    found = api.messages.create(model="demo", messages=STORY, max_tokens=12, system="Be kind.")
    assert [block.type for block in found.content] == ["text"]
    assert found.stop_reason == "max_tokens"
    assert found.usage.output_tokens == 12
    assert found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0) > 10


def test_a_stream_collects_to_the_whole_message(api: anthropic.Anthropic) -> None:
    options: Any = {"model": "demo", "messages": STORY, "max_tokens": 25, "extra_body": {"temperature": 0}}
    whole = api.messages.create(**options)
    with api.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert [block.type for block in final.content] == ["text"]
    assert final.content[0].text == text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 25)


def test_the_form_of_a_stream_is_exact(client: httpx.Client) -> None:
    body = {"messages": STORY, "max_tokens": 2, "stream": True, "model": "demo"}
    with client.stream("POST", "/v1/messages", json=body) as response:
        events = list(sse_events(response.iter_lines()))
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_stop_sequence_is_named(api: anthropic.Anthropic) -> None:
    found = api.messages.create(
        model="demo",
        messages=STORY,
        max_tokens=60,
        stop_sequences=["\0", " fox"],
        extra_body={"temperature": 0},
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", " fox")


@pytest.mark.parametrize(
    "fields", [{"output_config": {"format": FORMAT, "effort": "low"}}, {"output_format": FORMAT}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_the_schema_of_its_format(
    client: httpx.Client, fields: dict[str, Any], stream: bool
) -> None:
    body = {"model": "demo", "messages": STORY, "max_tokens": 60, "stream": stream, **fields}
    response = client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    if stream:
        events = [data for _, data in sse_events(iter(response.text.splitlines()))]
        text = "".join(data["delta"]["text"] for data in events if data["type"] == "content_block_delta")
    else:
        (block,) = response.json()["content"]
        text = block["text"]
    assert json.loads(text) in ("yes", "no")


def test_blocks_of_text_are_taken(api: anthropic.Anthropic) -> None:
    messages: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Once"}]},
        {"role": "user", "content": "Go on."},
    ]
    system: Any = [{"type": "text", "text": "Be kind."}]
    assert api.messages.create(model="demo", messages=messages, max_tokens=2, system=system).content


def test_tokens_are_counted(api: anthropic.Anthropic) -> None:
    counted = api.messages.count_tokens(model="demo", messages=STORY)
    found = api.messages.create(model="demo", messages=STORY, max_tokens=1)
    assert counted.input_tokens == found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "pictures"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "name"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "only thinking"),
        ({"context_management": {"edits": [5]}}, "context_management.edits[0]"),
        ({"context_management": clearing(keep={"type": "thinking_turns", "value": 0})}, "keep.value"),
        ({"context_management": clearing(keep={"type": "some"})}, "keep.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_format"),
    ],
)
def test_a_wrong_field_is_named(client: httpx.Client, change: dict[str, Any], named: str) -> None:
    response = client.post(
        "/v1/messages", json={"messages": STORY, "max_tokens": 2, "model": "demo", **change}
    )
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


@pytest.mark.parametrize(
    ("management", "kept"),
    [
        (None, ["first", "second", "third"]),
        ({"edits": []}, ["first", "second", "third"]),
        (clearing(keep="all"), ["first", "second", "third"]),
        (clearing(keep={"type": "all"}), ["first", "second", "third"]),
        (clearing(keep={"type": "thinking_turns", "value": 2}), ["second", "third"]),
        (clearing(keep={"type": "thinking_turns", "value": 9}), ["first", "second", "third"]),
        (clearing(), ["third"]),
    ],
)
def test_older_thinking_is_cleared_where_that_is_asked_for(management: Any, kept: list[str]) -> None:
    messages: list[Any] = [*STORY]
    for thought in ("first", "second", "third"):
        blocks = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "So."}]
        messages += [{"role": "assistant", "content": blocks}, *STORY]
    found = chat_messages(Fields({"messages": messages, "context_management": management}))
    assert [message["reasoning_content"] for message in found if "reasoning_content" in message] == kept
    assert [message["content"] for message in found if message["role"] == "assistant"] == ["So."] * 3


def test_a_client_that_keeps_all_thinking_gets_an_answer(client: httpx.Client) -> None:
    body = {"messages": STORY, "max_tokens": 2, "model": "demo", "context_management": clearing(keep="all")}
    assert client.post("/v1/messages", json=body).status_code == 200


def test_errors_are_those_of_its_client(api: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        api.messages.create(model="gpt-9", messages=STORY, max_tokens=1)
    long: Any = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="1024"):
        api.messages.create(model="demo", messages=long, max_tokens=1)


# ---- tools


def test_a_call_that_is_demanded_is_made_and_its_result_is_taken(
    tools: ServerProcess, calls_soon: dict[str, int]
) -> None:
    with client_of(tools) as api:
        options: Any = {"max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "any"}}
        options["extra_body"] = {"logit_bias": calls_soon}
        options["model"] = api.models.list().data[0].id
        found = api.messages.create(messages=STORY, **options)
        assert found.stop_reason == "tool_use"
        call = next(block for block in found.content if block.type == "tool_use")
        assert call.name == "weather"
        assert call.input["day"] in ("today", "tomorrow")
        with api.messages.stream(messages=STORY, **options) as stream:
            final = stream.get_final_message()
        assert final.stop_reason == "tool_use"
        again = [block for block in final.content if block.type == "tool_use"]
        assert again[0].input["day"] in ("today", "tomorrow")
        turn: Any = [
            *STORY,
            {
                "role": "assistant",
                "content": [json.loads(block.model_dump_json()) for block in found.content],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
        ]
        answer = api.messages.create(
            messages=turn, **{**options, "max_tokens": 5, "tool_choice": {"type": "none"}, "extra_body": {}}
        )
        assert answer.stop_reason == "max_tokens"


def test_thinking_is_a_block_of_its_own(tools: ServerProcess) -> None:
    with client_of(tools) as api:
        name = api.models.list().data[0].id
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        found = api.messages.create(model=name, messages=STORY, max_tokens=20, thinking=thinking)
        assert [block.type for block in found.content] == ["thinking"]
        without = api.messages.create(model=name, messages=STORY, max_tokens=20)
        assert {block.type for block in without.content} <= {"text"}


def test_a_picture_in_the_result_of_a_tool_is_left_out_and_named() -> None:
    picture = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
    }
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [{"type": "text", "text": "see:"}, picture],
    }
    messages = [{"role": "user", "content": [result]}]
    (found,) = chat_messages(Fields({"messages": messages}))
    assert found["role"] == "tool"
    assert found["content"] == "see:\n[pictures left out: this model reads text only]"
    for content in ([picture], [{**result, "content": [{"type": "surprise"}]}]):
        with pytest.raises(ApiError, match="cannot be read; models here take text"):
            chat_messages(Fields({"messages": [{"role": "user", "content": content}]}))
