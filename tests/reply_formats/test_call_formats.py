"""Every format of calls: as models write it, however it is divided, and what is no call."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reply_support import (
    CUTS,
    TOOLS,
    call_marks,
    divided,
    parse,
    parse_cut,
    parse_tokens,
    same_however_divided,
)

from moechat.reply_formats import (
    FORMATS,
    CallBegin,
    CallEnd,
    ReplyFormat,
    ReplyParser,
    Text,
    detect,
    merged,
    whole_reply,
)
from moechat.reply_formats.events import Call, CallArguments, CallBroken
from moechat.reply_formats.values import ALL_TYPES, type_name, typed_value

ARGUMENTS = '{"city": "Paris", "days": 3, "place": {"street": "x"}}'
CALLS = (Call("get_weather", ARGUMENTS), Call("now", "{}"))
SECOND = '{"name": "now", "arguments": {}, "id": "123456789"}'
JSON_ARRAY = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {SECOND}]'


def dsml(block: str, space: str = "") -> str:
    mark = f"｜DSML｜{space}"
    return f"""Sure.

<{mark}{block}>
<{mark}invoke name="get_weather">
<{mark}parameter name="city" string="true">Paris</{mark}parameter>
<{mark}parameter name="days" string="false">3</{mark}parameter>
<{mark}parameter name="place" string="false">{{"street": "x"}}</{mark}parameter>
</{mark}invoke>
<{mark}invoke name="now">
</{mark}invoke>
</{mark}{block}>"""


# Two calls, as each format's models write them; the second is of a tool without parameters.
WRITTEN = [
    (
        "qwen-xml",
        """Sure.
<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
<parameter=days>
3
</parameter>
<parameter=place>
{"street": "x"}
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>""",
    ),
    (
        "glm",
        """Sure.
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>place</arg_key>
<arg_value>{"street": "x"}</arg_value>
</tool_call>
<tool_call>now
</tool_call>""",
    ),
    (
        "glm",
        "Sure.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
        '<arg_value>3</arg_value><arg_key>place</arg_key><arg_value>{"street": "x"}</arg_value></tool_call>'
        "<tool_call>now</tool_call>",
    ),
    (
        "hunyuan",
        """Sure.<tool_calls>
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>place</arg_key>
<arg_value>{"street": "x"}</arg_value>
</tool_call>
<tool_call>now
</tool_call>
</tool_calls>""",
    ),
    (
        "minimax",
        """Sure.
<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
<parameter name="days">3</parameter>
<parameter name="place">{"street": "x"}</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>""",
    ),
    (
        "ernie",
        f"""Sure.
