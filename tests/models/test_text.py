"""Streamed text never shows half a character and adds up to the whole text."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_byte_tokenizer
from transformers import AutoTokenizer

from moechat.models.text import TextStream


def byte_tokenizer() -> Any:
    """One token a byte: every character beyond ASCII is split over several tokens."""
    with tempfile.TemporaryDirectory() as directory:
        write_byte_tokenizer(Path(directory))
        return AutoTokenizer.from_pretrained(directory)


TOKENIZER = byte_tokenizer()


def stream(tokens: list[int]) -> list[str]:
    text = TextStream(TOKENIZER)
    return [text.push(token) for token in tokens] + [text.flush()]


@given(st.text(max_size=60))
@settings(deadline=None)
def test_pieces_add_up_to_the_text(text: str) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    pieces = stream(tokens)
    assert "".join(pieces) == TOKENIZER.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


END = TOKENIZER.convert_tokens_to_ids("<|end|>")
EMOJI = TOKENIZER("\N{GRINNING FACE}")["input_ids"]


@given(
    st.lists(st.sampled_from([*range(0, 256, 7), *EMOJI, *TOKENIZER("é x")["input_ids"], END]), max_size=40)
)
@settings(deadline=None, max_examples=300)
def test_pieces_of_any_tokens_add_up_to_their_decoded_text(tokens: list[int]) -> None:
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(stream(tokens)) == whole


@pytest.mark.parametrize("specials", [[END] * 3, [END] * 9])
def test_special_tokens_inside_a_character_do_not_break_it(specials: list[int]) -> None:
    tokens = [*specials, *EMOJI[:2], *specials, *EMOJI[2:], *TOKENIZER("é")["input_ids"]]
    assert "".join(stream(tokens)) == "\N{GRINNING FACE}é"


@pytest.mark.parametrize("text", ["naïve", "日本語", "👩‍🚀 and 🏳️‍🌈", "a\u0301", "Ω"])
def test_no_piece_holds_half_a_character(text: str) -> None:
    pieces = stream(TOKENIZER(text)["input_ids"])
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_invalid_bytes_do_not_delay_the_text() -> None:
    broken = TOKENIZER("é")["input_ids"][:1]
    tokens = broken * 12 + TOKENIZER("after")["input_ids"]
    text = TextStream(TOKENIZER)
    pieces = [text.push(token) for token in tokens]
    assert "after" in "".join(pieces) + text.flush()
    assert any(pieces[:8])


def test_special_tokens_are_not_shown() -> None:
    end = TOKENIZER.convert_tokens_to_ids("<|end|>")
    tokens = [*TOKENIZER("ab")["input_ids"], end, *TOKENIZER("cd")["input_ids"]]
    assert "".join(stream(tokens)) == "abcd"


def test_incomplete_tail_is_flushed_as_replacement_character() -> None:
    pieces = stream(TOKENIZER("é")["input_ids"][:1])
    assert pieces == ["", "\N{REPLACEMENT CHARACTER}"]
