"""The table of formats, and which one a model uses."""

from __future__ import annotations

import re
from collections.abc import Collection

from moechat.reply_formats.known_marks import (
    COHERE_THINKING,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA_THINKING,
    HERMES,
    KIMI,
    LONGCAT_THINKING,
    MINIMAX,
    MINIMAX_M3,
    MISTRAL_NAMED,
    MISTRAL_THINKING,
    QWEN_XML,
    SEED_THINKING,
    SEED_XML,
    THINK,
    argument_tags,
    dsml,
)
from moechat.reply_formats.notations import (
    BracedCalls,
    ChannelCalls,
    JsonCalls,
    PythonCalls,
    ReplyFormat,
    ThoughtMarks,
)


def _hunyuan(suffix: str = "", separator: str = "\n") -> ReplyFormat:
    """Hy-V3's and Hy-V4's format: GLM's tags in a frame, each with a suffix that a checkpoint chooses."""
    calls = argument_tags(suffix=suffix, frame="tool_calls", separator=separator)
    thoughts = (ThoughtMarks(f"<think{suffix}>", f"</think{suffix}>"),)
    return ReplyFormat(f"hunyuan{suffix}", thoughts, calls)


def _find_hunyuan(texts: str) -> ReplyFormat | None:
    """The format of a Hy model whose template or tokens are in ``texts``."""
    block = re.search(r"<tool_calls(:[^\s<>]+)?>", texts)
    suffix = block[1] or "" if block else ""
    if block is None or f"<arg_key{suffix}>" not in texts:
        return None
    separator = f"<tool_sep{suffix}>"
    return _hunyuan(suffix, separator if separator in texts else "\n")


# Formats by marks of their chat templates, all of which must occur. The first row that fits counts, so a row
# stands before those whose marks it has too.
TABLE: tuple[tuple[tuple[str, ...], ReplyFormat], ...] = (
    (
        ("<|channel|>", "<|message|>"),
        ReplyFormat("gpt-oss", (), ChannelCalls(begins=()), channels=True, thinking_field="thinking"),
    ),
    (("｜DSML｜", "function_calls>"), ReplyFormat("deepseek-v3.2", THINK, dsml("function_calls"))),
    (("｜DSML｜", " calls>"), ReplyFormat("deepseek-v4.1", THINK, dsml("calls", " "))),
    (("｜DSML｜",), ReplyFormat("deepseek-v4", THINK, dsml("tool_calls"))),
    (("<｜tool▁calls▁begin｜>", "```json"), ReplyFormat("deepseek-v3", THINK, DEEPSEEK_V3)),
    (("<｜tool▁calls▁begin｜>",), ReplyFormat("deepseek-v3.1", THINK, DEEPSEEK_V31)),
    (("<|tool_calls_section_begin|>",), ReplyFormat("kimi", THINK, KIMI)),
    (
        ("]<]minimax[>[",),
        ReplyFormat("minimax-m3", (ThoughtMarks("<mm:think>", "</mm:think>"),), MINIMAX_M3),
    ),
    (("<minimax:tool_call>",), ReplyFormat("minimax", THINK, MINIMAX)),
    (("<seed:tool_call>",), ReplyFormat("seed", SEED_THINKING, SEED_XML)),
    (
        ("<|tool_call>", '<|"|>'),
        ReplyFormat(
            "gemma",
            GEMMA_THINKING,
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
    (("[TOOL_CALLS]", "[ARGS]"), ReplyFormat("mistral", MISTRAL_THINKING, MISTRAL_NAMED, short_ids=True)),
    (
        ("[TOOL_CALLS]",),
        ReplyFormat(
            "mistral-json", MISTRAL_THINKING, JsonCalls(begins=("[TOOL_CALLS]",), array=True), short_ids=True
        ),
    ),
    (
        ("<|START_ACTION|>", '"tool_name"'),
        ReplyFormat(
            "cohere",
            COHERE_THINKING,
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
    (("<tool_call>", "<function="), ReplyFormat("qwen-xml", THINK, QWEN_XML)),
    (("<tool_call>", "<arg_key>"), ReplyFormat("glm", THINK, argument_tags())),
    (
        ("<tool_call>", "<response>", "</response>"),
        ReplyFormat("ernie", THINK, HERMES, answer=("<response>", "</response>")),
    ),
    (("<tool_call>",), ReplyFormat("hermes", THINK, HERMES)),
    (
        ("<longcat_tool_call>", "<longcat_arg_key>"),
        ReplyFormat("longcat-tags", LONGCAT_THINKING, argument_tags("longcat_")),
    ),
    (
        ("<longcat_tool_call>",),
        ReplyFormat(
            "longcat",
            LONGCAT_THINKING,
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
    ("[THINK]", ReplyFormat("plain-mistral", MISTRAL_THINKING)),
    ("<seed:think>", ReplyFormat("plain-seed", SEED_THINKING)),
    ("<|channel>", ReplyFormat("plain-gemma", GEMMA_THINKING)),
)

# What any model may write, for a chat without tools.
ANY_THINKING = ReplyFormat(
    "any-thinking",
    (*SEED_THINKING, *MISTRAL_THINKING, *GEMMA_THINKING, *COHERE_THINKING, *LONGCAT_THINKING[:1]),
    channels=True,
)

FORMATS: dict[str, ReplyFormat] = {
    found.name: found for found in (*(row[-1] for row in (*TABLE, *_THOUGHTS_ONLY)), _hunyuan(), PLAIN)
}


def detect(chat_template: str | None, special_tokens: Collection[str] = ()) -> ReplyFormat:
    """The format of a model's replies.

    Args:
        chat_template: The template's text; ``None`` if there is none.
        special_tokens: Texts of the tokenizer's special tokens. They count where the template has tools but
            no marks of calls, or where there is no template.

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
    # Some templates have tools but leave it to the model how it calls them; some tokenizers have no template.
    for marks, found in TABLE if chat_template is None or "tools" in template else ():
        if all(mark in special_tokens for mark in marks):
            return found
    for mark, found in _THOUGHTS_ONLY:
        if mark in template or mark in special_tokens:
            return found
    return PLAIN
