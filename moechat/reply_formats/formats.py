"""The table of formats, and which one a model uses."""

from __future__ import annotations

import re
from collections.abc import Collection

from moechat.reply_formats.notations import (
    BracedCalls,
    ChannelCalls,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    ReplyFormat,
    TaggedCalls,
    ThoughtMarks,
)

THINK = (ThoughtMarks("<think>", "</think>"),)
_SEED = (ThoughtMarks("<seed:think>", "</seed:think>"),)
# Mistral's first thinking models wrote the usual marks.
_MISTRAL = (ThoughtMarks("[THINK]", "[/THINK]", anywhere=True), *THINK)
_COHERE = (ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),)
_GEMMA = (ThoughtMarks("<|channel>", "<channel|>", label="thought\n", anywhere=True),)

_QWEN_XML = TaggedCalls(
    frames=("<tool_call>",),
    begins=("<function=",),
    name_end=">",
    key_open="<parameter=",
    key_end=">",
    value_close="</parameter>",
    close="</function>",
    closers=("</function>", "</tool_call>"),
    framed=True,
    trim_lines=True,
    lines=True,
)
_SEED_XML = TaggedCalls(
    frames=("<seed:tool_call>",),
    begins=("<function=",),
    name_end=">",
    key_open="<parameter=",
    key_end=">",
    value_close="</parameter>",
    close="</function>",
    closers=("</function>", "</seed:tool_call>"),
    framed=True,
    lines=True,
)
_GLM = TaggedCalls(
    begins=("<tool_call>",),
    name_end="\n",
    key_open="<arg_key>",
    key_end="</arg_key>",
    value_open="<arg_value>",
    value_close="</arg_value>",
    close="</tool_call>",
    closers=("</tool_call>",),
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    lines=True,
)
_MINIMAX = TaggedCalls(
    frames=("<minimax:tool_call>",),
    begins=('<invoke name="',),
    name_end='">',
    key_open='<parameter name="',
    key_end='">',
    value_close="</parameter>",
    close="</invoke>",
    closers=("</invoke>", "</minimax:tool_call>"),
    lines=True,
)


def _hunyuan(suffix: str = "", separator: str = "\n") -> ReplyFormat:
    """Hy-V3's and Hy-V4's format: GLM's tags in a frame, each with a suffix that a checkpoint chooses."""
    end = f"{suffix}>"
    calls = TaggedCalls(
        frames=(f"<tool_calls{end}",),
        begins=(f"<tool_call{end}",),
        name_end=separator,
        key_open=f"<arg_key{end}",
        key_end=f"</arg_key{end}",
        value_open=f"<arg_value{end}",
        value_close=f"</arg_value{end}",
        close=f"</tool_call{end}",
        closers=(f"</tool_call{end}", f"</tool_calls{end}"),
        inner=(f"<arg_key{end}", f"</arg_key{end}", f"<arg_value{end}", f"</arg_value{end}", separator),
        lines=True,
    )
    return ReplyFormat(f"hunyuan{suffix}", (ThoughtMarks(f"<think{end}", f"</think{end}"),), calls)


def _find_hunyuan(texts: str) -> ReplyFormat | None:
    """The format of a Hy model whose template or tokens are in ``texts``."""
    block = re.search(r"<tool_calls(:[^\s<>]+)?>", texts)
    suffix = block[1] or "" if block else ""
    if block is None or f"<arg_key{suffix}>" not in texts:
        return None
    separator = f"<tool_sep{suffix}>"
    return _hunyuan(suffix, separator if separator in texts else "\n")


def _dsml(block: str, space: str = "") -> TaggedCalls:
    """DeepSeek's tags from V3.2 on; the name of the outermost tag differs between versions."""
    return TaggedCalls(
        frames=(f"<｜DSML｜{space}{block}>",),
        begins=(f'<｜DSML｜{space}invoke name="',),
        name_end='">',
        key_open=f'<｜DSML｜{space}parameter name="',
        key_end='" string="false">',
        string_key_end='" string="true">',
        value_close=f"</｜DSML｜{space}parameter>",
        close=f"</｜DSML｜{space}invoke>",
        closers=(f"</｜DSML｜{space}invoke>", f"</｜DSML｜{space}{block}>"),
        inner=("｜DSML｜",),
        lines=True,
    )


