"""Turns text into tokens: rules of unknown cost first run in the confined process, under limits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from moechat.confined.limits import Limits
from moechat.confined.process import SHARED, LimitError, RefusedError
from moechat.confined.tokenizer_rules import require_bounded
from moechat.errors import ModelRulesError, one_line

_HINT = "another text may work; tokenizer.json may be damaged or hostile: get the model from its publisher"


@dataclass(frozen=True)
class Trial:
    """What the confined process needs to try a text.

    Attributes:
        key: Digest of the description.
        description: A ``tokenizer.json`` with the rules and the added words, without the vocabulary.
    """

    key: str
    description: str


_TRIALS: WeakKeyDictionary[Any, Trial | None] = WeakKeyDictionary()


def require_bounded_tokenizer(tokenizer: Any, name: str, harmless: Collection[str] = ()) -> None:
    """Examine a tokenizer that was loaded, before its first use.

    Args:
        tokenizer: A transformers tokenizer, also one that was made from other files than ``tokenizer.json``.
        name: Of the model, for messages.
        harmless: Regular expressions whose time is linear, so that no trial is needed.

    Raises:
        ModelRulesError: As :func:`moechat.confined.tokenizer_rules.require_bounded`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # in Python, from files without rules
        _TRIALS[tokenizer] = None
        return
    parts: dict[str, Any] = {
        part: _description(getattr(backend, part))
        for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor")
    }
    parts["longest_word"] = getattr(backend.model, "max_input_chars_per_word", None)
    read = require_bounded(parts, name, harmless)
    _TRIALS[tokenizer] = _trial(backend, parts) if read.tried else None


def tokenise(tokenizer: Any, text: str, name: str, **arguments: Any) -> list[int]:
    """The tokens of a text.

    Args:
        tokenizer: A transformers tokenizer.
        text: The text.
        name: Of the model, for messages.
        arguments: For the tokenizer, such as ``add_special_tokens``.

    Raises:
        ModelRulesError: Rules of the tokenizer take too long or too much memory for this text, or fail.
        TypeError: The text is none.
        UnicodeError: It has lone surrogates.
    """
    trial = _TRIALS.get(tokenizer)
    if trial is not None and isinstance(text, str):
        _try(trial, text, name)
    with panics_reported(name):
        return list(tokenizer(text, **arguments)["input_ids"])


@contextmanager
def panics_reported(name: str) -> Iterator[None]:
    """Turn a panic of the tokenizers' library, which no ``except Exception`` sees, into an error.

    Args:
        name: Of the model, for messages.

    Raises:
        ModelRulesError: There was one.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ModelRulesError(
            f"the tokenizer of {name} fails on this text: {one_line(error)}", hint=_HINT
        ) from None


def _try(trial: Trial, text: str, name: str) -> None:
    size = len(text.encode())
    limits = Limits.of_splitting(size)
    try:
        SHARED.request_described(limits, "split", trial.key, trial.description, text)
    except RefusedError as error:
        raise ModelRulesError(
            f"the tokenizer of {name} fails on this text: {one_line(error)}", hint=_HINT
        ) from None
    except LimitError as error:
        known = {"time": f"{limits.cpu_s:.0f} s", "memory": f"{limits.memory >> 20:,} MiB of memory"}
        taken = known.get(error.name)
        fault = (
            f"fails on this text: {one_line(error)}"
            if taken is None
            else f"takes more than {taken} for this text of {size:,} bytes"
        )
        raise ModelRulesError(f"the tokenizer of {name} {fault}", hint=_HINT) from None


def _description(part: Any) -> Any:
    """A part of a tokenizer as in ``tokenizer.json``; ``None`` if there is none."""
    if part is None:
        return None
    try:
        return json.loads(part.__getstate__())
    except Exception:  # made in Python: of a kind that files cannot have
        return {"type": type(part).__name__}


def _trial(backend: Any, parts: dict[str, Any]) -> Trial:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    words = [
        {"id": number, **{name: getattr(word, name) for name in names}}
        for number, word in sorted(backend.get_added_tokens_decoder().items())
    ]
    description = json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": words,
            "normalizer": parts["normalizer"],
            "pre_tokenizer": parts["pre_tokenizer"],
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
        }
    )
    return Trial(hashlib.sha256(description.encode()).hexdigest(), description)
