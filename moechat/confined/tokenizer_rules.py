"""What a tokenizer's description says about its cost: rules without bound are refused, risky ones confined.

A ``tokenizer.json`` may multiply text (a normalizer that replaces "a" by "aa", 30 times), split it by a
regular expression that tries exponentially many ways, or add a million tokens to every text. None of this
needs a vocabulary, so this module looks at the other parts only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.errors import ModelRulesError

MOST_GROWTH = 1 << 16  # of a text by all rules together; above it a tokenizer is refused
PLAIN_GROWTH = 64  # up to here it is run without trial
MOST_ADDED = 1024  # tokens that the template of a post-processor may add to a text
MOST_WORD = 1000  # characters of a word that WordPiece searches for parts, in cubic time

_HINT = "tokenizer.json may be damaged or hostile: get the model from its publisher, or take another"
# Bytes of UTF-8 that may come of one byte.
_NORMAL_FORMS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
_FACTORS = {
    **_NORMAL_FORMS,
    "Lowercase": 2,
    "StripAccents": 1,
    "Strip": 1,
    "Nmt": 1,
    "BertNormalizer": 12,
    "ByteLevel": 2,
    "Metaspace": 3,
    "Whitespace": 1,
    "WhitespaceSplit": 1,
    "BertPreTokenizer": 1,
    "Digits": 1,
    "Punctuation": 1,
    "UnicodeScripts": 1,
    "CharDelimiterSplit": 1,
}
_STEPS = ("normalizers", "pretokenizers", "decoders", "processors")
_MODEL, _NORMALIZER = b'"model"', b'"normalizer"'
_RULES = re.compile(_NORMALIZER + rb"\s*:\s*\{")
_LETTER_ESCAPE = re.compile(rb"\\u00[4-7]")  # with which a key can be written in another way


@dataclass(frozen=True)
class Growth:
    """How rules change the size of a text.

    Attributes:
        factor: Bytes that may come of one byte.
        tried: A trial under limits must come before each use: a regular expression that is not known to be
            harmless, a rule of an unknown kind, or much growth.
    """

    factor: float = 1
    tried: bool = False


def growth(steps: Sequence[Mapping[str, Any]], harmless: Collection[str] = ()) -> Growth:
    """The growth by rules that are applied in turn.

    Args:
        steps: Descriptions of normalizers, pre-tokenizers or decoders.
        harmless: Regular expressions whose time is linear.
    """
    factor, tried, normal = 1.0, False, False
    for step in steps:
        kind = step.get("type")
        if kind in _NORMAL_FORMS:
            # The normal form of a normal form is no longer, unless something was written in between.
            factor *= 1 if normal else _NORMAL_FORMS[str(kind)]
            normal = True
        elif kind == "Replace":
            pattern, content = _pattern(step), len(str(step.get("content", "")).encode("utf-8", "replace"))
            literal = pattern.get("String")
            if isinstance(literal, str) and literal:
                factor *= max(1.0, content / len(literal.encode("utf-8", "replace")))
            else:
                factor *= 1 + content
                tried = True
            normal = False
        elif kind == "Split":
            pattern = _pattern(step)
            tried = tried or not ("String" in pattern or pattern.get("Regex") in harmless)
        elif kind == "Prepend":
            tried = tried or len(str(step.get("prepend", ""))) > 64
            normal = False
        elif kind in _FACTORS:
            factor *= _FACTORS[str(kind)]
        else:
            tried, normal = True, False
    return Growth(factor, tried or factor > PLAIN_GROWTH)


def flat(description: object) -> list[Mapping[str, Any]]:
    """The rules of a description in the order in which they are applied; sequences are resolved."""
    found: list[Mapping[str, Any]] = []
    pending = [description]
    while pending:
        rule = pending.pop()
        if isinstance(rule, Mapping):
            inner = next((rule[key] for key in _STEPS if isinstance(rule.get(key), list)), None)
            if rule.get("type") == "Sequence" and inner is not None:
                pending.extend(reversed(inner))
            else:
                found.append(rule)
    return found


def require_bounded(parts: Mapping[str, Any], name: str, harmless: Collection[str] = ()) -> Growth:
    """Refuse a tokenizer whose rules have no reasonable bound.

    Args:
        parts: ``normalizer``, ``pre_tokenizer``, ``decoder`` and ``post_processor`` as in ``tokenizer.json``;
            ``None`` or missing if there is none. Also ``longest_word``, characters that WordPiece searches.
        name: Of the tokenizer, for messages.
        harmless: Regular expressions whose time is linear.

    Returns:
        The growth by normalizer and pre-tokenizer.

    Raises:
        ModelRulesError: A text could grow more than :data:`MOST_GROWTH` times, a post-processor adds more
            than :data:`MOST_ADDED` tokens or repeats the text, a decoder uses a regular expression or
            multiplies text, or words that are searched for parts may be longer than :data:`MOST_WORD`.
    """
    read = growth([*flat(parts.get("normalizer")), *flat(parts.get("pre_tokenizer"))], harmless)
    if read.factor > MOST_GROWTH:
        _refuse(name, f"could make a text {read.factor:,.0f} times as long", f"{MOST_GROWTH:,} times")
    decoders = flat(parts.get("decoder"))
    for rule in decoders:
        if rule.get("type") == "Replace" and "String" not in _pattern(rule):
            _refuse(name, "decodes by a regular expression, whose time has no bound", "fixed texts")
    written = growth(decoders).factor
    if written > PLAIN_GROWTH:
        _refuse(name, f"could make an answer {written:,.0f} times as long", f"{PLAIN_GROWTH} times")
    for rule in flat(parts.get("post_processor")):
        added, repeated = _template_size(rule)
        if added > MOST_ADDED:
            _refuse(name, f"adds {added:,} tokens to every text", f"{MOST_ADDED:,}")
        if repeated > 1:
            _refuse(name, f"repeats every text {repeated:,} times", "once")
    longest = parts.get("longest_word")
    if isinstance(longest, int) and longest > MOST_WORD:
        _refuse(name, f"searches words of {longest:,} characters for parts", f"{MOST_WORD:,}")
    return read


def require_loadable(path: Path) -> None:
    """Check the normalizer of a ``tokenizer.json`` before a library applies it to added words, while loading.

    The vocabulary is not parsed if it comes last, as in files that the library has written: a large one would
    take a third of a second.

    Raises:
        ModelRulesError: As :func:`require_bounded`.
    """
    try:
        rules = flat(_outer_parts(path.read_bytes()).get("normalizer"))
    except (OSError, ValueError, RecursionError):
        return  # loading reports it
    # Old files leave kinds out.
    named = [{"type": "Replace", **rule} if "pattern" in rule else rule for rule in rules]
    require_bounded({"normalizer": {"type": "Sequence", "normalizers": named}}, f"{path}")


def _outer_parts(data: bytes) -> Mapping[str, Any]:
    """The parts of a ``tokenizer.json``, without the model if it is the last one.

    Raises:
        ValueError: The text is no JSON.
        RecursionError: It is nested too deeply.
    """
    model = data.find(_MODEL)
    if model >= 0 and not _may_have_rules(data, model):
        try:
            # Valid only if the word was a key of the outermost object.
            return dict(json.loads(data[:model] + _MODEL + b": null}"))
        except ValueError:
            pass
    parts = json.loads(data)
    return parts if isinstance(parts, dict) else {}


def _may_have_rules(data: bytes, begin: int) -> bool:
    """Whether a normalizer may follow; words of a vocabulary have numbers instead."""
    for word, rest in ((_NORMALIZER, _RULES), (b"\\u00", _LETTER_ESCAPE)):
        at = data.find(word, begin)
        while at >= 0:
            if rest.match(data, at):
                return True
            at = data.find(word, at + 1)
    return False


def _refuse(name: str, fact: str, most: str) -> None:
    raise ModelRulesError(f"the tokenizer of {name} {fact}; moechat allows {most}", hint=_HINT)


def _pattern(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    pattern = rule.get("pattern")
    # Decoders of some versions have the text alone.
    return (
        pattern if isinstance(pattern, Mapping) else {"String": pattern} if isinstance(pattern, str) else {}
    )


def _template_size(rule: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens that a post-processor adds, and how often it repeats a text."""
    if rule.get("type") != "TemplateProcessing":
        return 0, 1
    special = rule.get("special_tokens")
    added = repeated = 0
    for form in ("single", "pair"):
        pieces = rule.get(form)
        tokens, texts = 0, {"A": 0, "B": 0}
        for piece in pieces if isinstance(pieces, list) else ():
            if not isinstance(piece, Mapping):
                continue
            for kind, content in piece.items():
                identifier = content.get("id") if isinstance(content, Mapping) else None
                if kind == "Sequence" and identifier in texts:
                    texts[str(identifier)] += 1
                elif isinstance(special, Mapping):
                    known = special.get(str(identifier))
                    ids = known.get("ids") if isinstance(known, Mapping) else None
                    tokens += len(ids) if isinstance(ids, list) else 1
        added, repeated = max(added, tokens), max(repeated, *texts.values())
    return added, repeated
