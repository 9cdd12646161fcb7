"""Grammars of calls: what they accept, byte by byte, and what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from places import ROOT
from reply_support import TOOLS, WEATHER, call_marks, function, parse
from test_call_formats import WRITTEN
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moechat.errors import UsageError
from moechat.models.assets import load_tokenizer
from moechat.reply_formats import FORMATS, Tool, call_grammar, grammar_tokens, validated_tools, whole_reply

END = "<eos>"
M3 = "]<]minimax[>["
DEMO = ROOT / "moechat" / "hub" / "demo"
# In these formats the sample has a form that is read but not forced, or text within.
READ_ONLY = {
    "mistral": ("[CALL_ID]", "weather{", "[{"),
    "mistral-json": ("] [", '"id"'),
    "lfm2": ("'", '"id"'),
    "deepseek-v4": ("\n{",),
    "llama4": ("days=3,",),
    "llama3": ("<|python_tag|>",),
    "function-gemma": ("{<escape>",),
    "gigachat": ("}}{",),
    "longcat": ('"name": "now"}<',),
    "cohere": ("\n    {",),
    **dict.fromkeys(("nemotron", "tool-calls", "granite", "phi4"), ('"id"',)),
}


class Grammar:
    """A grammar over a tokenizer of bytes.

    Args:
        text: The grammar.
        special: Special tokens of the tokenizer.
    """

    def __init__(self, text: str, special: Sequence[str] = ()) -> None:
        self._tokenizer = byte_tokenizer(special)
        tokenizer = LLTokenizer(self._tokenizer.to_str(), eos_token=self._tokenizer.token_to_id(END))
        self._matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(text))
        assert not self._matcher.is_error(), self._matcher.get_error()
        # For random texts: printable ASCII and special tokens, those that end values more often.
        signs = {sign: 20 if sign in "\"'<>/]})" else 1 for sign in map(chr, range(33, 127))}
        weights = {**signs, "\u0120": 1, "\u010a": 1, **dict.fromkeys(special, 20)}
        self._weights = {self._tokenizer.token_to_id(sign): weight for sign, weight in weights.items()}

    def accepts(self, text: str) -> bool:
        """Whether the text, and nothing more, follows the grammar."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._matcher.reset()
        for token in tokens:
            if self._matcher.try_consume_tokens([token]) != 1:
                return False
        return self._matcher.is_accepting()

    def random_text(self, random: Random, most: int = 1200) -> str | None:
        """A random text that follows the grammar; ``None`` if it does not end soon."""
        self._matcher.reset()
        tokens: list[int] = []
        for _ in range(most):
            bits = int.from_bytes(self._matcher.compute_bitmask(), "little")
            allowed = [token for token in self._weights if bits >> token & 1]
            if self._matcher.is_accepting() and (not allowed or random.random() < 0.3):
                return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
            token = random.choices(allowed, [self._weights[token] for token in allowed])[0]
            assert self._matcher.consume_token(token)
            tokens.append(token)
        return None

    def may_begin(self, text: str) -> bool:
        """Whether the text is the beginning of one that follows the grammar."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._matcher.reset()
        return self._matcher.try_consume_tokens(tokens) == len(tokens)


def byte_tokenizer(special: Sequence[str]) -> Tokenizer:
    """A tokenizer with a token for each byte, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: token for token, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in (END, *special)]
    )
    return tokenizer


def grammar(name: str, *, special: bool, tools: Sequence[Tool] = TOOLS, **arguments: Any) -> Grammar:
    marks = call_marks(FORMATS[name]) if special else []
    tokenizer = byte_tokenizer(marks)
    added = {mark: tokenizer.token_to_id(mark) for mark in marks}
    return Grammar(
        call_grammar(FORMATS[name], tools, **arguments, tokens=grammar_tokens(added, marks)), marks
    )


def forced(name: str, text: str) -> str:
    """The calls of a sample without the text before them."""
    if name == "gpt-oss":
        return "<|channel|>" + text.split("<|channel|>")[2].split("<|start|>")[0]
    return text.removeprefix("Sure.")


