"""A chat template writes calls, and the parser reads the same calls back.

The templates in ``tests/data/reply_templates`` are small ones in the form of the models' own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from places import TESTS
from reply_support import TOOLS, parse
from transformers.utils.chat_template_utils import render_jinja_template

from moechat.reply_formats import FORMATS, detect, new_call_id, to_template_messages, whole_reply

TEMPLATES = {path.stem: path for path in sorted((TESTS / "data" / "reply_templates").glob("*.jinja"))}
EACH = pytest.mark.parametrize("name", TEMPLATES)
# Templates that write only the first call of a message, as the models' own.
ONE_CALL = {"gpt-oss", "llama3"}
# Templates that write calls without the text before them.
EITHER_CALLS_OR_TEXT = {"gpt-oss", "mistral-json", "llama3", "llama4", "cohere", "deepseek-v3"}
USER = {"role": "user", "content": "Weather?"}


def render(template: Path, messages: list[dict[str, Any]], **arguments: Any) -> str:
    rendered, _ = render_jinja_template(
        conversations=[messages],
        tools=[tool.for_template() for tool in TOOLS],
        chat_template=template.read_text(encoding="utf-8"),
        bos_token="<s>",
        eos_token="</s>",
        **arguments,
    )
    return str(rendered[0])


def written_reply(name: str, calls: list[tuple[str, dict[str, Any]]], content: str | None) -> str:
    """What a template writes for a message with calls."""
    template = TEMPLATES[name].read_text(encoding="utf-8")
    found = detect(template)
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"functions.{tool}:{index}" if name == "kimi" else new_call_id(found),
                "type": "function",
                "function": {"name": tool, "arguments": json.dumps(arguments)},
            }
            for index, (tool, arguments) in enumerate(calls)
        ],
    }
    messages = to_template_messages([USER, message], chat_template=template, format=found)
    prompt = render(TEMPLATES[name], messages[:1], add_generation_prompt=True)
    whole = render(TEMPLATES[name], messages)
    assert whole.startswith(prompt)
    return whole[len(prompt) :]


@EACH
def test_a_template_is_recognised(name: str) -> None:
    assert detect(TEMPLATES[name].read_text(encoding="utf-8")) is FORMATS[name]


# Values in tags cannot contain the tags, and lose line breaks at their ends.
CITIES = st.text(st.characters(exclude_characters="<>\r\n\x00", exclude_categories=["Cs"]), min_size=1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "days": st.integers(-1000, 1000),
    "height": st.floats(-1000, 1000, allow_nan=False).map(lambda value: round(value, 3)),
    "wind": st.booleans(),
    "units": st.lists(st.sampled_from(["km", 'mi "1"', "\\", "é"]), max_size=3),
    "place": st.fixed_dictionaries({"street": st.sampled_from(["a", "x, y", "{b}"])}),
}


@EACH
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arguments=st.fixed_dictionaries({"city": CITIES}, optional=VALUES))
def test_calls_that_a_template_writes_are_read_back(name: str, arguments: dict[str, Any]) -> None:
    calls = [("get_weather", arguments), ("now", {})][: 1 if name in ONE_CALL else 2]
    reply = whole_reply(parse(FORMATS[name], written_reply(name, calls, None)))
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - EITHER_CALLS_OR_TEXT))
def test_a_text_before_the_calls_is_kept(name: str) -> None:
    reply = whole_reply(parse(FORMATS[name], written_reply(name, [("now", {})], "One moment.")))
    assert (reply.text.partition("<|im_end|>")[0][:11], len(reply.calls)) == ("One moment.", 1)


@EACH
def test_results_of_tools_are_rendered(name: str) -> None:
    template = TEMPLATES[name].read_text(encoding="utf-8")
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is noon."},
    ]
    converted = to_template_messages(messages, chat_template=template, format=FORMATS[name])
    assert "It is noon." in render(TEMPLATES[name], converted, add_generation_prompt=True)


def test_mistrals_templates_refuse_ids_of_another_form() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(TemplateError, match="nine"):
        render(TEMPLATES["mistral"], to_template_messages(messages))
    assert "[TOOL_CALLS]now" in render(
        TEMPLATES["mistral"], to_template_messages(messages, format=FORMATS["mistral"])
    )


@pytest.mark.parametrize(
    ("template", "special", "name"),
    [
        (None, [], "plain"),
        ("{{ messages }}", [], "plain"),
        ("{{ messages }}", ["<tool_call>"], "plain"),
        ("List of tools: {{ tools }}", ["<|tool_call_start|>", "<|tool_call_end|>"], "lfm2"),
        (None, ["[TOOL_CALLS]", "[ARGS]"], "mistral"),
        ("[TOOL_CALLS]", ["[TOOL_CALLS]", "[ARGS]"], "mistral"),
        ("[TOOL_CALLS]", [], "mistral-json"),
        (None, ["[THINK]", "[/THINK]"], "plain-mistral"),
        ('{"name": "parameters"}', [], "plain"),
    ],
)
def test_templates_without_clear_marks(template: str | None, special: list[str], name: str) -> None:
    assert detect(template, special) is FORMATS[name]
