"""The options for loading a model: their parser, ranges and messages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moechat.errors import MoechatError, UsageError
from moechat.options import (
    ACTIVATION_BITS,
    BITS,
    DENSE_BITS,
    DTYPES,
    LoadKeywords,
    LoadOptions,
    as_flag,
)

NAMES = [entry.name for entry in fields(LoadOptions)]


class Unprintable:
    """A value whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


ANY_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**5000, -(10**5000), (1 << 63) - 1, 1 << 63, 1 << 24]),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(alphabet="0123456789.kMgTiB -"),
    st.sampled_from(
        ["cpu", "cuda", "cuda:1", "cuda:" + "9" * 5000, "auto", "auto:split=0.5", "auto:split=x"]
    ),
    st.binary(),
    st.lists(st.integers(), max_size=3),
    st.lists(st.integers(), max_size=3).map(np.array),
    st.dictionaries(st.text(), st.integers(), max_size=2),
    st.builds(object),
    st.builds(Unprintable),
)


# The first text drawn in a process takes seconds on a busy machine.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(values=st.dictionaries(st.sampled_from(NAMES), ANY_VALUE))
def test_any_value_is_converted_or_refused_with_a_moechat_error(
    values: dict[str, Any],
) -> None:
    try:
        options = LoadOptions.parse(values)
    except MoechatError:
        return
    for name in NAMES:
        assert type(getattr(options, name)) in (int, str, bool, type(None))
    assert LoadOptions.parse(options.given) == options


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(name=st.sampled_from(NAMES), value=ANY_VALUE)
def test_the_constructor_and_the_parser_agree(name: str, value: Any) -> None:
    def outcome(make: Any) -> Any:
        try:
            return make()
        except UsageError as error:
            return str(error), error.hint

    assert outcome(lambda: LoadOptions(**{name: value})) == outcome(lambda: LoadOptions.parse({name: value}))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(name=st.one_of(st.text(), st.integers(), st.none()).filter(lambda name: name not in NAMES))