SAMPLES = [
    (name, forced(name, text))
    for name, text in WRITTEN
    if not any(part in text for part in READ_ONLY.get(name, ()))
]
MORE = [
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}'),
    ("mistral-json", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'),
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="a", days=3, wind=True, units=["x"], note=None), now()]'
        "<|tool_call_end|>",
    ),
    ("llama4", '[get_weather(city="Paris", place={"street": "x"}), now()]'),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}'),
    (
        "function-gemma",
        "<start_function_call>call:get_weather{city:<escape>a<escape>,days:3,wind:true}<end_function_call>",
    ),
    ("gigachat", '<|function_call|>{"name": "now", "arguments": {}}<|message_sep|>'),
    ("longcat", '<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>'),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>'),
    ("nemotron", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>'),
    ("tool-calls", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>'),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]'),
    ("phi4", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>'),
]
EACH = pytest.mark.parametrize(("name", "text"), [*SAMPLES, *MORE])
SPECIAL = pytest.mark.parametrize("special", [False, True])


def test_every_format_is_tried() -> None:
    formats = {name for name, found in FORMATS.items() if found.calls is not None}
    assert {name for name, _ in (*SAMPLES, *MORE)} == formats


@EACH
@SPECIAL
def test_what_models_write_is_accepted_and_nothing_shorter(name: str, text: str, special: bool) -> None:
    checked = grammar(name, special=special)
    assert checked.accepts(text)
    assert not checked.accepts("")
    assert not checked.may_begin("Sure, the weather is fine.")
    assert not checked.accepts(text.replace("get_weather", "other").replace("now", "other"))


@EACH
def test_a_named_tool_excludes_the_others(name: str, text: str) -> None:
    assert not grammar(name, special=True, choice="now").may_begin(text.replace("now", "get_weather"))


@EACH
def test_only_one_call_without_parallel_ones(name: str, text: str) -> None:
    one = grammar(name, special=True, parallel=False)
    assert one.accepts(text) == (len(re.findall("get_weather|now", text)) == 1)


@SPECIAL
@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "seed", "deepseek-v3.2", "kimi"])
def test_a_thought_may_come_first_and_an_open_one_ends_first(name: str, special: bool) -> None:
    text = next(text for sample, text in (*SAMPLES, *MORE) if sample == name)
    opened, closed = FORMATS[name].thoughts[0].open, FORMATS[name].thoughts[0].close
    assert grammar(name, special=special).accepts(f"{opened}\nhm <tool\n{closed}\n\n{text}")
    inside = grammar(name, special=special, thinking=True)
    assert inside.accepts(f"hm <tool\n{closed}\n\n{text}")
    assert not inside.accepts(f"hm {text}")


@pytest.mark.parametrize("name", sorted({name for name, _ in (*SAMPLES, *MORE)}))
def test_whatever_a_grammar_allows_is_read_as_calls(name: str) -> None:
    random = Random(name)
    checked = grammar(name, special=True)
    walks = [text for text in (checked.random_text(random) for _ in range(8)) if text is not None]
    assert walks
    for text in walks:
        reply = whole_reply(parse(FORMATS[name], text))
        assert reply.calls, text
        assert not reply.text.strip(), text
        for call in reply.calls:
            arguments = json.loads(call.arguments)
            assert set(arguments) <= set(WEATHER["properties"]), text
            if call.name == "get_weather":
                assert "city" in arguments, text
                assert isinstance(arguments.get("days", 0), int), text
                assert isinstance(arguments.get("wind", True), bool), text


def test_gpt_oss_may_think_and_may_name_the_tool_in_the_role() -> None:
    checked = grammar("gpt-oss", special=True)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert checked.accepts(thought + " to=functions.now<|channel|>commentary json<|message|>{}")
    assert not checked.may_begin("<|channel|>final")


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        ('{"city": "Paris"}', True),
        ('{"city": "Paris", "days": 3, "height": 1.5, "wind": true}', True),
        ("{}", False),
        ('{"city": 5}', False),
        ('{"city": "Paris", "days": "3"}', False),
        ('{"city": "Paris", "days": 3.5}', False),
        ('{"city": "Paris", "other": 1}', False),
        ('{"city": "Paris"', False),
    ],
)
def test_json_arguments_follow_the_schema(arguments: str, accepted: bool) -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    assert grammar("hermes", special=False).accepts(text) == accepted


KINDS = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["km", "mile"]},
        "count": {"type": "integer"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "flag": {"type": "boolean"},
        "text": {"type": "string"},
    },
    "required": ["unit", "flag"],
    "$defs": {"item": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
}


@SPECIAL
@pytest.mark.parametrize("name", ["qwen-xml", "glm", "deepseek-v4", "minimax-m3", "lfm2", "gemma"])
@pytest.mark.parametrize(
    ("values", "accepted"),
    [
        ({"unit": "km", "flag": True}, True),
        ({"unit": "mile", "count": 5, "items": [{"a": 1}], "flag": False, "text": "any & <b> text"}, True),
        ({"flag": True}, False),
        ({"unit": "km"}, False),
        ({"unit": "yard", "flag": True}, False),
        ({"unit": "km", "count": "many", "flag": True}, False),
        ({"unit": "km", "flag": 3}, False),
        ({"unit": "km", "flag": True, "other": 1}, False),
    ],
)
def test_values_as_text_follow_the_schema(
    name: str, special: bool, values: dict[str, Any], accepted: bool
) -> None:
    tools = validated_tools([function("measure", KINDS)])
    if name == "gemma":
        values = dict(sorted(values.items()))
    assert grammar(name, special=special, tools=tools).accepts(written(name, values)) == accepted