_DEEPSEEK_FRAME, _DEEPSEEK_SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"
_DEEPSEEK_CLOSERS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V3 = NamedCalls(
    frames=(_DEEPSEEK_FRAME,),
    begins=("<｜tool▁call▁begin｜>",),
    head="typed",
    head_end=_DEEPSEEK_SEPARATOR,
    closers=_DEEPSEEK_CLOSERS,
    inner=(_DEEPSEEK_SEPARATOR,),
)
_DEEPSEEK_V31 = NamedCalls(
    frames=(_DEEPSEEK_FRAME,),
    begins=("<｜tool▁call▁begin｜>",),
    head="plain",
    head_end=_DEEPSEEK_SEPARATOR,
    closers=_DEEPSEEK_CLOSERS,
    inner=(_DEEPSEEK_SEPARATOR,),
)
_KIMI = NamedCalls(
    frames=("<|tool_calls_section_begin|>",),
    begins=("<|tool_call_begin|>",),
    head="numbered",
    head_end="<|tool_call_argument_begin|>",
    closers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    inner=("<|tool_call_argument_begin|>",),
)
_MISTRAL_NAMED = NamedCalls(
    begins=("[TOOL_CALLS]",),
    head="id",
    head_end="[ARGS]",
    id_begin="[CALL_ID]",
    inner=("[ARGS]", "[CALL_ID]"),
)

# Formats by marks of their chat templates, all of which must occur. The first row that fits counts, so a row
# stands before those whose marks it has too.
TABLE: tuple[tuple[tuple[str, ...], ReplyFormat], ...] = (
    (
        ("<|channel|>", "<|message|>"),
        ReplyFormat("gpt-oss", (), ChannelCalls(begins=()), channels=True, thinking_field="thinking"),
    ),
    (("｜DSML｜", "function_calls>"), ReplyFormat("deepseek-v3.2", THINK, _dsml("function_calls"))),
    (("｜DSML｜", " calls>"), ReplyFormat("deepseek-v4.1", THINK, _dsml("calls", " "))),
    (("｜DSML｜",), ReplyFormat("deepseek-v4", THINK, _dsml("tool_calls"))),
    (("<｜tool▁calls▁begin｜>", "```json"), ReplyFormat("deepseek-v3", THINK, _DEEPSEEK_V3)),
    (("<｜tool▁calls▁begin｜>",), ReplyFormat("deepseek-v3.1", THINK, _DEEPSEEK_V31)),
    (("<|tool_calls_section_begin|>",), ReplyFormat("kimi", THINK, _KIMI)),
    (("<minimax:tool_call>",), ReplyFormat("minimax", THINK, _MINIMAX)),
    (("<seed:tool_call>",), ReplyFormat("seed", _SEED, _SEED_XML)),
    (
        ("<|tool_call>", '<|"|>'),
        ReplyFormat(
            "gemma",
            _GEMMA,
            BracedCalls(begins=("<|tool_call>",), closers=("<tool_call|>",), quote='<|"|>', inner=('<|"|>',)),
        ),
    ),
    (
        ("<start_function_call>", "<escape>"),
        ReplyFormat(
            "function-gemma",
            (),
            BracedCalls(
                begins=("<start_function_call>",),
                closers=("<end_function_call>",),
                quote="<escape>",
                inner=("<escape>",),
            ),
        ),
    ),
    (("[TOOL_CALLS]", "[ARGS]"), ReplyFormat("mistral", _MISTRAL, _MISTRAL_NAMED, short_ids=True)),
    (
        ("[TOOL_CALLS]",),
        ReplyFormat(
            "mistral-json", _MISTRAL, JsonCalls(begins=("[TOOL_CALLS]",), array=True), short_ids=True
        ),
    ),
    (
        ("<|START_ACTION|>", '"tool_name"'),
        ReplyFormat(
            "cohere",
            _COHERE,
            JsonCalls(
                begins=("<|START_ACTION|>",),
                closers=("<|END_ACTION|>",),
                array=True,
                name="tool_name",
                arguments="parameters",
                call_id="tool_call_id",
            ),
        ),
    ),
    (
        ("<|function_call|>",),
        ReplyFormat(
            "gigachat", THINK, JsonCalls(begins=("<|function_call|>",), closers=("<|message_sep|>",))
        ),
    ),
    (
        ("<tool_calls>[",),
        ReplyFormat(
            "tool-calls", THINK, JsonCalls(begins=("<tool_calls>",), closers=("</tool_calls>",), array=True)
        ),
    ),
    (
        ("<TOOLCALL>",),
        ReplyFormat(
            "nemotron", THINK, JsonCalls(begins=("<TOOLCALL>",), closers=("</TOOLCALL>",), array=True)
        ),
    ),
    (("<tool_call>", "<function="), ReplyFormat("qwen-xml", THINK, _QWEN_XML)),
    (("<tool_call>", "<arg_key>"), ReplyFormat("glm", THINK, _GLM)),
    (
        ("<tool_call>",),
        ReplyFormat(
            "hermes", THINK, JsonCalls(begins=("<tool_call>",), closers=("</tool_call>",), lines=True)
        ),
    ),
    (
        ("<longcat_tool_call>",),
        ReplyFormat(
            "longcat",
            THINK,
            JsonCalls(begins=("<longcat_tool_call>",), closers=("</longcat_tool_call>",), lines=True),
        ),
    ),
    (
        ("<|tool_call_start|>",),
        ReplyFormat(
            "lfm2", THINK, PythonCalls(begins=("<|tool_call_start|>",), closers=("<|tool_call_end|>",))
        ),
    ),
    (
        ("<function_calls>",),
        ReplyFormat(
            "olmo3",
            THINK,
            PythonCalls(begins=("<function_calls>",), closers=("</function_calls>",), listed=False),
        ),
    ),
    (
        ("<|tool_call|>", "<|/tool_call|>"),
        ReplyFormat(
            "phi4", THINK, JsonCalls(begins=("<|tool_call|>",), closers=("<|/tool_call|>",), array=True)
        ),
    ),
    (("<|tool_call|>",), ReplyFormat("granite", THINK, JsonCalls(begins=("<|tool_call|>",), array=True))),
    (
        ("<|python_start|>",),
        ReplyFormat(
            "llama4",
            (),
            PythonCalls(begins=("<|python_start|>",), closers=("<|python_end|>",), bare_begin="["),
        ),
    ),
    (
        ('"parameters"', '{"name":', "ipython"),
        ReplyFormat(
            "llama3", (), JsonCalls(begins=("<|python_tag|>",), bare_begin="{[", arguments="parameters")
        ),
    ),
)

