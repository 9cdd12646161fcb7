"""Tests of the public names of the package, and of the keywords that load and plan share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import moechat
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


def test_importing_the_package_and_its_options_imports_no_torch() -> None:
    script = (
        "import sys, moechat; moechat.LoadOptions(ram='2G'); moechat.UsageError; "
        "light = 'torch' not in sys.modules; "
        "print(light, [name for name in moechat.__all__ if not hasattr(moechat, name)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