def written(name: str, values: dict[str, Any]) -> str:
    """A call of ``measure`` in one of the formats with values as text."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    if name == "qwen-xml":
        tags = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        return f"<tool_call>\n<function=measure>\n{tags}</function>\n</tool_call>"
    if name == "glm":
        tags = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items()
        )
        return f"<tool_call>measure\n{tags}</tool_call>"
    if name == "deepseek-v4":
        mark = "｜DSML｜"
        tags = "".join(
            f'<{mark}parameter name="{key}" string="{"true" if isinstance(values[key], str) else "false"}">'
            f"{text}</{mark}parameter>\n"
            for key, text in texts.items()
        )
        return (
            f'<{mark}tool_calls>\n<{mark}invoke name="measure">\n{tags}</{mark}invoke>\n</{mark}tool_calls>'
        )
    if name == "minimax-m3":
        return (
            f'{M3}<tool_call>\n{M3}<invoke name="measure">{elements(values)}{M3}</invoke>\n{M3}</tool_call>'
        )
    if name == "lfm2":
        items = ", ".join(f"{key}={python(value)}" for key, value in values.items())
        return f"<|tool_call_start|>[measure({items})]<|tool_call_end|>"
    items = ",".join(f"{key}:{gemma(value)}" for key, value in values.items())
    return f"<|tool_call>call:measure{{{items}}}<tool_call|>"


def elements(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"{M3}<{key}>{elements(item)}{M3}</{key}>" for key, item in value.items())
    if isinstance(value, list):
        return "".join(f"{M3}<item>{elements(item)}{M3}</item>" for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def test_tools_that_take_anything_may_get_anything_and_those_without_parameters_nothing() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call>'
    for parameters in (
        {"type": "object"},
        {"type": "object", "properties": {}, "additionalProperties": True},
    ):
        assert grammar("hermes", special=False, tools=validated_tools([function("f", parameters)])).accepts(
            text
        )
    for parameters in (None, {}, {"type": "object", "properties": {}}):
        tools = validated_tools([function("f", parameters)])
        assert not grammar("hermes", special=False, tools=tools).accepts(text)


def test_schemas_that_refer_to_themselves_make_a_grammar_of_limited_size() -> None:
    itself = {"$ref": "#/$defs/x"}
    schema = {
        "type": "object",
        "properties": {"a": itself},
        "$defs": {"x": {"type": "object", "properties": {f"k{n}": itself for n in range(60)}}},
    }
    (tool,) = validated_tools([function("f", schema)])
    text = call_grammar(FORMATS["minimax-m3"], [tool])
    assert 1000 < len(text.splitlines()) < 8000


def test_keywords_that_are_not_known_do_not_matter() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "color", "x-order": 1}}}
    assert grammar("hermes", special=False, tools=validated_tools([function("f", schema)])).accepts(
        '<tool_call>\n{"name": "f", "arguments": {"a": "red"}}\n</tool_call>'
    )


def test_the_demos_tokenizer_takes_a_grammar() -> None:
    tokenizer = load_tokenizer(DEMO)
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    tokens = grammar_tokens(added, tokenizer.all_special_tokens)
    assert tokens
    matcher = LLMatcher(
        from_tokenizer(tokenizer),
        LLMatcher.grammar_from_lark(call_grammar(FORMATS["hermes"], TOOLS, "now", tokens=tokens)),
    )
    assert not matcher.is_error(), matcher.get_error()
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    good = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert matcher.validate_tokens(good) == len(good)
    bad = tokenizer("Once upon a time", add_special_tokens=False)["input_ids"]
    assert matcher.validate_tokens(bad) == 0


@pytest.mark.parametrize(
    ("name", "tools", "choice", "text"),
    [
        ("plain", TOOLS, None, "has no tools"),
        ("hermes", (), None, "the request has no tools"),
        ("hermes", TOOLS, "other", "tool_choice names 'other'"),
    ],
)
def test_what_cannot_be_forced_is_refused(
    name: str, tools: Sequence[Tool], choice: str | None, text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        call_grammar(FORMATS[name], tools, choice)
