"""Limits of what a model's JSON files may hold, before anything is built by them."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_support import write_mixtral

from moechat.errors import CheckpointError
from moechat.hub.known_shapes import shape_names, shape_values
from moechat.store.checkpoint import Checkpoint
from moechat.store.checkpoint_files import config_bytes, config_of, read_config
from moechat.store.config_limits import (
    LIMITS,
    MAX_CONFIG_BYTES,
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_VALUES,
    parse_limited,
    require_sane_config,
)

COUNTS = (
    "num_labels",
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "head_dim",
)
OTHERS = ("vocab_size", "max_position_embeddings", "kv_lora_rank", "num_nextn_predict_layers", "rms_norm_eps")


def nested(key: str, value: Any, places: tuple[str, ...]) -> dict[str, Any]:
    found: Any = {key: value}
    for place in places:
        found = [found] if place == "[]" else {place: found}
    return {"model_type": "x", **(found if isinstance(found, dict) else {"parts": found})}


@pytest.mark.parametrize("places", [(), ("text_config",), ("vision_config", "x"), ("[]", "[]"), ("[]", "a")])
@pytest.mark.parametrize("key", COUNTS + OTHERS)
@pytest.mark.parametrize("value", [10**15, 10**400, 1e300, [1, 10**15], -(10**15), math.nan])
def test_a_number_beyond_its_limit_is_refused_with_key_value_and_limit(
    key: str, value: Any, places: tuple[str, ...]
) -> None:
    config = nested(key, value, places)
    with pytest.raises(CheckpointError) as caught:
        require_sane_config(config, "c/config.json")
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith(f"c/config.json: {key} is ")
    assert len(str(caught.value)) < 250
    assert "NaN" in str(caught.value) or any(word in str(caught.value) for word in ("more than", "less than"))


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", ["64", "1e9", True, False, -1, math.inf, -math.inf])
def test_counts_are_whole_numbers_that_are_not_negative(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is "):
        require_sane_config({key: value}, "config.json")


@pytest.mark.parametrize("key", ["rms_norm_eps", "layer_norm_epsilon", "norm_eps"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-6, 2.0])
def test_a_norm_cannot_have_such_an_eps(key: str, value: float) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is "):
        require_sane_config({"text_config": {key: value}}, "config.json")


def test_what_published_models_have_passes() -> None:
    for name in shape_names():
        require_sane_config(shape_values(name), name)
    require_sane_config(
        {
            "time_step_limit": [0.0, math.inf],
            "attention_invalid_logits_value": -1e9,
            "min_value": -3.4028234663852886e38,
            "rope_theta": 1e11,
            "max_position_embeddings": 10_485_760,
            "n_group": 1,
            "moe_intermediate_size": [1024, 2048],
            "num_key_value_heads": None,
            "quantization_config": {"group_size": -1, "weight_block_size": [128, 128]},
            "moe_layers_enum": "3,4,5",
            "mlp_only_layers": [],
            "vision_feature_layer": -2,
            "use_layers": True,
            "pad_token_id": -1,
        },
        "config.json",
    )


def test_every_limit_has_a_key_that_it_is_first_for() -> None:
    keys = (
        *COUNTS,
        *OTHERS,
        "rope_theta",
        "mlp_only_layers",
        "pad_token_id",
        "num_codebooks",
        "patch_size",
    )
    first = {next(limit for limit in LIMITS if limit.keys.fullmatch(key)) for key in keys}
    assert first == set(LIMITS)


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them() -> None:
    limit = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    found = config_of(Path("config.json"), json.dumps(limit).encode())
    assert found == {"time_step_limit": [0.0, math.inf]}
    for value in ("NaN", "Infinity"):
        data = json.dumps({"a": {"norm_eps": {"__float__": value}}}).encode()
        with pytest.raises(CheckpointError, match="norm_eps is "):
            config_of(Path("config.json"), data)
    other = {"a": {"__float__": "x"}}
    assert config_of(Path("config.json"), json.dumps(other).encode()) == other
    assert config_of(Path("config.json"), b'{"a": {"__float__": [1]}}') == {"a": {"__float__": [1]}}


def test_a_configuration_cannot_name_another_file() -> None:
    with pytest.raises(CheckpointError, match="has configuration_files"):
        require_sane_config({"configuration_files": ["config.4.0.0.json"]}, "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nests values more than 32 deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nests values more than 32 deep"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "a is nested more than 32 deep"),
        (b'{"a": [%s1]}' % (b"1," * MAX_LENGTH), "a has 262,145 entries, more than 262,144"),
        (b'{"a": [%s[]]}' % (b"[]," * 4 * MAX_VALUES), "values, more than 1,048,576"),
        (b'{"a": "%s"}' % (b"x" * MAX_CONFIG_BYTES), "bytes, more than 16,777,216"),
        (b'{"a": %s}' % (b"9" * 5000), "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_shape_and_size_of_a_file_are_limited(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for read in (read_config, config_bytes):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)


def test_the_shape_of_a_file_is_judged_before_it_takes_memory() -> None:
    data = b"[%s{}]" % (b"{}," * (5 * MAX_VALUES))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="values, more than"):
            parse_limited(data, "config.json")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_checkpoint_cannot_have_more_layers_than_tensors(tmp_path: Path) -> None:
    source = write_mixtral(tmp_path / "m", layers=2, experts=2, hidden=64, intermediate=64)
    config = json.loads((source / "config.json").read_text())
    for place in (config, config.setdefault("text_config", {})):
        place["num_hidden_layers"] = 500
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            CheckpointError, match=r"num_hidden_layers is 500; the checkpoint has \d+ tensors"
        ):
            Checkpoint.open(source)
        place["num_hidden_layers"] = 2


_NUMBERS = st.integers() | st.floats() | st.integers(-(1 << 70), 1 << 70)
_LEAVES = st.none() | st.booleans() | _NUMBERS | st.text(max_size=8)
_KEYS = st.sampled_from((*COUNTS, *OTHERS, "text_config", "quantization_config", "a")) | st.text(max_size=8)
_VALUES = st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.dictionaries(_KEYS, inner), max_leaves=12)


def refused(call: Callable[[], Any]) -> str:
    """The message of a refusal; empty if there is none."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.dictionaries(_KEYS, _VALUES, max_size=6))
def test_any_configuration_is_taken_with_numbers_in_their_limits_or_refused(config: dict[str, Any]) -> None:
    data = json.dumps(config).encode()
    message = refused(lambda: config_of(Path("config.json"), data))
    if message:
        assert message.startswith("config.json")
        return
    waiting: list[tuple[str, Any]] = list(json.loads(data).items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, each) for each in value]
        elif isinstance(value, int | float) and not isinstance(value, bool) and key in COUNTS:
            assert 0 <= value <= 1 << 20


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=80) | st.text(alphabet='{}[]":,.0123eE-naNIfity"\\u ', max_size=80).map(str.encode))
def test_any_bytes_are_a_value_or_an_error_that_names_the_file(data: bytes) -> None:
    message = refused(lambda: parse_limited(data, "x.json"))
    assert not message or message.startswith("x.json")
