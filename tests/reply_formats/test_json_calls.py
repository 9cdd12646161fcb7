"""Calls that are JSON objects, as Hermes and Qwen write them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reply_support import CUTS, TOOLS, divided, parse, parse_tokens, same_however_divided

from moechat.reply_formats import FORMATS, ReplyParser, Text, merged, whole_reply
from moechat.reply_formats.events import Call, CallArguments, CallBegin, CallBroken, CallEnd

HERMES = FORMATS["hermes"]


def call(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_call_is_read_however_it_is_divided() -> None:
    events = same_however_divided(HERMES, "Let me see.\n" + call('{"city": "Paris", "days": 2}') + "\n")
    assert events == [
        Text("Let me see."),
        CallBegin(0, "get_weather"),
        CallArguments(0, '{"city": "Paris", "days": 2}'),
        CallEnd(0),
    ]


def test_parallel_calls_are_numbered() -> None:
    reply = whole_reply(parse(HERMES, call('{"city": "Rome"}') + "\n" + call("{}", "now")))
    assert reply.calls == (Call("get_weather", '{"city": "Rome"}'), Call("now", "{}"))
    assert reply.text == ""


def test_several_objects_and_arrays_behind_one_mark_are_calls() -> None:
    for inside in ('{"name": "now"}\n{"name": "now"}', '[{"name": "now"}, {"name": "now"}]'):
        assert len(whole_reply(parse(HERMES, f"<tool_call>{inside}</tool_call>")).calls) == 2


def test_arguments_come_while_they_are_written() -> None:
    parser = ReplyParser(HERMES, TOOLS)
    assert parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa') == [
        CallBegin(0, "get_weather"),
        *(CallArguments(0, piece) for piece in ("{", '"', "city", '"', ": ", '"', "Pa")),
    ]
    assert parser.feed("ris") == [CallArguments(0, "ris")]


def test_a_thought_is_separated_and_a_call_ends_it() -> None:
    events = same_however_divided(HERMES, "<think>\nhm " + call("{}", "now"))
    assert events == [
        Text("\nhm ", thought=True),
        CallBegin(0, "now"),
        CallArguments(0, "{}"),
        CallEnd(0),
    ]
    after = parse(HERMES, "hm</think>\n\nyes", thinking=True)
    assert after == [Text("hm", thought=True), Text("yes")]


def test_an_empty_thought_is_none() -> None:
    assert same_however_divided(HERMES, "<think>\n\n</think>\n\nyes") == [Text("yes")]
    assert same_however_divided(HERMES, "\n</think>yes", thinking=True) == [Text("yes")]
    assert same_however_divided(HERMES, "<think>\n a \n</think>") == [Text("\n a \n", thought=True)]


def test_a_long_reply_takes_time_in_proportion_to_its_length() -> None:
    # Copies of all text so far at each piece would take minutes.
    piece = "The quick brown fox <b> jumps. " * 8
    parser = ReplyParser(HERMES, TOOLS)
    events = [event for _ in range(40_000) for event in parser.feed(piece)]
    assert whole_reply([*events, *parser.end()]).text == piece * 40_000


def test_a_thought_that_the_prompt_and_the_model_open_is_one() -> None:
    assert same_however_divided(HERMES, "<think>hm</think>a", thinking=True) == [
        Text("hm", thought=True),
        Text("a"),
    ]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"city": "x"}, "name": "f"}', '{"city": "x"}'),
        ('{"name": "f", "parameters": {"city": "x"}}', '{"city": "x"}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"city\\": \\"x\\"}"}', '{"city": "x"}'),
        ('{"name": "f", "arguments": {"city": "a\nb"}}', '{"city": "a\\nb"}'),
        ('{"id": "7", "type": "function", "name": "f", "arguments": {}}', "{}"),
        ('{"name": "f", "arguments": {"a": [1, -2.5e+3, {"b": [true, null]}]}', None),
    ],
)
def test_the_forms_that_models_write_are_read(written: str, arguments: str | None) -> None:
    events = same_however_divided(HERMES, f"<tool_call>{written}</tool_call>")
    (found,) = whole_reply(events).calls
    assert found.name == "f"
    assert found.arguments == (arguments or '{"a": [1, -2.5e+3, {"b": [true, null]}]}')
    json.loads(found.arguments)


def test_a_call_without_its_last_mark_is_complete_at_the_end_of_the_reply() -> None:
    for left_out in range(len("}\n</tool_call>") + 1):
        text = call('{"city": "x"}')
        assert whole_reply(parse(HERMES, text[: len(text) - left_out])).calls, left_out


@pytest.mark.parametrize("brace", ["}", ""])
@pytest.mark.parametrize("length", range(1, len("</tool_call>") + 1))
def test_a_part_of_the_last_mark_is_no_text(brace: str, length: int) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {{}}{brace}\n' + "</tool_call>"[:length]
    reply = whole_reply(same_however_divided(HERMES, text))
    assert (reply.calls, reply.text) == ((Call("now", "{}"),), "")


def test_only_a_part_of_the_last_mark_at_the_end_is_dropped() -> None:
    for text in (" see </tool", "</tool was it", "</tools", "<b"):
        assert whole_reply(same_however_divided(HERMES, call("{}", "now") + text)).text == text.lstrip()
    assert whole_reply(parse(HERMES, "see </tool")).text == "see </tool"


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "hello",
        "{",
        '{"name": ""}',
        '{"name": 5}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "no"}',
        '{"name": "f", "other": {}}',
        '{"name": "f" "arguments": {}}',
    ],
)
def test_a_malformed_call_stays_text_and_the_next_is_read(inside: str) -> None:
    text = f"a <tool_call>{inside}</tool_call> b"
    assert same_however_divided(HERMES, text) == [Text(text)]
    reply = whole_reply(parse(HERMES, text + call("{}", "now")))
    assert (reply.text, [found.name for found in reply.calls]) == (text, ["now"])


def test_a_call_that_breaks_within_its_arguments_is_reported_with_its_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call>'
    events = same_however_divided(HERMES, text + call("{}", "now"))
    assert events[:3] == [
        CallBegin(0, "f"),
        CallArguments(0, '{"a": 1, '),
        CallBroken(0, '<tool_call>{"name": "f", "arguments": {"a": 1, '),
    ]
    assert [event for event in events if isinstance(event, CallEnd)] == [CallEnd(1)]
    assert whole_reply(events).text == text


def test_held_calls_are_never_broken() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call>'
    events = same_however_divided(HERMES, text + call("{}", "now"), hold_calls=True)
    assert events == [Text(text), CallBegin(0, "now"), CallArguments(0, "{}"), CallEnd(0)]


def test_without_tools_calls_stay_text() -> None:
    text = call("{}", "now")
    assert parse(HERMES, text, tools=()) == [Text(text)]


def test_marks_that_are_special_tokens_are_read_and_others_ignored() -> None:
    text = "<think>hm</think>ok" + call("{}", "now") + "<|im_end|>"
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"]
    assert parse_tokens(HERMES, text, marks) == parse(HERMES, text.removesuffix("<|im_end|>"))


def test_a_thinking_mark_out_of_place_is_dropped_if_special_and_text_otherwise() -> None:
    parser = ReplyParser(HERMES, TOOLS)
    events = [*parser.feed("a"), *parser.special("<think>"), *parser.feed("<think>b"), *parser.end()]
    assert merged(events) == [Text("a<think>b")]


def test_deep_nesting_is_no_call() -> None:
    deep = "[" * 500 + "]" * 500
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}</tool_call>'
    assert parse(HERMES, text, hold_calls=True) == [Text(text)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), CUTS)
def test_arguments_arrive_as_they_were_written(
    arguments: dict[str, object], ascii_only: bool, cuts: list[int]
) -> None:
    text = call(json.dumps(arguments, ensure_ascii=ascii_only, indent=1))
    events = parse(HERMES, divided(text, cuts))
    (found,) = whole_reply(events).calls
    assert json.loads(found.arguments) == arguments
    if not ascii_only:
        assert found.arguments == json.dumps(arguments, ensure_ascii=False)


WRITTEN = """<tool_call> </tool_call> {"name":"now" ,"arguments":{ "a":"b " } }} <think> </think> x <
{"name":"f","arguments":{"k":[1,"v"]}}"""
PIECES = st.lists(st.sampled_from([*WRITTEN.split(), "\n"]), max_size=12)


@given(PIECES, CUTS)
def test_nothing_is_lost_and_the_division_does_not_matter(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    events = parse(HERMES, text)
    assert parse(HERMES, divided(text, cuts)) == events
    assert parse(HERMES, list(text)) == events
    held = parse(HERMES, text, hold_calls=True)
    assert not any(isinstance(event, CallBroken) for event in held)
    for reply in (whole_reply(events), whole_reply(held)):
        for found in reply.calls:
            json.loads(found.arguments)
        if not reply.calls:
            kept = "".join((reply.thinking + reply.text).split())
            lost = "".join(text.split()).removeprefix("<think>")
            assert sorted(kept) in (sorted(lost), sorted(lost.replace("</think>", "", 1)))