# A model without tools, whose thinking is recognised if it is marked as most do.
PLAIN = ReplyFormat("plain", THINK)
_THOUGHTS_ONLY = (
    ("[THINK]", ReplyFormat("plain-mistral", _MISTRAL)),
    ("<seed:think>", ReplyFormat("plain-seed", _SEED)),
    ("<|channel>", ReplyFormat("plain-gemma", _GEMMA)),
)

# What any model may write, for a chat without tools.
ANY_THINKING = ReplyFormat("any-thinking", (*_SEED, *_MISTRAL, *_GEMMA, *_COHERE), channels=True)

FORMATS: dict[str, ReplyFormat] = {
    found.name: found for found in (*(row[-1] for row in (*TABLE, *_THOUGHTS_ONLY)), _hunyuan(), PLAIN)
}


def detect(chat_template: str | None, special_tokens: Collection[str] = ()) -> ReplyFormat:
    """The format of a model's replies.

    Args:
        chat_template: The template's text; ``None`` if there is none.
        special_tokens: Texts of the tokenizer's special tokens. They count where the template has tools but
            no marks of calls.

    Returns:
        The format whose marks were found; without any, one without calls of tools.
    """
    template = chat_template or ""
    if (hunyuan := _find_hunyuan("\n".join((template, *special_tokens)))) is not None:
        return hunyuan
    for marks, found in TABLE:
        if all(mark in template for mark in marks):
            if found.name == "mistral-json" and "[ARGS]" in special_tokens:
                return FORMATS["mistral"]
            return found
    # Some templates name the tools but leave it to the model how it calls them.
    for marks, found in TABLE if "tools" in template else ():
        if all(mark in special_tokens for mark in marks):
            return found
    for mark, found in _THOUGHTS_ONLY:
        if mark in template or mark in special_tokens:
            return found
    return PLAIN
