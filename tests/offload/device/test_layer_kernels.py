"""The kernels that plans count for the layers of a family, against recorded passes of small models."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("triton")

from families import tiny_family
from interpreted_graph import Launch
from test_fused_steps import PROMPT, TOKENS, feed, load
from tiny import write_tiny_checkpoint

from moechat.config import RUN_AHEAD_VARIABLE
from moechat.configurator import gpu_pattern
from moechat.outline.config_source import known_shape
from moechat.outline.find_outline import find_outline
from moechat.sizes.layer_kernels import FAMILIES, OTHER, PLAIN, family_kernels, layer_kernels

# Types of models whose part for text has another name.
NAMES = {"qwen3_5_moe": "qwen3_5_moe_text", "gemma4": "gemma4_text"}
# Kinds of layers, where the first ones have experts once only.
KINDS = {"nemotron_h": ["moe", "linear_attention", "full_attention", "mlp", "moe"]}


def kernels(graph) -> list[str]:
    """Of a part between two expert layers. The copy of the request, which ends it, is counted elsewhere; the
    host's memory that it goes to is made once.
    """
    names = []
    for operation in graph.operations:
        if isinstance(operation, Launch):
            names.append(operation.executor.fn.__name__)
        elif any(operation.fresh) or operation.function._schema.is_mutable:
            names.append(operation.function.overloadpacket.__name__)
    assert names[-1] == "copy_"
    return [name for name in names[:-1] if not name.startswith("empty") and name != "full"]


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_count_the_kernels_of_recorded_passes(
    family: str, gpu, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    config = tiny_family(NAMES.get(family, family))
    if family in KINDS:
        more = {"layer_types": KINDS[family], "num_hidden_layers": len(KINDS[family])}
        config = type(config)(**{**config.to_dict(), **more})
    write_tiny_checkpoint(tmp_path / family, config)
    with load(tmp_path / family, gpu) as engine:
        feed(engine, [PROMPT, *([token] for token in TOKENS)])
        assert engine.notices() == []
        outline = engine.loaded.outline
    assert outline.can_replay
    assert family_kernels(outline.model_type) is FAMILIES[family]
    pieces = gpu.graphs_made[0].made[1:-1]
    counted, known = outline.expert_layers, family_kernels(outline.model_type)
    assert len(pieces) == len(counted) - 1 > 0
    for (first, last), piece in zip(pairwise(counted), pieces, strict=True):
        # Behind the first layer's experts, all of the layers between, and before the last layer's.
        kinds = [outline.kinds[layer] if outline.kinds else "" for layer in range(first + 1, last + 1)]
        between = sum(known.mixing(kind) for kind in kinds) + known.dense * (last - first - 1)
        assert len(kernels(piece)) == between + known.experts, kernels(piece)


def test_a_layer_of_plain_attention_has_the_kernels_that_timed_gpus_run() -> None:
    assert PLAIN.attention + PLAIN.experts == gpu_pattern.DENSE_KERNELS
    assert layer_kernels(family_kernels("mixtral"), 32, range(32)) == gpu_pattern.DENSE_KERNELS
    assert family_kernels("no such family") is OTHER


def test_torch_launches_at_least_as_many_kernels() -> None:
    for shape in ("qwen3-30b-a3b", "qwen3.6-35b-a3b", "gemma-4-26b-a4b", "nemotron-3.5-lightning"):
        outline = find_outline(known_shape(shape), "bfloat16", on_gpu=True)
        assert outline.torch_kernels >= outline.kernels > 0
    # Three of four layers have linear attention.
    outline = find_outline(known_shape("qwen3.6-35b-a3b"), "bfloat16", on_gpu=True)
    linear, attention = (OTHER.mixing(kind) + OTHER.experts for kind in ("linear_attention", ""))
    assert outline.torch_kernels == (3 * linear + attention) / 4
    assert outline.kernels == FAMILIES["qwen3_5_moe"].attention + FAMILIES["qwen3_5_moe"].experts
