"""Configurations and side files with any values: taken, or refused with an exit status of their own."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import config_limits_child
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_config, write_byte_tokenizer
from transformers import AutoTokenizer, GenerationConfig

import moechat
from moechat.errors import DoesNotFitError, MoechatError, StoreDamagedError
from moechat.models.assets import load_generation_config, load_tokenizer, stop_tokens
from moechat.models.outlining import outline_model
from moechat.models.quiet import without_warnings
from moechat.models.sampling import SamplingSettings
from moechat.models.skeleton import config_from
from moechat.models.text import TextStream

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "lfm2_moe")
OPTIONS = {"max_examples": 60, "deadline": None, "derandomize": True, "database": None}
_NUMBERS = st.sampled_from([-1, 0, 1, 3, 10**9, 10**30, 1e300, float("inf"), float("nan"), 0.5])
_LEAVES = st.none() | st.booleans() | _NUMBERS | st.text(max_size=4)
VALUES = _LEAVES | st.lists(_LEAVES, max_size=3) | st.dictionaries(st.text(max_size=3), _LEAVES, max_size=2)


def refused(call: Any) -> MoechatError | None:
    """The error of a call, which must be one of ours, with an exit status of its own."""
    try:
        with without_warnings():
            call()
    except MoechatError as error:
        assert error.exit_code in (3, 4), repr(error)  # noqa: PT017 - others end the test
        return error
    return None


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


def plain(family: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(tiny_config(family, 0).to_dict(), default=str))
    return values


PLAIN = {family: plain(family) for family in FAMILIES}


@settings(**OPTIONS)
@given(data=st.data())
def test_any_configuration_is_counted_or_refused(data: st.DataObject) -> None:
    config = PLAIN[data.draw(st.sampled_from(FAMILIES))]
    for _ in range(data.draw(st.integers(1, 3))):
        keys = sorted([*config, "num_labels", "to_dict", "quantization_config", "rope_scaling"])
        config = changed(config, (data.draw(st.sampled_from(keys)),), data.draw(VALUES))

    def count() -> None:
        outline_model(config_from(config, Path("m")), torch.bfloat16, dense_bits="auto")

    refused(count)


def test_numbers_at_their_limits_take_little_memory() -> None:
    """Under a limit of the kernel, in a process of its own."""
    done = subprocess.run(
        [sys.executable, config_limits_child.__file__, *FAMILIES[:3]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 40


@settings(**OPTIONS, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.dictionaries(
        st.sampled_from(sorted({*GenerationConfig().to_dict(), "watermarking_config", "compile_config"})),
        VALUES,
        max_size=3,
    )
)
def test_any_generation_settings_are_taken_or_refused_with_the_key(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))

    def load() -> None:
        found = load_generation_config(tmp_path)
        SamplingSettings.from_generation_config(found)
        stop_tokens(found, SimpleNamespace(get_text_config=lambda: None), None)

    error = refused(load)
    assert error is None or any(f": {key} is " in str(error) for key in content) or "together" in str(error)


@pytest.mark.parametrize("value", ["x", "", -1, 1e308, True, [], [[]], {}, {"a": {}}, [None], 10**30])
def test_every_key_of_generation_settings_may_have_a_wrong_value(tmp_path: Path, value: Any) -> None:
    keys = {*GenerationConfig().to_dict(), "watermarking_config", "compile_config", "hash", "to_dict"}
    for key in keys:
        (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
        error = refused(lambda: load_generation_config(tmp_path))
        assert error is None or f": {key} is " in str(error)


TOKENIZER_KEYS = (
    *(
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "additional_special_tokens",
        "extra_special_tokens",
    ),
    *("chat_template", "model_max_length", "added_tokens_decoder", "padding_side", "tokenizer_class"),
    *("auto_map", "model_input_names", "clean_up_tokenization_spaces", "add_prefix_space", "backend"),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory)
    return directory


@settings(**OPTIONS)
@given(
    name=st.sampled_from(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")),
    content=st.dictionaries(st.sampled_from(TOKENIZER_KEYS), VALUES, min_size=1, max_size=3),
)
def test_any_settings_of_a_tokenizer_are_taken_or_refused(
    tokenizer: Path, name: str, content: dict[str, Any]
) -> None:
    path = tokenizer / name
    before = path.read_text() if path.exists() else None
    path.write_text(json.dumps({**json.loads(before or "{}"), **content}))

    def use() -> None:
        loaded = load_tokenizer(tokenizer)
        TextStream(loaded).push(5)
        loaded("a")

    try:
        refused(use)
    finally:
        path.unlink() if before is None else path.write_text(before)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, StoreDamagedError), (errno.EMFILE, DoesNotFitError)]
)
def test_a_refused_read_is_not_a_tokenizer_that_cannot_be_used(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[MoechatError]
) -> None:
    """Conversions go on, uncalibrated, without a tokenizer that cannot be used, but not on a failing disk."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(tokenizer / "tokenizer_config.json"))

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(kind, match=r"tokenizer_config\.json cannot be read: "):
        load_tokenizer(tokenizer)


def test_configurations_reach_transformers_by_one_gate_alone() -> None:
    """Other ways would pass by the limits; the classes may be named where nothing of a file is read."""
    package = Path(moechat.__file__).parent
    ways = re.compile(
        r"AutoConfig\.|PreTrainedConfig|CONFIG_MAPPING|GenerationConfig\(|GenerationConfig\.from_|\.from_dict\("
    )
    found = {
        f"{path.relative_to(package)}: {match[0]}"
        for path in package.rglob("*.py")
        for match in ways.finditer(path.read_text())
        if "Style.from_dict" not in path.read_text()[match.start() - 5 : match.end()]
    }
    assert found == {
        "models/skeleton.py: CONFIG_MAPPING",
        "models/skeleton.py: .from_dict(",
        "models/assets.py: GenerationConfig(",
    }
