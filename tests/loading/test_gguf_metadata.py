"""GGUF metadata with any values: a configuration within the limits, or an error with its own exit status."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_families import FAMILIES
from gguf_family import gguf_tensors, random_model
from gguf_writing import all_as, write_family
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.errors import CheckpointError, MoechatError
from moechat.models.gguf import describe_gguf
from moechat.models.quiet import without_warnings
from moechat.models.skeleton import config_from
from moechat.store.gguf_file import GgufFile
from moechat.store.gguf_header import GgufHeader

_NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 10**6, 2**31, 2**64 - 1, 1e38, math.inf, -math.inf, math.nan])
_VALUES = _NUMBERS | st.booleans() | st.text(max_size=4) | st.none()


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufHeader]:
    found = {}
    for name in ("glm4moe", "qwen35moe", "gemma4", "minimax-m2"):
        family = FAMILIES[name]
        config = family.config()
        path = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
        write_family(family, config, gguf_tensors(family, random_model(config)), path, all_as(Kind.F32))
        found[name] = GgufFile.open(path).header
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_metadata_is_a_sound_configuration_or_refused(
    headers: dict[str, GgufHeader], data: st.DataObject
) -> None:
    header = headers[data.draw(st.sampled_from(sorted(headers)))]
    metadata: dict[str, Any] = dict(header.metadata)
    for _ in range(data.draw(st.integers(1, 3))):
        metadata[data.draw(st.sampled_from(sorted(metadata)))] = data.draw(_VALUES)
    changed = replace(header, metadata=metadata)
    try:
        model = describe_gguf(changed, "m.gguf")
        with without_warnings():
            config_from(model.config, Path("m.gguf"))
    except MoechatError as error:
        assert error.exit_code == 3, repr(error)  # noqa: PT017 - others end the test


@pytest.mark.parametrize("value", [10**9, 600])
def test_more_layers_than_any_model_are_refused(headers: dict[str, GgufHeader], value: int) -> None:
    header = headers["glm4moe"]
    changed = replace(header, metadata={**header.metadata, "glm4moe.block_count": value})
    with pytest.raises(CheckpointError, match=r"block_count|layers|blk"):
        config_from(describe_gguf(changed, "m.gguf").config, Path("m.gguf"))
