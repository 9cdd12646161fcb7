"""The model in training: weights of stores, routers, adapters, and losses, over families of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_support import SMALL, write_model

from moechat.errors import DoesNotFitError
from moechat.hub.model_ref import ModelRef
from moechat.hub.names import resolve
from moechat.loading.stores import open_store
from moechat.tune.adapted import AdaptedModel
from moechat.tune.batches import Batch
from moechat.tune.source import build_model, memory_errors, open_source

# Softmax and sigmoid routers, corrections, biases, interleaved and transposed experts, shared experts.
FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3"]


def build(directory: Path) -> tuple[Any, Any]:
    return build_model(open_source(resolve(str(directory)), lambda progress: None), torch.float32)


def batch(lengths: Sequence[int] = (12, 7, 9)) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 250, (len(lengths), max(lengths)), generator=generator)
    trained = torch.zeros_like(ids, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
        trained[row, 3:length] = True
    return Batch(ids, trained, torch.tensor(lengths))


def losses(adapted: AdaptedModel, of: Batch) -> list[torch.Tensor]:
    return list(adapted(of.ids, of.trained, of.tokens))


def changed(adapted: AdaptedModel, seed: int = 1) -> None:
    """Change all trained parameters at random, as training would: gates stay."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum(losses(adapted, batch()))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    with torch.no_grad():
        for name, parameter in adapted.trained().items():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            if "lora_B" in name:
                # A gradient of 0 in whole rows marks what is held.
                assert parameter.grad is not None
                noise *= (parameter.grad.abs().sum(1, keepdim=True) > 0).float()
            parameter += noise


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_family_can_be_tuned(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, family)
    model, entries = build(tmp_path)
    of = batch()
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(input_ids=of.ids, use_cache=False).logits
    adapted = AdaptedModel(model, entries, SMALL)
    adapted.eval()
    with adapted.taps.recording() as routing, torch.no_grad():
        torch.testing.assert_close(adapted.model(input_ids=of.ids, use_cache=False).logits, expected)
        probabilities = adapted.taps.probabilities(routing, len(of.ids))
    assert probabilities.shape == (len(entries), *of.ids.shape, adapted.taps.experts)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(probabilities.shape[:-1]))

    changed(adapted)
    with torch.no_grad():
        assert not torch.allclose(adapted.model(input_ids=of.ids, use_cache=False).logits, expected)
        with adapted.base_model():
            torch.testing.assert_close(adapted.model(input_ids=of.ids, use_cache=False).logits, expected)
        tuned = adapted.model(input_ids=of.ids, use_cache=False).logits
    merged = adapted.merge(torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            merged(input_ids=of.ids, use_cache=False).logits, tuned, rtol=1e-3, atol=1e-3
        )
    after = merged.state_dict()
    touched = {name for name, tensor in after.items() if not torch.equal(tensor, original[name])}
    for entry in entries:
        inputs = f"{entry.name}.{entry.inputs_name}"
        assert {inputs, f"{entry.name}.down_proj"} <= touched
        before, now = (values[inputs] for values in (original, after))
        if entry.transposed:
            before, now = before.mT, now.mT
        if entry.gate.gated:
            size = entry.intermediate_size
            gate = slice(0, None, 2) if entry.interleaved else slice(0, size)
            up = slice(1, None, 2) if entry.interleaved else slice(size, None)
            assert torch.equal(before[:, gate], now[:, gate])
            assert bool((before[:, up] != now[:, up]).any((1, 2)).all())
    routers = len([p for router in adapted.taps.routers for p in router.parameters])
    assert len(touched) == 2 * len(entries) + routers


def test_gates_are_adapted_on_request(tmp_path: Path) -> None:
    write_model(tmp_path)
    model, entries = build(tmp_path)
    before = model.state_dict()[f"{entries[0].name}.gate_up_proj"].clone()
    adapted = AdaptedModel(model, entries, replace(SMALL, tune_gate=True))
    changed(adapted)
    after = adapted.merge(torch.float32).state_dict()[f"{entries[0].name}.gate_up_proj"]
    assert not torch.equal(before[:, 0], after[:, 0])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("bits", [16, 4])