def test_an_unknown_name_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="is no option for loading a model"):
        LoadOptions.parse({name: 1})


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"bits": 5}, "bits is 5", "choose one of: 2, 3, 4, 6, 8, 16"),
        ({"bits": "4"}, "bits is '4'", "choose one of"),
        ({"bits": True}, "bits is True", "choose one of"),
        ({"bits": 4.0}, "bits is 4.0", "choose one of"),
        ({"dense_bits": None}, "dense_bits is None", "choose one of: auto, 4, 6, 8, 16"),
        ({"activation_bits": 4}, "activation_bits is 4", "choose one of: 8, 16, 32"),
        ({"kv_bits": 4}, "kv_bits is 4", "choose one of: 16, 8"),
        ({"kv_bits": "8"}, "kv_bits is '8'", "choose one of: 16, 8"),
        ({"kv_bits": None}, "kv_bits is None", "choose one of: 16, 8"),
        ({"dtype": "int8"}, "dtype is 'int8'", "choose one of: auto, float32"),
        ({"device": "gpu"}, "device is 'gpu'", "choose one of: cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, "device is 'cuda:x'", "choose one of"),
        ({"device": 0}, "device is 0", "choose one of"),
        ({"system": "magic"}, "system is 'magic'", "choose one of: auto, moepic"),
        ({"system": "auto:split=2"}, "system is 'auto:split=2': split is 2.0", None),
        ({"system": "auto:speed=2"}, "'speed=2' is not a setting", "write KEY=VALUE"),
        ({"ram": "much"}, "ram: 'much' is not a size", "as in 12G"),
        ({"ram": 0}, "ram is 0", "leave it out"),
        ({"ram": "0G"}, "ram is 0; it must be more than 0 bytes", "leave it out"),
        ({"ram": -5}, "ram is -5", "such as '12G'"),
        ({"ram": 1.5}, "ram is 1.5", "such as '12G'"),
        ({"ram": "0"}, "ram is 0; it must be more than 0 bytes", "leave it out"),
        ({"ram": 1 << 63}, "ram is 9223372036854775808; that is larger than any memory", "such as '12G'"),
        ({"vram": "99999999999T"}, "vram: 99999999999T is larger than any memory", "as in 12G"),
        ({"ram": 10**5000}, "ram is of type int", "such as '12G'"),
        (
            {"vram": "1G", "device": "cpu"},
            "vram needs a GPU, and device is cpu",
            "ram limits",
        ),
        ({"ctx": 1}, "ctx is 1; it must be at least 2 and at most 16777216", None),
        ({"ctx": "many"}, "ctx is 'many'; it must be a whole number", None),
        ({"threads": 1025}, "threads is 1025; it must be at least 1 and at most 1024", None),
        (
            {"replan_tokens": -1},
            "replan_tokens is -1; it must be at least 0 and at most 2^63 - 1",
            None,
        ),
        ({"deterministic": 1}, "deterministic is 1; it must be True or False", None),
        ({"tune": None}, "tune is None; it must be True or False", None),
        ({"thread": 2}, "thread is no option", "did you mean threads?"),
        ({"zzz": 2}, "zzz is no option", "the options are bits, device"),
    ],
)
def test_the_error_for_a_wrong_value_names_its_range(
    values: Mapping[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        LoadOptions.parse(values)
    assert message in str(caught.value)
    if hint is not None:
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dense_bits": 5}, "--dense-bits is 5"),
        ({"replan_tokens": -1}, "--replan-tokens is -1"),
        ({"vram": "lots"}, "--vram: 'lots' is not a size"),
        ({"vram": 1, "device": "cpu"}, "--vram needs a GPU, and --device is cpu"),
        ({"kv_bits": 3}, "--kv-bits is 3"),
        ({"dens_bits": 4}, "--dens-bits is no option"),
    ],
)
def test_messages_of_the_command_line_name_the_flags(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        LoadOptions.parse(values, as_flag)
    assert message in str(caught.value)


def test_sizes_are_parsed_to_bytes_and_numpy_numbers_to_python_ones() -> None:
    options = LoadOptions.parse({"ram": "1.5G", "vram": 1 << 30, "ctx": np.int64(64)})
    assert (options.ram, options.vram, options.ctx) == (3 << 29, 1 << 30, 64)
    assert type(options.ctx) is int
    # Given to the constructor too.
    assert LoadOptions(ram="1.5G").ram == 3 << 29  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dense_bits", DENSE_BITS)
@pytest.mark.parametrize("activation_bits", ACTIVATION_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_choice_is_accepted(bits: int, dense_bits: int, activation_bits: int, dtype: str) -> None:
    values = {"bits": bits, "dense_bits": dense_bits, "activation_bits": activation_bits, "dtype": dtype}
    assert values.items() >= LoadOptions.parse(values).given.items()


@pytest.mark.parametrize(
    ("device", "vram", "gpu"),
    [
        (None, None, None),
        ("cpu", None, None),
        (None, "1G", 0),
        ("cuda", None, 0),
        ("cuda:3", "1G", 3),
    ],
)
def test_device_and_budget_choose_the_gpu(device: str | None, vram: str | None, gpu: int | None) -> None:
    assert LoadOptions.parse({"device": device, "vram": vram}).gpu == gpu


def test_settings_come_from_the_system_and_deterministic_fetches_all() -> None:
    assert LoadOptions().settings.miss == "both"
    assert LoadOptions(deterministic=True).settings.miss == "fetch"
    assert LoadOptions(system="auto:lookahead=3").settings.lookahead == 3


def test_options_are_frozen_and_replacements_are_checked() -> None:
    options = LoadOptions(ram=1 << 30)
    with pytest.raises(FrozenInstanceError):
        options.ram = 1  # type: ignore[misc]
    assert replace(options, ctx=4).ram == 1 << 30
    with pytest.raises(UsageError, match="ctx is 1"):
        replace(options, ctx=1)


def test_the_keywords_of_the_typed_dict_are_the_fields() -> None:
    assert list(LoadKeywords.__annotations__) == NAMES


def test_the_options_are_imported_without_torch_and_without_the_native_core() -> None:
    heavy = "print([m for m in ('torch', 'numpy', 'moechat._native') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys, moechat.options; {heavy}"], capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")
