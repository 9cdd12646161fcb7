"""Tokenizers from the vocabularies of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moechat.errors import CheckpointError, UnsupportedModelError, one_line
from moechat.models.gguf_metadata import quoted
from moechat.models.gguf_splits import SPLITS, Splits
from moechat.store.gguf_file import GgufFile
from moechat.store.gguf_header import read_arrays

_PREFIX = "tokenizer.ggml."
_CONTROL, _OF_USERS = 3, 4
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def byte_level_tokenizer(path: Path) -> Any | None:
    """The tokenizer of a file whose vocabulary merges bytes.

    Args:
        path: The file, or one that begins with its header.

    Returns:
        A ``PreTrainedTokenizerFast``; ``None`` if the vocabulary is of another kind.

    Raises:
        CheckpointError: The vocabulary is damaged.
        UnsupportedModelError: Text is split in a way that moechat does not know.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    file = GgufFile.open(path)
    metadata = file.header.metadata
    if metadata.get(f"{_PREFIX}model") != "gpt2":
        return None
    splits = _splits(metadata, path)
    arrays = read_arrays(path, {f"{_PREFIX}{name}" for name in ("tokens", "merges", "token_type")})
    words, merges, kinds = (arrays.get(f"{_PREFIX}{name}", []) for name in ("tokens", "merges", "token_type"))
    for name, found in (("tokens", words), ("merges", merges)):
        if not found or not isinstance(found[0], str):
            raise CheckpointError(f"the vocabulary of {path} has no list of {name}: {_PREFIX}{name}")
    if kinds and len(kinds) != len(words):
        raise CheckpointError(f"{path} has {len(words)} words in its vocabulary and types of {len(kinds)}")
    pairs = [_pair(merge, path) for merge in merges]
    vocabulary = {word: number for number, word in enumerate(words)}
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=splits.whole_words)
    except Exception as problem:  # the library raises plain exceptions
        raise CheckpointError(f"the vocabulary of {path} is damaged: {one_line(problem)}") from problem
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_OF_USERS, False)):
        added = [
            AddedToken(word, normalized=False, special=special)
            for word, own in zip(words, kinds, strict=False)
            if own == kind and word
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    named = {name: _word(metadata, key, words) for name, key in _SPECIAL.items()}
    _add_ends(tokenizer, metadata, splits, named, words)
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **({"chat_template": template} if isinstance(template, str) else {}),
        **{name: word for name, word in named.items() if word is not None},
    )


def _splits(metadata: dict[str, Any], path: Path) -> Splits:
    name = metadata.get(f"{_PREFIX}pre", "gpt-2")
    if name == "default":
        name = "gpt-2"
    if name not in SPLITS:
        raise UnsupportedModelError(
            f"the vocabulary of {path} splits text as {quoted(name)}, which moechat does not know",
            hint=f"it knows {', '.join(sorted(SPLITS))}",
        )
    return SPLITS[name]


def _pair(merge: str, path: Path) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    if not first or not second:
        raise CheckpointError(f"the vocabulary of {path} has the merge {quoted(merge)}, which is none")
    return first, second


def _word(metadata: dict[str, Any], key: str, words: list[str]) -> str | None:
    number = metadata.get(f"{_PREFIX}{key}")
    valid = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(words)
    return words[number] if valid else None  # type: ignore[index]


def _add_ends(
    tokenizer: Any, metadata: dict[str, Any], splits: Splits, named: dict[str, str | None], words: list[str]
) -> None:
    """Add the tokens that begin and end every text, if the vocabulary does so."""
    from tokenizers import processors

    first = named["bos_token"] if metadata.get(f"{_PREFIX}add_bos_token", splits.adds_beginning) else None
    last = named["eos_token"] if metadata.get(f"{_PREFIX}add_eos_token", False) else None
    if first is None and last is None:
        return
    before, after = ([f"{first}"] if first else []), ([f"{last}"] if last else [])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{word}:1" for word in before), "$B:1", *(f"{w}:1" for w in after)],
        special_tokens=[(word, words.index(word)) for word in dict.fromkeys([*before, *after])],
    )
