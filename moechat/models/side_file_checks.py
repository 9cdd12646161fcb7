"""Checks of a model's small files before transformers reads them: sizes, nesting, encoding, types.

transformers trusts these files: a text where it expects an object ends in any kind of exception, some of them
only when the model answers. Errors name the file and the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moechat.errors import UnsupportedModelError, one_line
from moechat.store.checkpoint_files import read_json, read_limited
from moechat.store.config_limits import MAX_VALUES
from moechat.store.source_files import TEMPLATES, require_inside, require_regular
from moechat.validation import shown

GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer_config.json"
# Read by transformers in Python. Others, such as tokenizer.json, are read by a library in Rust.
_OBJECTS = (_TOKENIZER, "special_tokens_map.json", "added_tokens.json", "chat_template.json")
_MAX_BYTES = 64 << 20
_MAX_ENTRIES = 4 * MAX_VALUES  # added tokens are described one by one
_MAX_TEMPLATE_BYTES = 4 << 20
_AGAIN = "fetch it again from the model's repository"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tokens(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, list) and all(map(_is_whole, value)))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token(value: Any) -> bool:
    """Whether it can be a special token: a text, or the object that transformers writes of one."""
    return _is_text(value) or (isinstance(value, dict) and _is_text(value.get("content")))


def _is_token_or_list(value: Any) -> bool:
    return _is_token(value) or (isinstance(value, list) and all(map(_is_token, value)))


def _is_template(value: Any) -> bool:
    if isinstance(value, list):
        return all(
            isinstance(each, dict) and _is_text(each.get("name")) and _is_text(each.get("template"))
            for each in value
        )
    if isinstance(value, dict):
        return all(map(_is_text, value.values()))
    return _is_text(value)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


_Test = tuple[Callable[[Any], bool], str]
_NUMBER: _Test = _is_number, "a number"
_WHOLE: _Test = _is_whole, "a whole number"
_TOKENS: _Test = _is_tokens, "a token or a list of tokens"
_TOKEN: _Test = _is_token, "a text or an object with a text named content"
_TOKEN_LIST: _Test = _is_token_or_list, "texts, or objects with a text named content"
_BOOLEAN: _Test = _is_boolean, "true or false"
_TEMPLATE: _Test = _is_template, "a text, or a list of objects with name and template"

# Types of the keys that moechat uses, or that transformers uses after loading. None is always allowed.
_GENERATION_TYPES: Mapping[str, _Test] = {
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), _TOKENS),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        _NUMBER,
    ),
    **dict.fromkeys(("top_k", "max_new_tokens", "max_length"), _WHOLE),
    "do_sample": _BOOLEAN,
}
_TOKENIZER_TYPES: Mapping[str, _Test] = {
    **dict.fromkeys(
        ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"), _TOKEN
    ),
    "additional_special_tokens": _TOKEN_LIST,
    "chat_template": _TEMPLATE,
    "model_max_length": _NUMBER,
    "tokenizer_class": (_is_text, "a text"),
    "padding_side": (_is_text, "a text"),
    "truncation_side": (_is_text, "a text"),
    "clean_up_tokenization_spaces": _BOOLEAN,
    "split_special_tokens": _BOOLEAN,
}


def read_generation_settings(directory: Path) -> dict[str, Any] | None:
    """The content of ``generation_config.json``, its types checked; ``None`` if there is none.

    Raises:
        UnsupportedModelError: It cannot be read, or a value has another type than its key needs; the message
            names the key.
    """
    path = directory / GENERATION
    require_inside(path, directory)
    if not path.exists():
        return None
    return _object(path, _GENERATION_TYPES)


def require_tokenizer_files(directory: Path) -> None:
    """Check ``tokenizer_config.json`` and its like, and chat templates, before transformers reads them.

    Raises:
        UnsupportedModelError: One is too large, no JSON object, not UTF-8, or has a value of another type
            than its key needs; the message names the file and the key.
    """
    for name in _OBJECTS:
        path = directory / name
        require_inside(path, directory)
        if path.exists():
            _object(path, {} if name == "added_tokens.json" else _TOKENIZER_TYPES)
    templates = directory / TEMPLATES
    require_inside(templates, directory)
    for path in (directory / "chat_template.jinja", *sorted(templates.glob("*.jinja"))):
        require_inside(path, directory)
        require_regular(path)
        if path.is_file():
            _require_text(path)


def _object(path: Path, types: Mapping[str, _Test]) -> dict[str, Any]:
    found = read_json(path, _MAX_BYTES, _MAX_ENTRIES)
    if not isinstance(found, dict):
        raise UnsupportedModelError(
            f"{path} cannot be read: it is {shown(found)}, not an object", hint=_AGAIN
        )
    for key, value in found.items():
        test, wanted = types.get(key, (None, ""))
        if value is not None and test is not None and not test(value):
            raise wrong_value(path, key, value, f"it must be {wanted}")
    return found


def wrong_value(path: Path, key: str, value: Any, reason: str) -> UnsupportedModelError:
    """The error for a value in a model's file.

    Args:
        path: The file.
        key: The value's key.
        value: The value.
        reason: What is wrong with it.
    """
    return UnsupportedModelError(
        f"{path} cannot be used: {key[:80]} is {shown(value)}; {reason}", hint=_AGAIN
    )


def _require_text(path: Path) -> None:
    try:
        read_limited(path, _MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise UnsupportedModelError(f"{path} is not UTF-8: {one_line(problem)}", hint=_AGAIN) from None
