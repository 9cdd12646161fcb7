"""The calibration text as token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from moechat.calibration.text import MOST_ROWS, ROW_TOKENS, calibration_ids, calibration_text
from moechat.errors import UnsupportedModelError
from moechat.models.assets import load_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> object:
    tiny.write_byte_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def test_rows_are_spread_over_the_whole_text(tokenizer: object) -> None:
    ids = calibration_ids(tokenizer, tiny.BYTE_VOCABULARY)
    assert ids.shape == (MOST_ROWS, ROW_TOKENS)
    text = calibration_text()
    length = len(tokenizer(text)["input_ids"])  # type: ignore[operator]
    rows = [tokenizer.decode(row) for row in ids]  # type: ignore[attr-defined]
    assert text.startswith(rows[0][:100])
    assert length > 2 * ids.numel()
    assert len({row[:100] for row in rows}) == MOST_ROWS
    # The last row comes from the last part of the text.
    assert rows[-1][-100:-10] in text[int(0.85 * len(text)) :]


def test_every_row_begins_with_the_token_that_begins_a_text(tokenizer: object) -> None:
    tokenizer.bos_token = "<|user|>"  # type: ignore[attr-defined]
    ids = calibration_ids(tokenizer, tiny.BYTE_VOCABULARY)
    assert ids.shape == (MOST_ROWS, ROW_TOKENS)
    assert torch.equal(ids[:, 0], torch.full((MOST_ROWS,), tokenizer.bos_token_id))  # type: ignore[attr-defined]


def test_a_model_without_a_fitting_tokenizer_is_refused(tokenizer: object) -> None:
    with pytest.raises(UnsupportedModelError, match="no tokenizer"):
        calibration_ids(None, 100)
    with pytest.raises(UnsupportedModelError, match="does not fit the model's 101 embeddings"):
        calibration_ids(tokenizer, 101)


def test_the_text_is_of_many_kinds_and_long_enough() -> None:
    """Large vocabularies need about four characters a token."""
    text = calibration_text()
    assert len(text) > 25_000
    for part in ("def ", "SELECT", "Assistant:", "ß", "的", "$$"):
        assert part in text
