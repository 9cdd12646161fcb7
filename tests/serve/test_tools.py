"""Calls of tools, as the openai package sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai_clients import openai_client
from serve_support import ServerProcess, serving, sse_events
from tiny import write_tiny_chat_model

QUESTION: Any = [{"role": "user", "content": "What will the weather be?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a day.",
        "parameters": {
            "type": "object",
            "properties": {
                "day": {"enum": ["today", "tomorrow"]},
                "hours": {"type": "integer", "minimum": 1, "maximum": 24},
            },
            "required": ["day", "hours"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


@pytest.fixture
def api(tools: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai_client(tools) as client:
        yield client


@pytest.fixture
def options(api: openai.OpenAI, calls_soon: dict[str, int]) -> dict[str, Any]:
    return {"model": api.models.list().data[0].id, "max_tokens": 300, "logit_bias": calls_soon}


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "weather":
        assert found["day"] in ("today", "tomorrow")
        assert found["hours"] in range(1, 25)
    else:
        assert (name, found) == ("time", {})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_call_is_made(api: openai.OpenAI, options: dict[str, Any], choice: Any) -> None:
    found = api.chat.completions.create(
        messages=QUESTION, tools=[WEATHER, TIME], tool_choice=choice, **options
    )
    assert found.choices[0].finish_reason == "tool_calls"
    calls = found.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.id
        check(call.function.name, call.function.arguments)
    if choice != "required":
        assert {call.function.name for call in calls if call.type == "function"} == {"weather"}


def test_a_stream_has_the_call_in_pieces(api: openai.OpenAI, options: dict[str, Any]) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    chunks = list(
        api.chat.completions.create(
            messages=QUESTION,
            tools=[WEATHER],
            tool_choice=named,
            parallel_tool_calls=False,
            stream=True,
            **options,
        )
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    assert deltas[0].id
    assert deltas[0].function is not None
    assert deltas[0].function.name == "weather"
    assert all(delta.id is None for delta in deltas[1:])
    pieces = [delta.function.arguments or "" for delta in deltas if delta.function is not None]
    assert len([piece for piece in pieces if piece]) > 3
    check("weather", "".join(pieces))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_result_of_a_call_goes_into_the_next_prompt(api: openai.OpenAI, options: dict[str, Any]) -> None:
    first = api.chat.completions.create(messages=QUESTION, tools=[WEATHER], tool_choice="required", **options)
    message = first.choices[0].message
    assert message.tool_calls
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls
    ]
    turn: Any = [*QUESTION, message.model_dump(exclude_none=True), *results]
    second = api.chat.completions.create(messages=turn, tools=[WEATHER], **{**options, "max_tokens": 3})
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_tools_that_must_not_be_called_are_not_told(api: openai.OpenAI, options: dict[str, Any]) -> None:
    few = {**options, "max_tokens": 2}
    without = api.chat.completions.create(messages=QUESTION, **few).usage
    none = api.chat.completions.create(messages=QUESTION, tools=[WEATHER], tool_choice="none", **few).usage
    told = api.chat.completions.create(messages=QUESTION, tools=[WEATHER], **few).usage
    assert without is not None
    assert none is not None
    assert told is not None
    assert none.prompt_tokens == without.prompt_tokens < told.prompt_tokens


def test_thinking_is_apart_from_the_answer(api: openai.OpenAI, options: dict[str, Any]) -> None:
    few = {**options, "max_tokens": 20, "logit_bias": {}}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    found = api.chat.completions.create(messages=QUESTION, extra_body=thinks, **few)
    assert not found.choices[0].message.content
    assert found.choices[0].message.reasoning_content  # type: ignore[attr-defined]
    assert found.usage is not None
    assert found.usage.completion_tokens_details is not None
    assert found.usage.completion_tokens_details.reasoning_tokens == 20
    effort = api.chat.completions.create(messages=QUESTION, reasoning_effort="none", **few)
    assert not getattr(effort.choices[0].message, "reasoning_content", None)


def test_a_schema_holds_behind_the_thinking(api: openai.OpenAI, options: dict[str, Any]) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    found = api.chat.completions.create(messages=QUESTION, response_format=wanted, **options)
    assert json.loads(found.choices[0].message.content or "") in ("yes", "no")
    # A random model does not end its thinking.
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    few = {**options, "max_tokens": 5, "logit_bias": {}}
    cut = api.chat.completions.create(messages=QUESTION, response_format=wanted, extra_body=thinks, **few)
    assert cut.choices[0].finish_reason == "length"
    assert not cut.choices[0].message.content


def test_a_model_without_tools_says_so(tmp_path: Path) -> None:
    model = tmp_path / "plain"
    model.mkdir()
    write_tiny_chat_model(model, max_position_embeddings=4096)
    with (
        serving(tmp_path, str(model)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api,
        pytest.raises(openai.BadRequestError, match="no tools"),
    ):
        api.chat.completions.create(model="plain", messages=QUESTION, tools=[WEATHER])


def test_the_demo_calls_a_tool_and_answers_from_its_result(demo: ServerProcess) -> None:
    city: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool: Any = {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": city},
    }
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    with openai_client(demo) as api:
        options: Any = {"model": "demo", "tools": [tool], "temperature": 0, "max_tokens": 120}
        first = api.chat.completions.create(messages=messages, **options).choices[0]
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18, "sky": "sunny"}'}
        messages = [*messages, first.message.model_dump(exclude_none=True), result]
        answer = api.chat.completions.create(messages=messages, **options).choices[0]
    assert answer.finish_reason == "stop"
    for word in ("Paris", "18"):
        assert word in (answer.message.content or "")


@pytest.mark.parametrize("limit", [4, 8, 20, 34, 40, 44, 47, 50])
def test_a_call_that_the_limit_cuts_is_the_same_in_a_stream_and_told_once(
    client: httpx.Client, limit: int
) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": city}}],
        "temperature": 0,
        "max_tokens": limit,
    }
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    streamed = client.post("/v1/chat/completions", json={**body, "stream": True}).text
    events = [data for _, data in sse_events(iter(streamed.splitlines()))]
    assert events.pop() == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events]
    text = "".join(delta.get("content") or "" for delta in deltas)
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    arguments = "".join(function["arguments"] for function in functions)
    calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert (text, arguments) == (
        whole["message"]["content"] or "",
        "".join(one["arguments"] for one in calls),
    )
    assert [one["name"] for one in calls] == [one["name"] for one in functions if "name" in one]
    assert whole["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "length"
    assert text == ""  # nothing of the call, also where its name is not complete
    assert len(calls) == (limit > 20)
    if limit >= 44:
        assert json.loads(arguments) == {"city": "Paris"}


@pytest.mark.parametrize("limit", [8, 20])
def test_a_call_without_its_whole_name_is_an_empty_answer_in_all_protocols(
    client: httpx.Client, limit: int
) -> None:
    question = "What is the weather in Paris?"
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    common = {"model": "demo", "temperature": 0}
    message = client.post(
        "/v1/messages",
        json={
            **common,
            "max_tokens": limit,
            "messages": [{"role": "user", "content": question}],
            "tools": [{"name": "get_weather", "input_schema": city}],
        },
    ).json()
    assert message["stop_reason"] == "max_tokens"
    assert "".join(block.get("text", "") for block in message["content"]) == ""
    response = client.post(
        "/v1/responses",
        json={
            **common,
            "max_output_tokens": limit,
            "input": question,
            "tools": [{"type": "function", "name": "get_weather", "parameters": city}],
        },
    ).json()
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert "get_w" not in json.dumps(response["output"])
    assert "<tool_call>" not in json.dumps(response["output"])


def test_responses_have_calls_and_take_their_results(api: openai.OpenAI, options: dict[str, Any]) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    model = options["model"]
    found = api.responses.create(
        model=model,
        input="The weather?",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=300,
        extra_body={"logit_bias": options["logit_bias"]},
    )
    calls = [item for item in found.output if item.type == "function_call"]
    assert calls
    for call in calls:
        check(call.name, call.arguments)
    given: Any = [
        {"role": "user", "content": "The weather?"},
        *(
            {"type": "function_call", "call_id": c.call_id, "name": c.name, "arguments": c.arguments}
            for c in calls
        ),
        *({"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls),
    ]
    answer = api.responses.create(model=model, input=given, tools=[tool], max_output_tokens=4)
    assert answer.status == "incomplete"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4


def test_a_response_streams_to_the_whole_one(api: openai.OpenAI, demo: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as chat:
        options: Any = {
            "model": "demo",
            "input": "Tell me a story.",
            "max_output_tokens": 20,
            "temperature": 0,
        }
        whole = chat.responses.create(**options, instructions="Be kind.")
        events = list(chat.responses.create(**options, instructions="Be kind.", stream=True))
        with pytest.raises(openai.BadRequestError, match="not stored"):
            chat.responses.create(model="demo", input="x", previous_response_id="resp-1")
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == whole.output_text
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "message.output_text.logprobs"),
        ({"include": "all"}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": 5}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ],
)
def test_a_field_of_responses_that_is_not_possible_is_refused(
    client: httpx.Client, change: dict[str, Any], named: str
) -> None:
    body = {"model": "demo", "input": "x", "max_output_tokens": 2, **change}
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]["message"]


def test_fields_of_responses_without_effect_are_accepted(client: httpx.Client) -> None:
    body = {
        "model": "demo",
        "input": "x",
        "max_output_tokens": 2,
        "top_logprobs": 0,
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "text": {"verbosity": "low"},
        "store": True,
    }
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["store"] is False
