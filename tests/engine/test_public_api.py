"""Tests of the public names of the package, and of the keywords that load and plan share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moechat
from moechat.engine.messages import check_messages
from moechat.errors import UsageError


@pytest.mark.parametrize("call", [moechat.load, moechat.plan])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dense_bit": 8}, "dense_bit is no option for loading a model"),
        ({"ram": 2.5}, "ram is 2.5; it must be a whole number"),
        ({"ctx": "many"}, "ctx is 'many'; it must be a whole number"),
        ({"threads": [2]}, r"threads is \[2\]"),
        ({"device": 1}, "device is 1"),
        ({"system": None}, "system is None"),
        ({"replan_tokens": -1}, "replan_tokens is -1"),
    ],
)
def test_load_and_plan_reject_the_same_values_with_the_same_message(
    call: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        call("demo", **arguments)


@pytest.mark.parametrize("call", [moechat.load, moechat.plan])
def test_a_model_of_a_wrong_type_is_rejected(call: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="the model is of type int"):
        call(3)


@pytest.mark.parametrize("call", [moechat.load, moechat.plan])
@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "hollow", "org/name", " ", "m.gguf", "a/b/c"])
def test_a_missing_model_is_an_error_of_a_public_class(
    call: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(moechat.ModelNotFoundError) as caught:
        call(name)
    assert type(caught.value).__name__ in moechat.__all__
    assert caught.value.hint


def test_dir_lists_every_public_name_and_they_all_exist() -> None:
    assert set(moechat.__all__) <= set(dir(moechat))
    assert "load" in dir(moechat)


@pytest.fixture(scope="module")
def engine() -> Iterator[moechat.Engine]:
    with moechat.load("demo") as engine:
        yield engine


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (
            {"temprature": 0.5},
            "temprature is no option for generating an answer",
            "did you mean temperature?",
        ),
        ({"zzz": 1}, "zzz is no option for generating an answer", "the options are max_new_tokens"),
        ({"max_new_tokens": "many"}, "max_new_tokens is 'many'; it must be a whole number", None),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number", None),
        ({"top_k": [1]}, r"top-k is \[1\]; it must be a number", None),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number", None),
        ({"reserve": None}, "reserve is None; it must be a whole number", None),
        ({"progress": 3}, "progress is 3; it must be a function", None),
    ],
)
def test_generate_rejects_wrong_options_as_load_does(
    engine: moechat.Engine, arguments: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        engine.generate("Once", **arguments)
    assert hint is None or hint in str(caught.value.hint)


@pytest.mark.parametrize("prompt", [None, 5, b"Once", {"role": "user", "content": "Hello"}])
def test_a_prompt_of_a_wrong_type_is_rejected(engine: moechat.Engine, prompt: Any) -> None:
    for call in (engine.generate, engine.encode):
        with pytest.raises(UsageError, match=f"the prompt is of type {type(prompt).__name__}"):
            call(prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 1}, "limit is no option for tuning"),
        ({"limit_s": "long"}, "limit_s is 'long'; it must be a number"),
        ({"again": 1}, "again is 1; it must be True or False"),
        ({"may_map": "no"}, "may_map is 'no'; it must be True or False"),
        ({"progress": 3}, "progress is 3; it must be a function"),
    ],
)
def test_tune_rejects_wrong_options(engine: moechat.Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.tune(**arguments)


USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, "Hello"], "message 2 of 2 is of type str, not a message"),
        ([{"content": "Hello"}], "message 1 of 1 has no role"),
        ([USER, {"role": "user"}], "message 2 of 2, of the role user, has no content"),
        ([{"role": "user", "content": None}], "message 1 of 1, of the role user, has no content"),
        ([USER, {"role": "wizard", "content": "Hello"}, USER], "message 2 of 3 has the role 'wizard'"),
        ([{"role": 3, "content": "Hello"}], "message 1 of 1: its role is of type int"),
        ([{"role": "user", "content": 5}], "message 1 of 1: its content is of type int"),
        ([{"role": "user", "content": "\ud800"}], "message 1 of 1: its content is not Unicode text"),
        ([{"role": "user", "content": ["Hello"]}], "message 1 of 1: its content has a part without a text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "message 1 of 1: its content has a part of the type image_url",
        ),
        ([], "the prompt is empty"),
    ],
)
def test_a_malformed_message_is_named(engine: moechat.Engine, messages: list[Any], message: str) -> None:
    for call in (engine.generate, engine.encode):
        with pytest.raises(UsageError, match=f"^{message}") as caught:
            call(messages)
        assert not messages or caught.value.hint


def test_parts_of_text_are_one_text_and_other_keys_are_kept(engine: moechat.Engine) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert engine.encode([{"role": "user", "content": parts, "name": "Ann"}]) == engine.encode([USER])


def test_roles_that_the_template_names_are_accepted() -> None:
    template = "{% if messages[0]['role'] == 'observation' %}…{% endif %}"
    message = {"role": "observation", "content": "Hello"}
    assert check_messages([message], template) == [message]
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert check_messages([called], template) == [called]
    with pytest.raises(UsageError, match="has the role 'observation'"):
        check_messages([message], "{{ messages }}")


@pytest.mark.parametrize("token", ["a", 1.5, -1, 1 << 40])
def test_the_text_of_no_token_is_rejected(engine: moechat.Engine, token: Any) -> None:
    with pytest.raises(UsageError, match="token is "):
        engine.token_text(token)


def test_importing_the_package_and_its_options_imports_no_torch() -> None:
    script = (
        "import sys, moechat; moechat.LoadOptions(ram='2G'); moechat.UsageError; "
        "light = 'torch' not in sys.modules; "
        "print(light, [name for name in moechat.__all__ if not hasattr(moechat, name)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
