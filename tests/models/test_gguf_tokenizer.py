"""Byte-level vocabularies of GGUF files: the words that the models' own tokenizers make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.models.gguf_splits import SPLITS
from moechat.models.gguf_tokenizer import byte_level_tokenizer

LETTERS = list(bytes_to_unicode().values())
TEXT = "I'll say 12345, héllo  wörld!\n\n  数字日本語 ok"


def written(path: Path, pre: str, *, extra: Callable[[gguf.GGUFWriter], Any] = lambda writer: None) -> Path:
    """A file with single bytes, five merged words and three added ones."""
    words = ["he", "ll", "Ġw", "hell", "hello"]
    added = ["<s>", "</s>", "<think>"]
    writer = gguf.GGUFWriter(path, "olmoe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*LETTERS, *words, *added])
    writer.add_token_types([1] * (256 + len(words)) + [3, 3, 4])
    writer.add_token_merges(["h e", "l l", "Ġ w", "he ll", "hell o"])
    writer.add_bos_token_id(261)
    writer.add_eos_token_id(262)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def pieces(pre: str, text: str) -> list[str]:
    """How a text is split."""
    from tokenizers import Regex, pre_tokenizers

    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[pre].patterns]
    )
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]


def test_words_and_added_ones_are_found_and_every_text_comes_back(tmp_path: Path) -> None:
    byte_level_tokenizer(written(tmp_path / "m.gguf", "qwen2")).save_pretrained(tmp_path / "t")  # type: ignore[union-attr]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t")
    ids = tokenizer("hello world<think></s>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["hello", "Ġw"]
    assert ids[-2:] == [263, 262]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world<think>"
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<s>", "</s>", 264)


@pytest.mark.parametrize("pre", SPLITS)
def test_every_split_keeps_the_text(pre: str) -> None:
    assert "".join(pieces(pre, TEXT)) == TEXT


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " 12345", ",", " é", " ", " b"]),
        ("llama-bpe", ["I", "'ll", " ", "123", "45", ",", " é", " ", " b"]),
        ("qwen2", ["I", "'ll", " ", "1", "2", "3", "4", "5", ",", " é", " ", " b"]),
        ("refact", ["I", "'ll", " ", "1", "2", "3", "4", "5", ",", " é", " ", " b"]),
        ("deepseek-v3", ["I", "'ll", " ", "123", "45", ",", " é", " ", " b"]),
        ("afmoe", ["I", "'ll", " ", "12", "345", ",", " é", " ", " b"]),
        ("exaone-moe", ["I", "'ll", " ", "1", "2", "3", "4", "5", ",", " é", " ", " b"]),
        ("cohere2moe", ["I'll", " ", "12", "345", ",", " é", " ", " b"]),
    ],
)
def test_texts_are_split_as_by_the_models_that_have_the_name(pre: str, expected: list[str]) -> None:
    assert pieces(pre, "I'll 12345, é  b") == expected


def test_qwen2_splits_by_the_pattern_of_transformers() -> None:
    assert SPLITS["qwen2"].patterns == (PRETOKENIZE_REGEX,)


@pytest.mark.parametrize(
    ("pre", "stated", "first"), [("llama-bpe", None, 261), ("llama-bpe", False, None), ("qwen2", True, 261)]
)
def test_a_beginning_is_added_where_the_vocabulary_does_so(
    tmp_path: Path, pre: str, stated: bool | None, first: int | None
) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        if stated is not None:
            writer.add_add_bos_token(stated)

    tokenizer = byte_level_tokenizer(written(tmp_path / "m.gguf", pre, extra=extra))
    assert tokenizer is not None
    ids = tokenizer("hello").input_ids
    assert ids == ([260] if first is None else [first, 260])


def test_an_unknown_split_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="splits text as 'unheard-of'"):
        byte_level_tokenizer(written(tmp_path / "m.gguf", "unheard-of"))


def test_a_damaged_vocabulary_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "qwen2")
    path.write_bytes(path.read_bytes().replace(b"he ll", b"hexll"))
    with pytest.raises(CheckpointError, match="has the merge 'hexll'"):
        byte_level_tokenizer(path)
