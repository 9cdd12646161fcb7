"""Messages and tools of the chat API."""

from __future__ import annotations

from typing import Any

import pytest
from reply_support import WEATHER, function

from moechat.errors import UsageError
from moechat.reply_formats import FORMATS, new_call_id, to_template_messages, validated_tools
from moechat.reply_formats.values import types_of

USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "noon"}


def test_a_conversation_with_a_call_becomes_what_templates_take() -> None:
    assert to_template_messages([USER, CALLED, RESULT]) == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "now", "content": "noon"},
    ]


def test_the_input_is_not_changed() -> None:
    messages = [USER, CALLED, RESULT]
    to_template_messages(messages)
    assert CALLED["content"] is None
    assert CALL["function"] == {"name": "now", "arguments": '{"a": 1}'}


def test_templates_that_ask_for_none_get_none_as_content_beside_calls() -> None:
    template = "{% if message['role'] == 'assistant' and message['content'] is none %}"
    assert to_template_messages([USER, CALLED], chat_template=template)[1]["content"] is None


def test_parts_of_text_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert to_template_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_developer_stays_where_the_template_has_the_role() -> None:
    messages = [{"role": "developer", "content": "x"}, USER]
    assert to_template_messages(messages)[0]["role"] == "system"
    kept = to_template_messages(messages, chat_template="{% if role == 'developer' %}")
    assert kept[0]["role"] == "developer"


def test_system_messages_at_the_beginning_become_one() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, USER]
    assert to_template_messages(messages) == [{"role": "system", "content": "a\n\nb"}, USER]


def test_thinking_is_kept_under_the_name_of_the_template() -> None:
    for key in ("reasoning_content", "reasoning"):
        message = {"role": "assistant", "content": "yes", key: "hm"}
        assert to_template_messages([USER, message])[1]["reasoning_content"] == "hm"


def test_gpt_oss_gets_either_content_or_thinking_beside_calls() -> None:
    message = {**CALLED, "content": "Let me see.", "reasoning_content": "hm"}
    converted = to_template_messages([USER, message], format=FORMATS["gpt-oss"])[1]
    assert (converted["content"], converted["thinking"]) == ("", "hm\n\nLet me see.")


def test_arguments_stay_text_where_the_template_adds_them_to_text() -> None:
    template = "{{ '<call>' + call['function']['arguments'] + '</call>' }}"
    converted = to_template_messages([USER, CALLED], chat_template=template)[1]
    assert converted["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("hi", "messages is of type str"),
        ([], "messages is empty"),
        ([USER, "hi"], "messages[1] is of type str"),
        ([{"content": "x"}], "messages[0].role is None"),
        ([{"role": "function", "content": "x"}], "messages[0].role is 'function'"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content is of type int"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0] is of type int"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text is of type NoneType",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0] is a picture"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0] is sound"),
        ([{"role": "user", "content": [{"type": "zip"}]}], "messages[0].content[0].type is 'zip'"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name is of type int"),
        ([{"role": "assistant"}], "messages[0].content is missing"),
        ([{"role": "assistant", "tool_calls": CALL}], "messages[0].tool_calls is of type dict"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0] is of type int"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}], "messages[0].tool_calls[0].id is 1"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function is of"),
        ([USER, RESULT], "messages[1].tool_call_id is 'c1'; no call before it"),
        ([USER, CALLED, {"role": "tool", "content": "x"}], "messages[2].tool_call_id is None"),
        ([{"role": "assistant", "content": "x", "reasoning": 1}], "messages[0].reasoning_content is of"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(messages: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        to_template_messages(messages)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", 5, None])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    call = {**CALL, "function": {"name": "now", "arguments": arguments}}
    with pytest.raises(UsageError, match=r"messages\[0\].tool_calls\[0\].function.arguments"):
        to_template_messages([{"role": "assistant", "tool_calls": [call]}])


def test_ids_of_calls_are_new_each_time() -> None:
    assert len({new_call_id(FORMATS["hermes"]) for _ in range(100)}) == 100


def test_tools_are_read_in_their_order() -> None:
    tools = validated_tools([function("a", WEATHER), function("b")])
    assert [tool.name for tool in tools] == ["a", "b"]
    assert tools[0].schema_of("city") == {"type": "string"}
    assert tools[1].parameters == {"type": "object", "properties": {}}
    assert validated_tools(None) == ()


def test_references_in_schemas_are_resolved() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/none"}},
        "$defs": {"x": {"type": "integer"}},
    }
    (tool,) = validated_tools([function("f", parameters)])
    assert tool.schema_of("a") == {"type": "integer"}
    assert tool.schema_of("b") is None
    assert tool.schema_of("c") is None


def test_schemas_that_refer_to_themselves_have_types() -> None:
    itself = {"$ref": "#/$defs/x"}
    parameters = {
        "type": "object",
        "properties": {"a": itself, "b": {"anyOf": [itself, {"type": "null"}]}, "c": {"anyOf": [itself]}},
        "$defs": {"x": {"anyOf": [itself] * 100 + [{"anyOf": [itself] * 100 + [{"type": "integer"}]}]}},
    }
    (tool,) = validated_tools([function("f", parameters)])
    assert types_of(tool, "a") == {"integer"}
    assert types_of(tool, "b") == {"integer", "null"}
    assert types_of(tool, "c") == {"integer"}


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ({}, "tools is of type dict"),
        ([1], "tools[0] is of type int"),
        ([{"type": "web_search"}], "tools[0].type is 'web_search'"),
        ([{"type": "function"}], "tools[0].function is of type NoneType"),
        ([function("a b")], "tools[0].function.name is 'a b'"),
        ([function("a" * 65)], "tools[0].function.name is"),
        ([function("")], "tools[0].function.name is ''"),
        ([function("a"), function("a")], "tools[1].function.name is 'a', as that of tools[0]"),
        ([function("a", {"type": "array"})], "tools[0].function.parameters.type is 'array'"),
        ([function("a", 5)], "tools[0].function.parameters is of type int"),  # type: ignore[arg-type]
        ([function("a", {"properties": 5})], "tools[0].function.parameters.properties is of type int"),
        (
            [function("a", {"properties": {"x": 5}})],
            "tools[0].function.parameters.properties.x is of type int",
        ),
        ([function("a", {"required": "x"})], "tools[0].function.parameters.required must be"),
        (
            [{"type": "function", "function": {"name": "a", "description": 5}}],
            "tools[0].function.description",
        ),
        ([function(f"f{n}") for n in range(129)], "there are 129 tools"),
    ],
)
def test_what_is_wrong_with_a_tool_is_named_with_its_place(tools: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        validated_tools(tools)
    assert str(caught.value).startswith(text)
