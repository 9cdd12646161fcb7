"""Tools of responses beyond plain functions: in namespaces, with free text, and those that servers run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai_clients import openai_client
from serve_support import ServerProcess

from moechat.serve.api_errors import ApiError
from moechat.serve.fields import Fields
from moechat.serve.responses_input import chat_messages
from moechat.serve.responses_tools import GivenTool, GivenTools, function_name

DAY: Any = {
    "type": "object",
    "properties": {"day": {"enum": ["today", "tomorrow"]}},
    "required": ["day"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": DAY}
NAMESPACE: Any = {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER]}
PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


@pytest.fixture
def api(tools: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai_client(tools) as client:
        yield client


@pytest.fixture
def options(api: openai.OpenAI, calls_soon: dict[str, int]) -> dict[str, Any]:
    return {
        "model": api.models.list().data[0].id,
        "input": "The weather?",
        "max_output_tokens": 300,
        "parallel_tool_calls": False,
        "extra_body": {"logit_bias": calls_soon},
    }


def items(events: list[Any], kind: str) -> list[dict[str, Any]]:
    return [event.item.model_dump() for event in events if event.type == f"response.output_item.{kind}"]


def test_a_tool_of_a_namespace_is_called_by_its_own_name(api: openai.OpenAI, options: dict[str, Any]) -> None:
    choice: Any = {"type": "function", "name": "weather", "namespace": "mcp__sky"}
    asked = {**options, "tools": [WEATHER, NAMESPACE], "tool_choice": choice}
    found = api.responses.create(**asked)
    (call,) = [item for item in found.output if item.type == "function_call"]
    assert (call.name, call.namespace) == ("weather", "mcp__sky")
    assert json.loads(call.arguments)["day"] in ("today", "tomorrow")
    events = list(api.responses.create(**asked, stream=True))
    for item in (*items(events, "added"), *items(events, "done")):
        assert (item["type"], item["name"], item["namespace"]) == ("function_call", "weather", "mcp__sky")
    # The call goes back as it came, and its result is taken.
    given: Any = [
        {"role": "user", "content": "The weather?"},
        json.loads(call.model_dump_json(exclude_none=True)),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = api.responses.create(model=options["model"], input=given, tools=[NAMESPACE], max_output_tokens=4)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4


def test_a_custom_tool_gets_text(api: openai.OpenAI, options: dict[str, Any]) -> None:
    choice: Any = {"type": "custom", "name": "patch"}
    # A random model never ends a text by itself: the limit does, in the middle of it.
    asked = {**options, "tools": [PATCH], "tool_choice": choice, "max_output_tokens": 150}
    found = api.responses.create(**asked)
    (call,) = [item for item in found.output if item.type == "custom_tool_call"]
    assert call.name == "patch"
    assert call.id is not None
    assert call.id.startswith("ctc")
    events = list(api.responses.create(**asked, stream=True))
    pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(pieces) == done.input
    (added,), (ended,) = items(events, "added"), items(events, "done")
    assert (added["type"], added["input"]) == ("custom_tool_call", "")
    assert ended["input"] == done.input
    given: Any = [
        {"role": "user", "content": "Change it."},
        {"type": "custom_tool_call", "call_id": call.call_id, "name": "patch", "input": 'a "quoted" line\n'},
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"},
    ]
    answer = api.responses.create(model=options["model"], input=given, tools=[PATCH], max_output_tokens=4)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4


def test_the_input_of_a_custom_tool_is_the_text_of_its_argument() -> None:
    tool = GivenTool("patch", custom=True)
    assert tool.called('{"input": "a \\"line\\"\\n"}') == {"name": "patch", "input": 'a "line"\n'}
    assert tool.called('{"input": "a cut')["input"] == '{"input": "a cut', "as the model wrote it"
    assert tool.called('{"other": 1}')["input"] == '{"other": 1}'


def test_a_custom_tool_is_told_with_its_grammar() -> None:
    given = GivenTools.parse(Fields({"tools": [PATCH]}))
    (tool,) = given.functions
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert tool["function"]["description"].startswith("Changes files.")
    assert 'start: "x"' in tool["function"]["description"]


def test_names_of_namespaces_and_tools_are_joined() -> None:
    assert function_name("", "weather") == "weather"
    assert function_name("agents", "close") == "agents__close"
    assert function_name("mcp__sky__", "weather") == "mcp__sky__weather"
    long = function_name("n" * 60, "weather")
    assert len(long) == 64, "a longer name is allowed nowhere"
    assert long == function_name("n" * 60, "weather")
    assert long != function_name("n" * 60, "wind")


def test_calls_in_the_input_have_the_names_that_the_model_knows() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "weather", "namespace": "mcp__sky"}
    text = {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x\n"}
    searched = {"type": "web_search_call", "id": "3", "status": "completed"}
    (message,) = chat_messages(Fields({"input": [call, text, searched]}))
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "mcp__sky__weather", "arguments": "{}"}
    assert second["function"] == {"name": "patch", "arguments": '{"input": "x\\n"}'}
    with pytest.raises(ApiError, match=r"input\[0\]\.name"):
        chat_messages(Fields({"input": [{"type": "function_call", "call_id": "1"}]}))


@pytest.mark.parametrize(
    "kind", ["web_search", "web_search_preview", "web_search_2025_08_26", "image_generation", "tool_search"]
)
def test_tools_that_servers_run_are_not_told(client: httpx.Client, kind: str) -> None:
    hosted = {"type": kind, "external_web_access": False}
    given = GivenTools.parse(Fields({"tools": [hosted, WEATHER]}))
    assert [tool["function"]["name"] for tool in given.functions] == ["weather"]
    body = {"model": "demo", "input": "x", "max_output_tokens": 2, "tools": [hosted, WEATHER]}
    assert client.post("/v1/responses", json=body).status_code == 200
    demanded = client.post("/v1/responses", json={**body, "tools": [hosted], "tool_choice": "required"})
    assert demanded.status_code == 400
    assert "there are no tools" in demanded.json()["error"]["message"]
    named = client.post("/v1/responses", json={**body, "tool_choice": {"type": kind}})
    assert named.status_code == 400


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        ({"type": "mcp", "server_url": "http://x"}, "tools[0]"),
        ({"type": "local_shell"}, "tools[0]"),
        ({"name": "x"}, "tools[0]"),
        (5, "tools[0]"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "namespace", "tools": []}, "tools[0].name"),
        ({"type": "namespace", "name": "x"}, "tools[0].tools"),
        ({"type": "namespace", "name": "x", "tools": [{"type": "namespace"}]}, "tools[0].tools[0]"),
        ({"type": "namespace", "name": "x", "tools": [{"type": "function"}]}, "tools[0].tools[0].name"),
        ({"type": "namespace", "name": "x", "tools": [{**WEATHER, "name": "a b"}]}, "tools[0].tools[0].name"),
        ({"type": "namespace", "name": "x", "tools": [WEATHER, WEATHER]}, "tools[0].tools[1].name"),
    ],
)
def test_a_wrong_tool_is_named(client: httpx.Client, tool: Any, place: str) -> None:
    body = {"model": "demo", "input": "x", "max_output_tokens": 2, "tools": [tool]}
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == place


def test_a_picture_in_the_result_of_a_tool_is_left_out_and_named() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    parts = [{"type": "input_text", "text": "a screen "}, picture]
    given = {"type": "function_call_output", "call_id": "1", "output": parts}
    (message,) = chat_messages(Fields({"input": [given]}))
    assert message["role"] == "tool"
    assert message["content"] == "a screen [pictures left out: this model reads text only]"
    for parts in ([picture], [{"type": "surprise"}]):
        with pytest.raises(ApiError, match="text only"):
            chat_messages(Fields({"input": [{"role": "user", "content": parts}]}))
    with pytest.raises(ApiError, match="text only"):
        chat_messages(Fields({"input": [{**given, "output": [{"type": "surprise"}]}]}))
