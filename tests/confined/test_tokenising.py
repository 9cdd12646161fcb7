"""Tokenizers whose rules are out of bounds: refused when they are loaded, or limited for each text."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import write_byte_tokenizer

from moechat.confined.limits import Limits
from moechat.confined.process import SHARED
from moechat.confined.tokenising import tokenise
from moechat.confined.tokenizer_rules import Growth, growth, require_bounded, require_loadable
from moechat.errors import ModelRulesError
from moechat.models.assets import load_tokenizer
from moechat.models.gguf_splits import LINEAR_PATTERNS, SPLITS
from moechat.models.text import TextStream

BACKTRACKING = "a" * 40 + "!"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def sequence(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def written(directory: Path, **changes: Any) -> Path:
    """A directory with a byte tokenizer whose description is changed."""
    write_byte_tokenizer(directory)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def pre(*steps: dict[str, Any]) -> dict[str, Any]:
    return sequence("pretokenizers", *steps, BYTE_LEVEL)


def test_a_regular_expression_that_backtracks_refuses_the_text_and_only_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(written(tmp_path, pre_tokenizer=pre(split(r"(a+)+$"))))
    with pytest.raises(ModelRulesError, match=r"tokenizer of this-model fails on this text: .*retry-limit"):
        tokenise(tokenizer, BACKTRACKING, "this-model")
    assert tokenizer.decode(tokenise(tokenizer, "hello aaa", "this-model")) == "hello aaa"


def test_a_regular_expression_of_long_but_finite_time_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each match stays below the limit of tries of the library, but there are as many as characters."""
    less = replace(Limits.of_splitting(0), cpu_s=0.4)
    monkeypatch.setattr(Limits, "of_splitting", lambda _: less)
    tokenizer = load_tokenizer(written(tmp_path, pre_tokenizer=pre(split(r"a{1,1500}a{1,1500}c"))))
    with pytest.raises(ModelRulesError, match=r"takes more than \d+ s for this text of 50,002 bytes"):
        tokenise(tokenizer, "a" * 50_000 + "xc", "this-model")


def test_growth_below_the_bound_is_limited_by_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    less = replace(Limits.of_splitting(0), memory=48 << 20)
    monkeypatch.setattr(Limits, "of_splitting", lambda _: less)
    normalizer = sequence("normalizers", *[DOUBLING] * 15)
    tokenizer = load_tokenizer(written(tmp_path, normalizer=normalizer))
    with pytest.raises(ModelRulesError, match=r"takes more than \d+ MiB of memory for this text of 4,000 b"):
        tokenise(tokenizer, "a" * 4000, "this-model")
    assert len(tokenise(tokenizer, "ab", "this-model")) == (1 << 15) + 1


