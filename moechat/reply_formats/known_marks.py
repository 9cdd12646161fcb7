"""Marks of thinking and notations of calls, by the families that brought them up."""

from __future__ import annotations

from moechat.reply_formats.notations import ElementCalls, JsonCalls, NamedCalls, TaggedCalls, ThoughtMarks

THINK = (ThoughtMarks("<think>", "</think>"),)
SEED_THINKING = (ThoughtMarks("<seed:think>", "</seed:think>"),)
# Mistral's first thinking models wrote the usual marks.
MISTRAL_THINKING = (ThoughtMarks("[THINK]", "[/THINK]", anywhere=True), *THINK)
LONGCAT_THINKING = (ThoughtMarks("<longcat_think>", "</longcat_think>"), *THINK)
COHERE_THINKING = (ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),)
GEMMA_THINKING = (ThoughtMarks("<|channel>", "<channel|>", label="thought\n", anywhere=True),)

HERMES = JsonCalls(begins=("<tool_call>",), closers=("</tool_call>",), lines=True)
QWEN_XML = TaggedCalls(
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
SEED_XML = TaggedCalls(
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


def argument_tags(tag: str = "", suffix: str = "", *, frame: str = "", separator: str = "\n") -> TaggedCalls:
    """GLM's tags; other families put something into the names of all of them.

    Args:
        tag: Stands before the names.
        suffix: Stands behind the names.
        frame: Name of the tag around all calls, if there is one.
        separator: Behind the name of the tool.
    """

    def pair(name: str) -> tuple[str, str]:
        return f"<{tag}{name}{suffix}>", f"</{tag}{name}{suffix}>"

    begin, close = pair("tool_call")
    keys, values = pair("arg_key"), pair("arg_value")
    around = pair(frame) if frame else None
    return TaggedCalls(
        frames=around[:1] if around else (),
        begins=(begin,),
        name_end=separator,
        key_open=keys[0],
        key_end=keys[1],
        value_open=values[0],
        value_close=values[1],
        close=close,
        closers=(close, *(around[1:] if around else ())),
        inner=(*keys, *values, *filter(str.strip, (separator,))),
        lines=True,
    )


MINIMAX = TaggedCalls(
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


MINIMAX_M3 = ElementCalls(
    prefix="]<]minimax[>[",
    frames=("]<]minimax[>[<tool_call>",),
    begins=(']<]minimax[>[<invoke name="',),
    name_end='">',
    close="]<]minimax[>[</invoke>",
    closers=("]<]minimax[>[</invoke>", "]<]minimax[>[</tool_call>"),
    inner=("]<]minimax[>[",),
)


def dsml(block: str, space: str = "") -> TaggedCalls:
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
DEEPSEEK_CLOSERS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_V3 = NamedCalls(
    frames=(_DEEPSEEK_FRAME,),
    begins=("<｜tool▁call▁begin｜>",),
    head="typed",
    head_end=_DEEPSEEK_SEPARATOR,
    closers=DEEPSEEK_CLOSERS,
    inner=(_DEEPSEEK_SEPARATOR,),
)
DEEPSEEK_V31 = NamedCalls(
    frames=(_DEEPSEEK_FRAME,),
    begins=("<｜tool▁call▁begin｜>",),
    head="plain",
    head_end=_DEEPSEEK_SEPARATOR,
    closers=DEEPSEEK_CLOSERS,
    inner=(_DEEPSEEK_SEPARATOR,),
)
KIMI = NamedCalls(
    frames=("<|tool_calls_section_begin|>",),
    begins=("<|tool_call_begin|>",),
    head="numbered",
    head_end="<|tool_call_argument_begin|>",
    closers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    inner=("<|tool_call_argument_begin|>",),
)
MISTRAL_NAMED = NamedCalls(
    begins=("[TOOL_CALLS]",),
    head="id",
    head_end="[ARGS]",
    id_begin="[CALL_ID]",
    inner=("[ARGS]", "[CALL_ID]"),
)
