"""Norms, rotary embedding and routers of recorded passes, in a launch each (see ``interpreted_graph.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from interpreted_graph import Launch
from tiny import tiny_config, write_tiny_checkpoint
from transformers import AutoModelForCausalLM

import moechat
from moechat.config import RUN_AHEAD_VARIABLE
from moechat.models.decode.install import NativeModules
from moechat.models.decode.norms import Norm
from moechat.offload.fused_steps import FusedSteps, recognise_steps
from moechat.offload.gpu_layer import GpuExpertLayer
from moechat.offload.kernels import steps as step_kernels
from moechat.offload.settings import OffloadOptions

PROMPT = [5, 17, 9, 33, 21]
TOKENS = [3, 10, 17]
# float32: sums are added up in another order.
TOLERANCE = 1e-5
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2"]
# Norms, routers and modules with rotary embedding of the two layers of a tiny model. DeepSeek-V2 rotates
# complex numbers, by a function of its own.
FOUND = {"qwen3_moe": (9, 2, 2), "mixtral": (5, 2, 2), "gpt_oss": (5, 2, 2), "deepseek_v2": (7, 1, 0)}


def config_of(family: str):
    return tiny_config(family, 0, **({"moe_intermediate_size": 64} if family == "qwen3_moe" else {}))


def model_of(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config_of(family)).to(dtype).eval()


def load(model: Path, gpu, **more):
    offload = OffloadOptions(accelerator=gpu)
    return moechat.load(model, device="cuda", offload=offload, ctx=64, vram="1G", system="moepic", **more)


def feed(engine, passes, cache=None):
    cache = engine.decoder.new_cache() if cache is None else cache
    found = []
    for tokens in passes:
        output = engine.passes.run(torch.tensor([tokens]), cache)
        found.append(output.logits[0, -1])
    return torch.stack(found)


def kernels(graphs) -> int:
    """What the recorded graphs launch: operations that compute, and kernels."""
    count = 0
    for operation in (each for graph in graphs.made for each in graph.operations):
        if isinstance(operation, Launch):
            count += 1
        elif any(operation.fresh) or operation.function._schema.is_mutable:
            count += operation.function.overloadpacket.__name__ not in (
                "empty",
                "empty_like",
                "empty_strided",
            )
    return count


def _no_experts(_, asked, into=None, packed=None):
    return (torch.empty_like(asked.x) if into is None else into).zero_()


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_passes_launch_far_fewer_kernels_for_the_same_logits(
    family: str, gpu, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    write_tiny_checkpoint(tmp_path / family, config_of(family))
    passes = [PROMPT, *([token] for token in TOKENS)]
    with monkeypatch.context() as patch:
        patch.setenv("MOECHAT_CUDA_GRAPHS", "0")
        with load(tmp_path / family, gpu) as engine:
            expected = feed(engine, passes)
    with load(tmp_path / family, gpu) as engine:
        found = feed(engine, passes)
        assert replaced(engine.loaded.model) == []
        few = kernels(gpu.graphs_made[-1])
        decoder = engine.loaded.decoder
        assert len(decoder._steps.norms) == FOUND[family][0]
        decoder._forget()
        decoder._steps = FusedSteps()
        monkeypatch.setattr(GpuExpertLayer, "answer", _no_experts)
        feed(engine, passes[:2])
        many = kernels(gpu.graphs_made[-1])
        assert engine.notices() == []
    assert len(gpu.graphs_made) == 2
    assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE
    norms, routers, rotary = FOUND[family]
    assert many - few >= 4 * norms + 4 * routers + 7 * rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_families_are_recognised(family: str, dtype: torch.dtype) -> None:
    steps = recognise_steps(model_of(family, dtype))
    assert (len(steps.norms), len(steps.routers), len(steps.rotary)) == FOUND[family]
    # DeepSeek-V2 computes its logits in float32.
    assert {router.widened for router in steps.routers.values()} == {
        family == "deepseek_v2" and dtype is torch.bfloat16
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_over_the_kernels_and_as_before_after_them(family: str) -> None:
    model, tokens = model_of(family), torch.tensor([PROMPT])
    steps = recognise_steps(model)
    with torch.inference_mode():
        expected = model(tokens).logits
        with steps.over():
            assert len(replaced(model)) == sum(FOUND[family]) + len(steps.mlps)
            found = model(tokens).logits
        assert replaced(model) == []
        assert torch.equal(model(tokens).logits, expected)
    assert 0 < float((found - expected).abs().max()) < TOLERANCE * float(expected.abs().max())


def test_modules_with_a_correction_use_it_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("glm4_moe", 0, n_group=1, topk_group=1)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    gates = {
        module
        for module in model.modules()
        if isinstance(getattr(module, "e_score_correction_bias", 0), torch.Tensor)
    }
    for gate in gates:
        gate.e_score_correction_bias.normal_()
        nn.init.normal_(gate.weight)
    steps = recognise_steps(model)
    assert gates
    assert set(steps.routers) == gates
    for gate in gates:
        gate.e_score_correction_bias = gate.e_score_correction_bias.flip(0)
    (gate, *_), hidden = (
        gates,
        torch.randn((3, config.hidden_size), generator=torch.Generator().manual_seed(1)),
    )
    with torch.inference_mode():
        expected = gate(hidden)
        with steps.over():
            found = gate(hidden)
    order = expected[2].argsort(-1), found[2].argsort(-1)
    assert torch.equal(expected[2].gather(1, order[0]), found[2].gather(1, order[1]))
    torch.testing.assert_close(found[1].gather(1, order[1]), expected[1].gather(1, order[0]))


def test_other_inputs_go_to_the_module_itself() -> None:
    model = model_of("qwen3_moe")
    steps = recognise_steps(model)
    gate, norm = model.model.layers[0].mlp.gate, model.model.norm
    many = torch.randn((9, gate.weight.shape[1]), generator=torch.Generator().manual_seed(1))
    turned = torch.randn((gate.weight.shape[1], 3), generator=torch.Generator().manual_seed(1)).T
    with torch.inference_mode():
        expected = gate(many), norm(turned), norm(many.double())
        with steps.over():
            found = gate(many), norm(turned), norm(many.double())
    assert all(map(torch.equal, found[0], expected[0]))
    assert all(map(torch.equal, found[1:], expected[1:]))


def test_forwards_of_others_are_left_alone_and_ours_removed_after_an_error() -> None:
    model = model_of("mixtral")
    norm, attention = model.model.norm, model.model.layers[1].self_attn
    steps = recognise_steps(model)
    others = NativeModules()
    others.replace(norm, lambda x: x)
    others.replace(attention, before := (lambda *_, **__: None))

    def interrupted() -> None:
        with steps.over():
            assert norm(1) == 1
            assert attention.forward is before
            assert "forward" in vars(model.model.layers[0].self_attn)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert set(replaced(model)) == {"model.norm", "model.layers.1.self_attn"}
    others.undo()
    others.replace(norm, lambda x: x)
    assert norm not in recognise_steps(model).norms


def test_a_model_without_weights_has_no_steps() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("mixtral"))
    steps = recognise_steps(model)
    assert not steps.norms
    assert not steps.routers


def fails(*_: object) -> torch.Tensor:
    raise RuntimeError("no such instruction")


def doubles(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
    return 2 * norm.apply(x, weight)


@pytest.mark.parametrize(
    ("norm", "why"), [(fails, "no such instruction"), (doubles, "a replay differed from the model's own")]
)
def test_kernels_that_fail_or_differ_leave_graphs_of_torch_s(
    norm, why: str, gpu, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    monkeypatch.setattr(GpuExpertLayer, "answer", _no_experts)
    write_tiny_checkpoint(tmp_path / "tiny", config_of("qwen3_moe"))
    passes = [PROMPT, *([token] for token in [*TOKENS, *TOKENS])]
    with load(tmp_path / "tiny", gpu) as engine:
        expected = feed(engine, passes)
        assert engine.notices() == []
    monkeypatch.setattr(step_kernels, "rms_norm", norm)
    with load(tmp_path / "tiny", gpu) as engine:
        found = feed(engine, passes)
        assert engine.loaded.decoder._recording is not None, "graphs are still there"
        (note,) = engine.notices()
        assert note.startswith("torch computes norms, rotary embedding and routers, which is slower")
        assert why in note
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))