@pytest.mark.parametrize(
    ("part", "rules", "said"),
    [
        ("normalizer", sequence("normalizers", *[DOUBLING] * 30), "1,073,741,824 times as long; .* 65,536"),
        (
            "normalizer",
            sequence("normalizers", *[sequence("normalizers", *[DOUBLING] * 6)] * 5),
            "1,073,741,824 times as long",
        ),
        ("normalizer", sequence("normalizers", *[{"type": "ByteLevel"}] * 30), "1,073,741,824 times"),
        (
            "normalizer",
            sequence(
                "normalizers", *[{"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y" * 300}] * 2
            ),
            "90,601 times",
        ),
        (
            "pre_tokenizer",
            sequence("pretokenizers", *[BYTE_LEVEL] * 30),
            "1,073,741,824 times",
        ),
        ("decoder", sequence("decoders", *[DOUBLING] * 30), "an answer 1,073,741,824 times as long; .* 64"),
        (
            "decoder",
            {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
            "decodes by a regular expression",
        ),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}]
                + [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}},
            },
            "adds 1,000,000 tokens to every text; .* 1,024",
        ),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 9,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {},
            },
            "repeats every text 9 times",
        ),
        (
            "model",
            {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 10**9,
                "vocab": {"[UNK]": 0, "a": 1},
            },
            "searches words of 1,000,000,000 characters",
        ),
    ],
)
def test_rules_without_a_reasonable_bound_are_refused_at_loading(
    part: str, rules: dict[str, Any], said: str, tmp_path: Path
) -> None:
    directory = written(tmp_path, **{part: rules})
    begin = time.monotonic()
    with pytest.raises(ModelRulesError, match=said) as refused:
        load_tokenizer(directory)
    assert str(tmp_path) in str(refused.value)
    assert refused.value.exit_code == 3
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "spelling",
    [
        '{"normalizer": BOMB, "model": MODEL}',
        '{"model": MODEL, "normalizer": BOMB}',
        '{"model": MODEL, "norm\\u0061lizer": BOMB}',
        '{"normalizer": null, "model": MODEL, "normalizer" :\n{"type": "Sequence", "normalizers": [BOMB]}}',
        '{"added_tokens": [{"model": 3}], "normalizer": BOMB, "model": MODEL}',
        '{"x": "\\"model\\": null", "normalizer": BOMB, "model": MODEL}',
        '{"normalizer": OLD, "model": MODEL}',
    ],
)
def test_a_normalizer_is_found_wherever_the_file_has_it(spelling: str, tmp_path: Path) -> None:
    """Loading applies it to the added words, so it must be found before."""
    bomb = json.dumps(sequence("normalizers", *[DOUBLING] * 30))
    old = json.dumps(
        {"type": "Sequence", "normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 30}
    )
    model = json.dumps({"type": "BPE", "vocab": {"normalizer": 3, "model": 4}, "merges": []})
    path = tmp_path / "tokenizer.json"
    path.write_text(spelling.replace("BOMB", bomb).replace("OLD", old).replace("MODEL", model))
    with pytest.raises(ModelRulesError, match="1,073,741,824"):
        require_loadable(path)


def test_a_large_vocabulary_is_not_parsed_for_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    content = {
        "normalizer": {"type": "NFC"},
        "model": {"type": "BPE", "vocab": {"normalizer": 0, '"model"': 1, "é": 2}, "merges": []},
    }
    path.write_text(json.dumps(content, ensure_ascii=False))
    seen: list[int] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: seen.append(len(text)) or loads(text))
    require_loadable(path)
    assert seen == [len('{"normalizer": {"type": "NFC"}, "model": null}')]


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": pre(*map(split, SPLITS["qwen2"].patterns))},
        {
            "normalizer": sequence(
                "normalizers",
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ),
            "decoder": sequence(
                "decoders",
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ),
        },
        {"normalizer": sequence("normalizers", {"type": "NFKC"}, {"type": "NFC"}, {"type": "Lowercase"})},
        {"pre_tokenizer": sequence("pretokenizers", {"type": "Metaspace", "replacement": "▁"})},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}},
    ],
)
def test_tokenizers_of_common_models_need_no_trial(parts: dict[str, Any]) -> None:
    assert not require_bounded(parts, "model", LINEAR_PATTERNS).tried


def test_an_unknown_rule_or_pattern_is_tried() -> None:
    for rule in ({"type": "Unheard"}, split(r"\w+|\W"), {"type": "Precompiled"}, {}):
        assert growth([rule], LINEAR_PATTERNS).tried
    assert growth([]) == Growth(1, False)


def test_a_tokenizer_that_needs_no_trial_asks_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(written(tmp_path))
    monkeypatch.setattr(SHARED, "request_described", lambda *_: pytest.fail("a trial"))
    assert len(tokenise(tokenizer, "hello", "model")) == 5


def test_a_trial_follows_the_added_words(tmp_path: Path) -> None:
    """They cut a text before it is split, so a text that backtracks only without them is accepted."""
    tokenizer = load_tokenizer(written(tmp_path, pre_tokenizer=pre(split(r"(a+)+\z"))))
    text = "a" * 40 + "<|end|>!"
    assert len(tokenise(tokenizer, text, "model")) == 42


def test_a_panic_while_decoding_is_an_error_too() -> None:
    class PanicException(BaseException):
        pass

    class Tokenizer:
        all_special_ids = ()

        def decode(self, *_: object, **__: object) -> str:
            raise PanicException("index out of bounds")

    with pytest.raises(ModelRulesError, match="fails on this text: index out of bounds"):
        TextStream(Tokenizer()).push(1)


def test_the_trial_knows_a_second_tokenizer_and_the_first_again(tmp_path: Path) -> None:
    first = load_tokenizer(written(tmp_path / "1", pre_tokenizer=pre(split(r"(a+)+$"))))
    second = load_tokenizer(written(tmp_path / "2", pre_tokenizer=pre(split(r"(b+)+$"))))
    for _ in range(2):
        assert len(tokenise(first, "b" * 40 + "!", "first")) == 41
        assert len(tokenise(second, BACKTRACKING, "second")) == 41
        with pytest.raises(ModelRulesError, match="tokenizer of first"):
            tokenise(first, BACKTRACKING, "first")
        with pytest.raises(ModelRulesError, match="tokenizer of second"):
            tokenise(second, "b" * 40 + "!", "second")
