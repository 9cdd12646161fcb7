"""How byte-level vocabularies of GGUF files split text before merges: patterns by llama.cpp's names.

Patterns are those of the models' own ``tokenizer.json``; llama.cpp rewrites some of them for its engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BLANKS
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANKS
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANKS
)
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]*[{_LOWER}{_NO_HAN}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]+[{_LOWER}{_NO_HAN}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
)
_WORDS_OF_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _BLANKS
)
_DEEPSEEK_V2 = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    _WORDS_OF_DEEPSEEK,
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}",
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Words with a blank between them stay together.
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _BLANKS


@dataclass(frozen=True)
class Splits:
    """How text is split.

    Attributes:
        patterns: Applied in turn, each to the pieces that the ones before left; what no pattern matches is a
            piece too.
        whole_words: A piece that is a word of the vocabulary is not merged from its bytes.
        adds_beginning: Texts get a token for their beginning unless the file states otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_beginning: bool = False


def _named(splits: Splits, *names: str) -> dict[str, Splits]:
    return dict.fromkeys(names, splits)


SPLITS: Mapping[str, Splits] = {
    **_named(
        Splits((_GPT2,)),
        *("gpt-2", "olmo", "mpt", "jais", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion"),
        *("granite-docling",),
    ),
    **_named(
        Splits((_LLAMA3,), whole_words=True, adds_beginning=True),
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    **_named(Splits((_LLAMA3,)), "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    **_named(
        Splits((_QWEN2,)),
        *(
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "megrez",
            "stablelm2",
            "hunyuan",
            "grok-2",
            "f2llmv2",
            "solar-open",
        ),
    ),
    "qwen35": Splits((_QWEN35,)),
    **_named(Splits((_GPT_4O,)), "gpt-4o", "llama4", "minimax-m2"),
    "tekken": Splits((_TEKKEN,), whole_words=True, adds_beginning=True),
    "kimi-k2": Splits((_KIMI,)),
    "deepseek-llm": Splits(_DEEPSEEK_V2),
    "deepseek-coder": Splits(_DEEPSEEK_CODER),
    **_named(Splits(_DEEPSEEK_V3), "deepseek-v3", "hunyuan-dense", "joyai-llm"),
    **_named(Splits((_BAILING,)), "bailingmoe", "bailingmoe2", "llada-moe"),
    "seed-coder": Splits((_SEED,)),
    "exaone-moe": Splits((_EXAONE_MOE,)),
    **_named(Splits((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O)), "tiny_aya", "cohere2moe"),
    "laguna": Splits((r"[^\n]+|\n+", _QWEN2)),
    **_named(Splits((r"\p{N}", _GPT2)), "starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"),
    # Digits in groups of three, counted from the last one.
    "afmoe": Splits((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _WORDS_OF_DEEPSEEK)),
}

# Patterns whose time grows with the length of a text alone. Those that look ahead to the end of a number take
# the square of its digits.
LINEAR_PATTERNS = frozenset(
    pattern for splits in SPLITS.values() for pattern in splits.patterns if "(?=(?:" not in pattern
)
