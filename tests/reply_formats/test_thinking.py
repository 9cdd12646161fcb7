"""Thinking is separated from the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.reply_formats.thinking import Part, ThoughtSplitter, opens_thought


@pytest.mark.parametrize(
    ("output", "parts"),
    [
        ("<think>\nhm\n</think>\n\nyes", [("\nhm\n", True), ("yes", False)]),
        ("  \n<think>hm", [("hm", True)]),
        ("yes <think>no</think>", [("yes <think>no</think>", False)]),
        ("<thin", [("<thin", False)]),
        ("", []),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
            [("hm", True), ("yes", False)],
        ),
        ("<|channel|>commentary to=f<|message|>a<|end|>", [("a", True)]),
    ],
)
def test_thinking_is_separated_wherever_the_stream_is_split(
    output: str, parts: list[tuple[str, bool]]
) -> None:
    for pieces in [[output], list(output), *([output[:n], output[n:]] for n in range(len(output)))]:
        splitter = ThoughtSplitter()
        parts_found = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
        joined: list[tuple[str, bool]] = []
        for text, thought in parts_found:
            if joined and joined[-1][1] == thought:
                joined[-1] = (joined[-1][0] + text, thought)
            else:
                joined.append((text, thought))
        assert joined == parts


def test_a_thought_opened_by_the_prompt_ends_at_its_mark() -> None:
    splitter = ThoughtSplitter(thinking=True)
    assert splitter.feed("hm</think> yes") == [Part("hm", True), Part("yes", False)]


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<|channel|>", "final", "<|message|>", "<|end|>", "a <"])
    )
)
def test_separating_thinking_loses_and_adds_no_text(pieces: list[str]) -> None:
    together = ThoughtSplitter()
    whole = [*together.feed("".join(pieces)), *together.flush()]
    apart = ThoughtSplitter()
    single = [part for piece in pieces for char in piece for part in apart.feed(char)] + apart.flush()
    for kind in (True, False):
        of_whole = "".join(part.text for part in whole if part.thought == kind)
        assert of_whole == "".join(part.text for part in single if part.thought == kind)


@pytest.mark.parametrize(
    ("opened", "closed"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|channel>thought\n", "<channel|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<longcat_think>", "</longcat_think>"),
    ],
)
def test_every_notation_is_known(opened: str, closed: str) -> None:
    assert splitted(f"{opened}hm{closed}\n\nyes") == [Part("hm", True), Part("yes", False)]
    assert splitted(f"hm{closed}yes", thinking=True) == [Part("hm", True), Part("yes", False)]
    assert opens_thought(f"<|user|>hi<|assistant|>{opened}\n")
    assert not opens_thought(f"<|user|>hi<|assistant|>{opened}\n\n{closed}\n\n")


def splitted(text: str, *, thinking: bool = False) -> list[Part]:
    splitter = ThoughtSplitter(thinking=thinking)
    return [*splitter.feed(text), *splitter.flush()]


def test_special_tokens_out_of_place_are_ignored() -> None:
    splitter = ThoughtSplitter()
    parts = [
        *splitter.feed("a"),
        *splitter.special("<think>"),
        *splitter.special("<|end|>"),
        *splitter.feed("b"),
    ]
    assert [*parts, *splitter.flush()] == [Part("a", False), Part("b", False)]
