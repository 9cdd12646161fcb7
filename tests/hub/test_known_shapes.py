"""Shapes that ship: every alias has one, and names are found however they are written."""

from __future__ import annotations

import pytest

from moechat.errors import UsageError
from moechat.hub.known_shapes import find_shape, shape_names, shape_values
from moechat.hub.model_ref import ALIASES


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_every_alias_has_a_shape(alias: str) -> None:
    shape = find_shape(alias)
    assert shape in shape_names()
    assert find_shape(ALIASES[alias]) == shape


@pytest.mark.parametrize(
    ("written", "shape"),
    [
        ("Mixtral", "mixtral-8x7b"),
        ("mixtral@main", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("MISTRALAI/mixtral-8x7b-INSTRUCT-v0.1@refs/pr/3", "mixtral-8x7b"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("QWEN3-30B-A3B", "qwen3-30b-a3b"),
        ("qwen3-30b", None),
        ("org/qwen3-30b-a3b", None),
        ("demo", None),
        ("", None),
    ],
)
def test_shapes_are_found_by_their_names(written: str, shape: str | None) -> None:
    assert find_shape(written) == shape


def test_a_shape_is_a_configuration() -> None:
    for name in shape_names():
        values = shape_values(name)
        assert values["num_hidden_layers"] > 1
        assert values["model_type"]


def test_the_error_for_an_unknown_shape_names_it() -> None:
    with pytest.raises(UsageError, match="there is no shape 'gpt-5'") as caught:
        shape_values("gpt-5")
    assert "mixtral-8x7b" in str(caught.value.hint)