<tool_call>
{{"name": "get_weather", "arguments": {ARGUMENTS}}}
</tool_call>
<tool_call>
{{"name": "now", "arguments": {{}}}}
</tool_call>""",
    ),
    (
        "minimax-m3",
        """Sure.]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>
]<]minimax[>[<days>3]<]minimax[>[</days>
]<]minimax[>[<place>]<]minimax[>[<street>x]<]minimax[>[</street>]<]minimax[>[</place>]<]minimax[>[</invoke>
]<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>""",
    ),
    (
        "longcat-tags",
        """Sure.
<longcat_tool_call>get_weather
<longcat_arg_key>city</longcat_arg_key>
<longcat_arg_value>Paris</longcat_arg_value>
<longcat_arg_key>days</longcat_arg_key>
<longcat_arg_value>3</longcat_arg_value>
<longcat_arg_key>place</longcat_arg_key>
<longcat_arg_value>{"street": "x"}</longcat_arg_value>
</longcat_tool_call>
<longcat_tool_call>now
</longcat_tool_call>""",
    ),
    (
        "seed",
        """Sure.
<seed:tool_call>
<function=get_weather>
<parameter=city>Paris</parameter>
<parameter=days>3</parameter>
<parameter=place>{"street": "x"}</parameter>
</function>
</seed:tool_call>
<seed:tool_call>
<function=now>
</function>
</seed:tool_call>""",
    ),
    ("deepseek-v3.2", dsml("function_calls")),
    ("deepseek-v4", dsml("tool_calls")),
    ("deepseek-v4.1", dsml("calls", " ")),
    (
        "deepseek-v4",
        f"""Sure.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="get_weather">
{ARGUMENTS}
</｜DSML｜invoke>
<｜DSML｜invoke name="now">
{{}}
</｜DSML｜invoke>
</｜DSML｜tool_calls>""",
    ),
    (
        "deepseek-v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather"
        f"\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    (
        "deepseek-v3.1",
        f"Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "kimi",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    ("mistral", f"Sure.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}"),
    ("mistral", f"Sure.[TOOL_CALLS]get_weather{ARGUMENTS}[TOOL_CALLS]now{{}}"),
    ("mistral", f"Sure.[TOOL_CALLS]{JSON_ARRAY}"),
    ("mistral-json", f"Sure.[TOOL_CALLS] {JSON_ARRAY}"),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>Sure.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    ),
    (
        "gemma",
        'Sure.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,place:{street:<|"|>x<|"|>}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
    ),
    (
        "function-gemma",
        "Sure.<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3,"
        "place:{<escape>street<escape>:<escape>x<escape>}}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
    ),
    (
        "lfm2",
        'Sure.<|tool_call_start|>[get_weather(city=\'Paris\', days=3, place={"street": "x"}), now()]'
        "<|tool_call_end|>",
    ),
    ("lfm2", f"Sure.<|tool_call_start|>{JSON_ARRAY}<|tool_call_end|>"),
    (
        "olmo3",
        'Sure.<function_calls>get_weather(city="Paris", days=3, place={"street": "x"})\n'
        "now()</function_calls>",
    ),
    (
        "llama4",
        'Sure.<|python_start|>[get_weather(city="Paris",days=3,place={"street":"x"}),now()]<|python_end|>',
    ),
    ("llama3", f'Sure.<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "now"}}'),
    ("nemotron", f"Sure.<TOOLCALL>{JSON_ARRAY}</TOOLCALL>"),
    ("tool-calls", f"Sure.\n<tool_calls>{JSON_ARRAY}</tool_calls>"),
    ("granite", f"Sure.<|tool_call|>{JSON_ARRAY}"),
    ("phi4", f"Sure.<|tool_call|>{JSON_ARRAY}<|/tool_call|>"),
    (
        "gigachat",
        f'Sure.<|function_call|>{{"name": "get_weather", "arguments": {ARGUMENTS}}}{{"name": "now"}}',
    ),
    (
        "longcat",
        f'Sure.<longcat_tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</longcat_tool_call>'
        '<longcat_tool_call>{"name": "now"}</longcat_tool_call>',
    ),
    (
        "cohere",
        'Sure.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f"{ARGUMENTS}}},\n"
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    ),
]
EACH = pytest.mark.parametrize(("name", "text"), WRITTEN)


def test_every_format_has_a_sample() -> None:
    formats = {name for name, found in FORMATS.items() if found.calls is not None}
    assert formats == {"hermes", *(name for name, _ in WRITTEN)}  # for hermes see test_json_calls.py


@EACH
def test_calls_are_read_however_they_are_divided(name: str, text: str) -> None:
    reply = whole_reply(same_however_divided(FORMATS[name], text))
    assert reply.text == "Sure."
    assert [(call.name, call.arguments) for call in reply.calls] == [
        (call.name, call.arguments) for call in CALLS
    ]


@EACH
def test_marks_may_be_special_tokens(name: str, text: str) -> None:
    special = call_marks(FORMATS[name])
    assert special
    assert parse_tokens(FORMATS[name], text, special) == parse(FORMATS[name], text)


@EACH
def test_held_calls_are_the_same(name: str, text: str) -> None:
    assert parse(FORMATS[name], text, hold_calls=True) == parse(FORMATS[name], text)


@EACH
def test_a_cut_reply_has_no_call_that_was_not_written(name: str, text: str) -> None:
    for length in range(len(text)):
        events = parse(FORMATS[name], text[:length], hold_calls=True)
        reply = whole_reply(events)
        assert list(reply.calls) == list(whole_reply(parse(FORMATS[name], text)).calls)[: len(reply.calls)]
        assert not any(isinstance(event, CallBroken) for event in events)


HERMES = (
    "hermes",
    f'Sure.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
)


@pytest.mark.parametrize(("name", "text"), [HERMES, *WRITTEN])
@pytest.mark.parametrize("hold", [False, True])
def test_a_call_that_a_limit_cuts_leaves_no_part_of_it_in_the_text(name: str, text: str, hold: bool) -> None:
    found = FORMATS[name]
    whole = whole_reply(parse(found, text))
    for length in range(len(text)):
        events = parse_cut(found, text[:length], hold_calls=hold)
        assert parse_cut(found, list(text[:length]), hold_calls=hold) == events
        shown = "".join(event.text for event in events if isinstance(event, Text))
        # One or two characters may be the beginning of a mark, or an answer's own.
        assert re.fullmatch(r"(Sure\.|S|Su|Sur|Sure|)\s*([<\[\]].?)?", shown), (length, shown)
        assert list(whole_reply(events).calls) == list(whole.calls)[: len(whole_reply(events).calls)]
        begun = [event for event in events if isinstance(event, CallBegin)]
        ended = [event for event in events if isinstance(event, CallEnd | CallBroken)]
        assert len(begun) == len(ended)


@pytest.mark.parametrize(("name", "text"), [HERMES, *WRITTEN])
def test_marks_that_are_special_tokens_are_dropped_where_a_limit_cuts_behind_them(
    name: str, text: str
) -> None:
    special = call_marks(FORMATS[name])
    pieces = [piece for piece in re.split(f"({'|'.join(map(re.escape, special))})", text) if piece]
    for count in range(1, len(pieces)):
        events = parse_cut(FORMATS[name], pieces[:count], special)
        shown = "".join(event.text for event in events if isinstance(event, Text))
        # DeepSeek writes `<` before its special token: that alone may be an answer's own.
        assert shown.removesuffix("<").strip() in ("Sure.", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Write <tool_call> before"),
        ("hermes", "a <tool_call>[1] is"),
        ("hermes", 'a <tool_call>{"x": 1}'),
        ("glm", "Write <tool_call> and then the name"),
        ("qwen-xml", "The frame <tool_call> stands around <function=name of it"),
        ("mistral", "[TOOL_CALLS] is a mark"),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜> is a mark"),
        ("kimi", "<|tool_call_begin|> is a mark"),
        ("gemma", "<|tool_call>call me"),
        ("lfm2", "<|tool_call_start|>a + b"),
        ("hermes", "if a <"),
        ("hermes", "the tag <table"),
        ("qwen-xml", "a <f"),
        ("llama3", '{"name": "Bob", "par'),
        ("llama3", '{"name": "n'),
        ("llama3", '{"temperature": 2'),
        ("llama4", "[1, 2"),
        ("llama4", "[later(a"),
    ],
)
def test_text_that_is_no_call_stays_where_a_limit_cuts_it(name: str, text: str) -> None:
    assert parse_cut(FORMATS[name], text) == [Text(text)]
    assert parse_cut(FORMATS[name], list(text)) == [Text(text)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '{"name": "get_wea'),
        ("llama3", '{"name": "get_weather", "par'),
        ("llama3", '{"type": "function", "name": "now"'),
        ("llama4", "[get_wea"),
        ("llama4", '[get_weather(city="New Yo'),
    ],
)
def test_a_call_without_a_mark_is_dropped_if_it_names_a_tool(name: str, text: str) -> None:
    assert parse_cut(FORMATS[name], text) == []
    assert parse(FORMATS[name], text) == [Text(text)]  # not cut by a limit


def test_without_tools_nothing_is_dropped() -> None:
    parser = ReplyParser(FORMATS["hermes"])
    events = [*parser.feed('see <tool_call>{"name": '), *parser.feed("<tool_ca"), *parser.end(cut=True)]
    assert merged(events) == [Text('see <tool_call>{"name": <tool_ca')]


@EACH
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_replies_give_the_same_events_however_divided(
    name: str, text: str, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(begin, min(len(text), begin + 12)))
    damaged = (
        text[:begin] + data.draw(st.sampled_from(["", "<", "x", '"', "}", " ", text[:end]])) + text[end:]
    )
    cuts = data.draw(CUTS)
    events = parse(FORMATS[name], damaged)
    assert parse(FORMATS[name], divided(damaged, cuts)) == events
    held = parse(FORMATS[name], damaged, hold_calls=True)
    for call in (*whole_reply(events).calls, *whole_reply(held).calls):
        assert isinstance(json.loads(call.arguments), dict)
    if not whole_reply(held).calls and name != "gpt-oss":  # whose headers are not text
        kept = "".join(event.text for event in held if isinstance(event, Text))
        assert re.sub(r"\s", "", kept) == re.sub(r"\s", "", damaged)


@pytest.mark.parametrize("separator", ["", "<tool_sep:6f>"])
def test_hunyuans_marks_have_the_suffix_of_the_checkpoint(separator: str) -> None:
    text = (
        f"<think:6f>hm</think:6f>Sure.<tool_calls:6f><tool_call:6f>get_weather{separator}<arg_key:6f>city</arg_key:6f>"
        "<arg_value:6f>Paris</arg_value:6f></tool_call:6f></tool_calls:6f>"
    )
    found = detect(None, ["<tool_calls:6f>", "<arg_key:6f>", *filter(None, [separator])])
    assert found.name == "hunyuan:6f"
    reply = whole_reply(same_however_divided(found, text))
    assert (reply.thinking, reply.text, reply.calls) == (
        "hm",
        "Sure.",
        (Call("get_weather", '{"city": "Paris"}'),),
    )


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("<units>@<item>a@</item> @<item><b>@</item>@</units>", "units", ["a", "<b>"]),
        ("<units>@</units>", "units", []),
        ('<units>["a"]@</units>', "units", ["a"]),
        ("<place>@</place>", "place", {}),
        ("<city>@</city>", "city", ""),
        ("<city> a <b> @</city>", "city", " a <b> "),
        ("<days>1400.0@</days>", "days", 1400),
        ("<note>null@</note>", "note", None),
        ("<other>@<item>@<k>1@</k>@</item>@</other>", "other", [{"k": 1}]),
        ("<other>@<k>true@</k>@</other>", "other", {"k": True}),
    ],
)
def test_nested_elements_become_json(written: str, key: str, value: object) -> None:
    mark = "]<]minimax[>["
    elements = f"{mark}{written.replace('@', mark)}"
    text = f'{mark}<tool_call>{mark}<invoke name="get_weather">{elements}{mark}</invoke>{mark}</tool_call>'
    (call,) = whole_reply(same_however_divided(FORMATS["minimax-m3"], text)).calls
    assert json.loads(call.arguments) == {key: value}


@pytest.mark.parametrize(
    "elements", ["<a>1@</b>", "<a>1", "<a>@<b>1@</a>", "</a>", "<>@</>", "<a>1@</a>@<a>2@</a>"]
)
def test_elements_that_do_not_match_are_no_call(elements: str) -> None:
    mark = "]<]minimax[>["
    text = f'{mark}<invoke name="now">{mark}{elements.replace("@", mark)}{mark}</invoke>'
    assert same_however_divided(FORMATS["minimax-m3"], text, hold_calls=True) == [Text(text)]


def test_kimi_and_mistral_give_ids() -> None:
    ids = {
        name: [event.call_id for event in parse(FORMATS[name], text) if isinstance(event, CallBegin)]
        for name, text in reversed(WRITTEN)
        if name in ("kimi", "mistral")
    }
    assert ids == {"kimi": ["functions.get_weather:0", "functions.now:1"], "mistral": [None, "123456789"]}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("\nParis\n", "Paris"),
        ("Paris", "Paris"),
        ("\n\n a \n\n", "\n a \n"),
        ("", ""),
        ("3", "3"),
        ("true", "true"),
        ('{"a": 1}', '{"a": 1}'),
        ('say "hi"\\n', 'say "hi"\\n'),
        ("</parameter>", "</parameter>"),
        ("a</parameter> b </function>", "a</parameter> b </function>"),
        ("<parameter=x>", "<parameter=x>"),
        ("é \U0001f600", "é \U0001f600"),
    ],
)
def test_a_string_stays_as_it_was_written(written: str, value: str) -> None:
    begin, end = "<tool_call>\n<function=get_weather>\n", "\n</function>\n</tool_call>"
    text = f"{begin}<parameter=city>{written}</parameter>{end}"
    (call,) = whole_reply(same_however_divided(FORMATS["qwen-xml"], text)).calls
    assert json.loads(call.arguments) == {"city": value}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("days", "3", 3),
        ("days", "3.0", 3),
        ("days", "three", "three"),
        ("height", "2", 2),
        ("height", "2.5", 2.5),
        ("wind", "true", True),
        ("wind", "True", True),
        ("units", '["a", "b"]', ["a", "b"]),
        ("units", "['a', 'b']", ["a", "b"]),
        ("place", "{'street': None}", {"street": None}),
        ("place", "{'street", "{'street"),
        ("note", "null", None),
        ("note", "5", "5"),
        ("unknown", "5", 5),
        ("unknown", "[1]", [1]),
        ("unknown", "five", "five"),
        ("unknown", "NaN", "NaN"),
        ("unknown", "[1e999]", "[1e999]"),
        ("height", "1e999", "1e999"),
        ("days", "9" * 5000, "9" * 5000),
    ],
)
def test_values_are_typed_by_the_schema(key: str, written: str, value: object) -> None:
    text = f"<tool_call>get_weather\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    (call,) = whole_reply(same_however_divided(FORMATS["glm"], text)).calls
    found = json.loads(call.arguments)[key]
    assert (found, type(found)) == (value, type(value))


NEAR_JSON = st.text(st.sampled_from("0123456789eE.-+[]{}:,\"'\\ ntfaNIul()b")) | st.text()


@settings(deadline=None)
@given(text=NEAR_JSON, types=st.frozensets(st.sampled_from(sorted(ALL_TYPES)), min_size=1))
def test_any_text_is_a_value_that_json_can_hold(text: str, types: frozenset[str]) -> None:
    value = typed_value(text, types)
    json.dumps(value, allow_nan=False)
    assert (
        value == text
        or type_name(value) in types
        or (type_name(value), "number" in types) == ("integer", True)
    )


@pytest.mark.parametrize(
    "text",
    [
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>",
    ],
)
def test_tags_that_models_leave_out_are_not_needed(text: str) -> None:
    assert whole_reply(same_however_divided(FORMATS["qwen-xml"], text)).calls == (
        Call("get_weather", '{"city": "Paris"}'),
    )


def test_strings_in_tags_come_while_they_are_written() -> None:
    parser = ReplyParser(FORMATS["qwen-xml"], TOOLS)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.feed("Par") == [CallArguments(0, "Par")]
    assert parser.feed("is\n") == [CallArguments(0, "is")]


@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "parameters": {}}', '{"name": "now"}', '{"a": 1}', "[1, 2]", "[]"]
)
def test_an_answer_in_json_is_no_call_unless_it_names_a_tool_with_arguments(text: str) -> None:
    assert same_however_divided(FORMATS["llama3"], text) == [Text(text)]


def test_calls_without_a_mark_are_read_at_the_beginning_only() -> None:
    call = '{"name": "now", "parameters": {}}'
    assert same_however_divided(FORMATS["llama3"], call) == [
        CallBegin(0, "now"),
        CallArguments(0, "{}"),
        CallEnd(0),
    ]
    assert parse(FORMATS["llama3"], f"Look: {call}") == [Text(f"Look: {call}")]
    assert whole_reply(same_however_divided(FORMATS["llama4"], "[now(), now()]")).calls == (CALLS[1],) * 2
    assert parse(FORMATS["llama4"], "[later()]") == [Text("[later()]")]


@EACH
def test_a_call_ends_a_thought_and_its_frame_is_no_thinking(name: str, text: str) -> None:
    found = FORMATS[name]
    if found.thoughts:
        events = parse(found, f"{found.thoughts[0].open}hm {text.removeprefix('Sure.')}")
        assert events[0].text.rstrip() == "hm"  # type: ignore[union-attr]
        assert len(whole_reply(events).calls) == 2


def test_a_frame_without_a_call_stays_in_the_thought() -> None:
    text = "<think>a <tool_call>\n b</think>c"
    assert same_however_divided(FORMATS["qwen-xml"], text) == [
        Text("a <tool_call>\n b", thought=True),
        Text("c"),
    ]
    assert parse(FORMATS["qwen-xml"], "<think>a<tool_call> </think>c")[0] == Text(
        "a<tool_call> ", thought=True
    )


@pytest.mark.parametrize("found", FORMATS.values(), ids=lambda found: found.name)
def test_no_mark_of_a_format_is_part_of_another(found: ReplyFormat) -> None:
    marks = [mark for thought in found.thoughts for mark in (thought.open, thought.close)]
    if found.calls is not None:
        marks += [*found.calls.begins, *found.calls.frames, *found.calls.closers]
    marks = list(dict.fromkeys(marks))
    assert all(marks)
    assert [(a, b) for a in marks for b in marks if a != b and a in b] == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("hm\n</think>\n\n<response>\na\nb\n</response>\n", "a\nb"),
        ("hm\n</think>\na <response> b", "a <response> b"),
        ("hm\n</think><response>a", "a"),
        ("hm\n</think>a</response>", "a</response>"),
        ("hm\n</think>\n\n<response>\n</response>\n", ""),
    ],
)
def test_marks_around_an_answer_are_dropped(text: str, answer: str) -> None:
    reply = whole_reply(same_however_divided(FORMATS["ernie"], text, thinking=True))
    assert (reply.thinking, reply.text) == ("hm\n", answer)


def test_the_end_of_a_thought_that_a_call_has_ended_is_dropped() -> None:
    text = '<think>hm <tool_call>{"name": "now"}</tool_call>\n</think>\n\nyes </think>'
    reply = whole_reply(same_however_divided(FORMATS["hermes"], text))
    assert (reply.thinking, reply.text, reply.calls) == ("hm ", "yes </think>", (CALLS[1],))


def test_channels_are_separated() -> None:
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    text = f"{thought}<|channel|>final<|message|>yes <|channel|>?<|return|>"
    assert parse(FORMATS["gpt-oss"], text)[:2] == [Text("hm", thought=True), Text("yes ")]
    without_header = "hi<|end|><|start|>assistant<|channel|>analysis<|message|>hm"
    assert parse(FORMATS["gpt-oss"], without_header) == [Text("hi"), Text("hm", thought=True)]
    in_role = " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    assert whole_reply(same_however_divided(FORMATS["gpt-oss"], in_role)).calls == (CALLS[1],)


def test_a_message_to_a_tool_that_is_no_json_stays_text() -> None:
    text = "<|channel|>commentary to=python<|message|>print(1)<|call|>"
    assert "print(1)" in whole_reply(same_however_divided(FORMATS["gpt-oss"], text)).text


def test_thoughts_of_mistral_and_gemma_may_come_later() -> None:
    parser = ReplyParser(FORMATS["mistral"], TOOLS)
    events = [*parser.feed("a "), *parser.special("[THINK]"), *parser.feed("hm"), *parser.special("[/THINK]")]
    events += [*parser.feed(" b [THINK] c"), *parser.end()]
    assert merged(events) == [Text("a "), Text("hm", thought=True), Text("b [THINK] c")]
    gemma = "<|channel>thought\nhm<channel|>yes"
    assert same_however_divided(FORMATS["gemma"], gemma) == [Text("hm", thought=True), Text("yes")]


def test_line_breaks_within_quotes_of_python_are_kept() -> None:
    text = '<|tool_call_start|>[get_weather(city="a\nb(\\"", note=None, wind=True, days=-3)]<|tool_call_end|>'
    (call,) = whole_reply(same_however_divided(FORMATS["lfm2"], text)).calls
    assert json.loads(call.arguments) == {"city": 'a\nb("', "note": None, "wind": True, "days": -3}


@pytest.mark.parametrize(
    "inside", ["f(1)", "f(a=b)", "f(**a)", "f(a=1, a=2)", "f(a=", "a + b", "f(a=1e999)", "1f()"]
)
def test_python_that_is_no_call_with_named_literals_stays_text(inside: str) -> None:
    text = f"<|tool_call_start|>[{inside}]<|tool_call_end|>"
    assert same_however_divided(FORMATS["lfm2"], text) == [Text(text)]
