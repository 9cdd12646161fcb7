"""Values for chat templates: how they are written, who reads them, and how a chat changes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_support import OneModel, ScriptedEngine, talk
from hypothesis import given
from hypothesis import strategies as st

from moechat.chat.chat_options import ChatOptions, Generation
from moechat.chat.template_options import TemplateOptions, parse_options, parse_switch
from moechat.cli.commands.jsonl import answer_jsonl
from moechat.cli.commands.prompts_file import read_prompts
from moechat.cli.commands.run_arguments import RunOptions
from moechat.engine.template_variables import template_variables
from moechat.errors import UsageError

QWEN = """\
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages %}{{ message.role }}{% generation %}{{ message.content }}{% endgeneration %}
{%- if loop.last %}{% break %}{% endif %}{% endfor -%}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}x{% endif %}
"""
GPT_OSS = """\
{%- macro build(namespace_name) %}{{ namespace_name }}{{ strftime_now("%Y") }}{% endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}{{ bos_token }}
{{- reasoning_effort }}{{ build("a") }}{{ raise_exception("x") if model_identity }}
{%- set ns = namespace(a=1) %}
"""


def test_the_variables_of_a_template_are_found_in_its_syntax() -> None:
    assert template_variables(QWEN) == {"enable_thinking"}
    assert template_variables(GPT_OSS) == {"reasoning_effort", "model_identity"}
    assert template_variables("{# enable_thinking #}{{ 'enable_thinking' }}") == frozenset()
    assert template_variables("{% if %}") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=false", False),
        ("a=False", False),
        ("a=low", "low"),
        ("a=3", 3),
        ('a="3"', "3"),
        ('a={"b": [1]}', {"b": [1]}),
        ("a=", ""),
        ("a=b=c", "b=c"),
        ("a=NaN", "NaN"),
        ("a=null", None),
    ],
)
def test_a_value_is_json_or_a_text(text: str, value: Any) -> None:
    assert parse_options([text]) == {"a": value}


@given(
    st.dictionaries(st.from_regex(r"x_[a-z]{1,9}", fullmatch=True), st.text() | st.integers() | st.booleans())
)
def test_values_written_as_json_come_back(values: dict[str, Any]) -> None:
    assert parse_options([f"{name}={json.dumps(value)}" for name, value in values.items()]) == values


@pytest.mark.parametrize("text", ["a", "=1", "a b=1", "1a=1", "messages=[]", "tools=1", "\x1b[2J=1", "é=1"])
def test_what_is_no_variable_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_options([text])
    assert "\x1b" not in str(error.value)


def test_the_switch_sets_the_variable_that_the_template_reads() -> None:
    off = TemplateOptions(think=False)
    assert off.values(frozenset(("enable_thinking", "thinking"))) == {"enable_thinking": False}
    assert off.values(frozenset(("thinking",))) == {"thinking": False}
    assert off.values(None) == {"enable_thinking": False}  # another server: what most templates read
    assert off.values(frozenset(("reasoning_effort",))) == {}
    assert TemplateOptions({"thinking": True}, think=False).values(frozenset(("thinking",))) == {
        "thinking": True
    }
    assert TemplateOptions(think=True, changed={"think": None}).values(frozenset(("thinking",))) == {}


def test_values_that_a_template_does_not_read_get_a_notice() -> None:
    read = frozenset(("reasoning_effort",))
    (notice,) = TemplateOptions({"enable_thinking": False}).unread("m", read)
    assert notice.startswith("the chat template of m does not read enable_thinking: that changes nothing;")
    assert notice.endswith("it reads reasoning_effort")
    (notice,) = TemplateOptions(think=False).unread("m", read)
    assert notice.endswith("that changes nothing; set reasoning_effort to low, medium or high instead")
    assert TemplateOptions({"reasoning_effort": "low"}).unread("m", read) == []
    assert TemplateOptions({"anything": 1}, think=True).unread("m", None) == []


def engine(*answers: str, reads: str = "enable_thinking reasoning_effort", **more: Any) -> ScriptedEngine:
    return ScriptedEngine([[text] for text in answers], template_variables=frozenset(reads.split()), **more)


def sent(found: ScriptedEngine) -> list[dict[str, Any]]:
    """The values of all calls that encode, each once."""
    kept: list[dict[str, Any]] = []
    for values in found.template_options:
        if not kept or kept[-1] != values:
            kept.append(values)
    return kept


def test_a_chat_changes_and_resets_values() -> None:
    model = engine("a", "b", "c", "d")
    output = talk(
        model,
        [
            "one",
            "/set think off",
            "two",
            "/set reasoning_effort=high",
            "three",
            "/set think default",
            "/set template_option reasoning_effort default",
            "four",
        ],
    )
    assert output.errors == []
    assert [values for values in sent(model) if values] == [
        {"enable_thinking": False},
        {"reasoning_effort": "high", "enable_thinking": False},
    ]
    assert model.template_options[-1] == {}
    assert ("think", "off  (set here)") in output.rows
    assert ("reasoning_effort", "high  (set here)") in output.rows
    assert output.rows[-2:] == [("think", "the template's own"), ("reasoning_effort", "the template's own")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set think maybe", "think is maybe; it must be on or off"),
        ("/set think", "/set think needs a value"),
        ("/set template_option", "/set template_option needs NAME VALUE"),
        ("/set template_option messages=[]", "no variable that can be set"),
        ("/set unknown 3", "there is no setting unknown"),
    ],
)
def test_wrong_settings_are_refused_and_change_nothing(line: str, said: str) -> None:
    model = engine("a")
    output = talk(model, [line, "hello"])
    assert said in output.errors[0][0]
    assert sent(model) == [{}]


def test_a_value_that_the_template_does_not_read_is_mentioned_when_it_is_set() -> None:
    output = talk(engine("a", reads=""), ["/set think on", "/set template_option x 3"])
    assert any("has no switch for thinking" in notice for notice in output.notices)
    assert any("does not read x" in notice for notice in output.notices)


def test_another_model_keeps_what_was_set_and_takes_what_it_brings() -> None:
    class Models(OneModel):
        def use(self, name: str) -> ChatOptions:
            super().use(name)
            brought = Generation({"top_p": 0.5}, template=TemplateOptions({"b": 2}))
            return ChatOptions(generation=brought, system="Be brief.")

    first, other = engine("one"), engine("two", name="other", reads="a b")
    lines = ["/set template_option a=1", "hello", "/model other", "/system", "again"]
    output = talk(first, lines, models=Models(first, other=other))
    assert first.template_options[-1] == {"a": 1}
    assert other.template_options[-1] == {"a": 1, "b": 2}
    assert other.given[-1]["top_p"] == 0.5
    assert other.prompts[-1][0] == {"role": "system", "content": "Be brief."}
    assert "the system prompt: Be brief." in output.notices


def test_a_system_prompt_set_in_the_chat_stays_with_another_model() -> None:
    class Models(OneModel):
        def use(self, name: str) -> ChatOptions:
            super().use(name)
            return ChatOptions(system="Be brief.")

    first, other = engine("one"), engine("two", name="other")
    talk(first, ["/system Rhyme.", "/model other", "again"], models=Models(first, other=other))
    assert other.prompts[-1][0]["content"] == "Rhyme."


# ---- the command line


def test_options_of_the_command_reach_the_template() -> None:
    options = RunOptions(model="m", template_option=["reasoning_effort=low", "x=1"], think=False)
    values = options.chat.generation.template.values(frozenset(("enable_thinking",)))
    assert values == {"reasoning_effort": "low", "x": 1, "enable_thinking": False}
    with pytest.raises(UsageError, match="--completion uses no chat template"):
        RunOptions(model="m", completion=True, think=True)
    with pytest.raises(UsageError, match="has no value"):
        RunOptions(model="m", template_option=["x"])


def test_lines_of_a_prompts_file_have_values_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"prompt": "one"},
        {"prompt": "two", "template_options": {"reasoning_effort": "high"}},
        {"prompt": "three", "chat_template_kwargs": {"enable_thinking": True}},
        {"prompt": "four", "template_options": 3},
        {"prompt": "five", "template_options": {"messages": []}},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = read_prompts(str(path), keep_bad=True)
    assert [line.line for line in file.bad] == [4, 5]
    assert file.bad[0].reason == "template_options is not an object"
    assert file.ignored == {}
    model = engine("a", "b", "c")
    options = RunOptions(model="m", jsonl=str(path), template_option=["reasoning_effort=low"], quiet=True)
    assert answer_jsonl(OneModel(model), file, options) != 0  # two lines have errors
    assert model.template_options == [
        {"reasoning_effort": "low"},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "low", "enable_thinking": True},
    ]
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result.get("text") for result in results] == ["a", "b", "c", None, None]


def test_a_switch_has_the_usual_words() -> None:
    assert [parse_switch(word) for word in ("on", "TRUE", "yes", "1")] == [True] * 4
    assert [parse_switch(word) for word in ("off", "false", "No", "0")] == [False] * 4
    with pytest.raises(UsageError, match=re.escape("it must be on or off")):
        parse_switch("")