def test_a_store_gives_the_weights_that_it_was_made_of(tmp_path: Path, family: str, bits: int) -> None:
    write_model(tmp_path / "model", family)
    reference, entries = build(tmp_path / "model")
    store = open_store(resolve(str(tmp_path / "model")), bits, lambda progress: None)
    source = open_source(ModelRef(name="store", slug="store", store=store.path), lambda progress: None)
    assert source.dtype == torch.bfloat16
    model, _ = build_model(source, torch.float32)
    experts = {name for entry in entries for name in entry.parameter_names}
    for name, expected in reference.state_dict().items():
        found = model.state_dict()[name]
        if bits == 16 or name not in experts or name.endswith("_bias"):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        else:
            error = (found - expected).pow(2).mean() / expected.pow(2).mean()
            assert 0 < float(error) < 0.02, name


def test_the_loss_without_weights_is_that_of_plain_training(tmp_path: Path) -> None:
    write_model(tmp_path)
    adapted = AdaptedModel(*build(tmp_path), replace(SMALL, cache_weight=0, rank_weight=0))
    changed(adapted)
    adapted.zero_grad()
    of = batch()
    nll, cache, rank = losses(adapted, of)
    assert (float(cache), float(rank)) == (0, 0)
    (nll / of.trained.sum()).backward()
    found = {name: p.grad.clone() for name, p in adapted.trained().items() if p.grad is not None}

    adapted.zero_grad()
    labels = torch.where(of.trained, of.ids, -100)
    mask = (torch.arange(of.ids.shape[1]) < of.tokens[:, None]).long()
    loss = adapted.model(input_ids=of.ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(nll / of.trained.sum(), loss)
    for name, parameter in adapted.trained().items():
        gradient = parameter.grad
        assert gradient is not None
        if name.endswith("lora_B.default.weight") and "gate_up" not in name:
            assert float(gradient.abs().sum()) > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_padding_does_not_change_the_losses_of_a_sequence(tmp_path: Path) -> None:
    write_model(tmp_path)
    adapted = AdaptedModel(*build(tmp_path), SMALL)
    changed(adapted)
    of = batch()
    together = losses(adapted, of)
    apart = [torch.zeros(()) for _ in range(3)]
    for row, length in enumerate(of.tokens.tolist()):
        alone = Batch(
            of.ids[row : row + 1, :length], of.trained[row : row + 1, :length], of.tokens[row : row + 1]
        )
        apart = [total + part for total, part in zip(apart, losses(adapted, alone), strict=True)]
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


def test_both_ways_to_the_base_router_agree_until_the_model_changes(tmp_path: Path) -> None:
    write_model(tmp_path)
    of = batch()
    found = []
    for way in ("model", "router"):
        adapted = AdaptedModel(*build(tmp_path), replace(SMALL, base_router=way))
        first = losses(adapted, of)[2].item()
        changed(adapted)
        found.append((first, losses(adapted, of)[2].item()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] != pytest.approx(found[1][1], rel=1e-3)


def test_the_gradient_of_the_cache_loss_reaches_the_routers_alone_of_a_layer(tmp_path: Path) -> None:
    """It comes from the routers' probabilities, so the last layer's adapters get none of it."""
    write_model(tmp_path)
    adapted = AdaptedModel(*build(tmp_path), SMALL)
    losses(adapted, batch())[1].backward()
    last = adapted.taps.routers[-1].weight
    assert last.grad is not None
    assert float(last.grad.abs().sum()) > 0
    assert not [
        name
        for name, parameter in adapted.trained().items()
        if ".layers.1." in name and "lora" in name and parameter.grad is not None and parameter.grad.any()
    ]


def test_memory_that_cannot_be_had_is_an_error_with_a_next_step() -> None:
    with pytest.raises(DoesNotFitError, match="not enough RAM") as caught, memory_errors("lower it"):
        torch.empty(1 << 50)
    assert caught.value.hint == "lower it"
    with pytest.raises(RuntimeError, match="size"), memory_errors("lower it"):
        torch.ones(2) @ torch.ones(3)
