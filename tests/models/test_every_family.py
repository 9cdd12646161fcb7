"""Every model type of transformers that has experts, from a tiny configuration: runs like transformers, or is
refused with a fact about the model.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from families import BUILT, REFUSED, WHY, table, tiny_family, types_with_experts
from tiny import SHAPES, UNLISTED, auto_class, write_tiny_checkpoint
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moechat
from moechat.errors import UnsupportedModelError
from moechat.models.refused_families import REASONS
from moechat.models.skeleton import build_skeleton
from moechat.models.threads import one_thread

PAGE = Path(moechat.__file__).parent / "manual" / "models.md"
TYPES = types_with_experts()
TOKENS = list(range(3, 17))
NEW = 6
# Other tests write some types, and the text part of a type that takes pictures is that of its twin.
TWINS = {name for name in TYPES if name.removesuffix("_text") in set(TYPES) - {name, *REFUSED}}
WRITTEN = [name for name in TYPES if name not in {*REFUSED, *BUILT, *SHAPES, *UNLISTED, *TWINS}]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_type_gives_the_logits_and_tokens_of_transformers(
    name: str, tmp_path: Path, moechat_home: Path
) -> None:
    config = tiny_family(name)
    config.get_text_config().eos_token_id = None
    write_tiny_checkpoint(tmp_path, config)
    model = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    with moechat.load(tmp_path, bits=16, dense_bits=16, dtype="float32") as engine:
        found = engine.logits(TOKENS)
        answer = [step.token_id for step in engine.generate(TOKENS, max_new_tokens=NEW, temperature=0.0)]
    ids = torch.tensor([TOKENS])
    with torch.inference_mode(), one_thread():
        wanted = model(input_ids=ids).logits[0]
        longer = model.generate(ids, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
    assert float((found - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))
    assert answer == longer[0, len(TOKENS) :].tolist()


# After a long prompt their layers attend to a choice of keys, or to keys that stand for several tokens.
@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v32", "hy_v4"])
def test_tokens_after_a_long_prompt_are_those_of_transformers(
    name: str, tmp_path: Path, moechat_home: Path
) -> None:
    config = tiny_family(name)
    config.eos_token_id = None
    write_tiny_checkpoint(tmp_path, config)
    prompt = torch.randint(3, 90, (120,), generator=torch.Generator().manual_seed(3))
    model = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode(), one_thread():
        longer = model.generate(prompt[None], do_sample=False, max_new_tokens=12, min_new_tokens=12)
    with moechat.load(tmp_path, bits=16, dense_bits=16, dtype="float32", activation_bits=32) as engine:
        steps = engine.generate(prompt.tolist(), max_new_tokens=12, temperature=0.0)
        assert [step.token_id for step in steps] == longer[0, 120:].tolist()


@pytest.mark.parametrize("name", BUILT)
def test_the_part_for_text_of_another_type_is_built(name: str) -> None:
    try:
        config = tiny_family(name)
    except Exception:  # its parts have to agree in sizes
        config = CONFIG_MAPPING[name]()
    skeleton = build_skeleton(config, torch.float32)
    assert skeleton.experts
    parts = {key.partition("layers.")[0] for key in skeleton.state if "layers." in key}
    assert parts == {skeleton.layers_name.removesuffix("layers")}


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_is_refused_for_a_reason(name: str) -> None:
    configs = []
    for make in (lambda: tiny_family(name), CONFIG_MAPPING[name]):
        try:
            configs.append(make())
        except Exception:
            continue
    messages = []
    for config in configs:
        with pytest.raises(UnsupportedModelError) as caught:
            build_skeleton(config, torch.float32)
        message = str(caught.value)
        assert not re.search(r"[A-Z]\w+Error\b|Exception", message)
        if name in REASONS:
            assert message == f"models of type {name!r} do not run: {REASONS[name]}"
            message = str(caught.value.__cause__)
        messages.append(message)
    assert any(REFUSED[name] in message for message in messages), messages


@pytest.mark.parametrize("name", ["diffusion_gemma", "longcat_flash"])
def test_a_plan_gives_the_reason_of_the_manual(name: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[name]().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"models of type '{name}' do not run: {REASONS[name]}"):
        moechat.plan(tmp_path)


def test_layers_may_have_gates_of_their_own(tmp_path: Path, moechat_home: Path) -> None:
    """As in Step-3.7, which clamps two of its layers."""
    config = tiny_family("step3p7")
    text = config.get_text_config()
    text.mlp_layer_types = ["dense", "dense", "sparse", "sparse"]
    text.swiglu_limits = [0.0, 0.0, 0.0, 1.0]
    text.eos_token_id = None
    write_tiny_checkpoint(tmp_path, config)
    model = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    experts = [module for name, module in model.named_modules() if name.endswith("mlp.experts")]
    for module in experts:
        module.gate_up_proj.data *= 8  # or nothing would reach the limit
    model.save_pretrained(tmp_path)
    with torch.inference_mode(), one_thread():
        wanted = model(input_ids=torch.tensor([TOKENS])).logits[0]
        experts[1].limit = math.inf
        assert float((model(input_ids=torch.tensor([TOKENS])).logits[0] - wanted).abs().max()) > 1e-2
    for options in ({}, {"ram": "4G"}):
        with moechat.load(tmp_path, bits=16, dense_bits=16, dtype="float32", **options) as engine:
            gates = engine.loaded.store.geometry.layer_gates
            assert [gate.limit for gate in gates] == [math.inf, 1.0]
            found = engine.logits(TOKENS)
        assert float((found - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))


def test_the_manual_names_every_type() -> None:
    assert sorted(WHY) == sorted(REFUSED)
    assert set(REFUSED) <= set(TYPES)
    assert table() in PAGE.read_text(), "write what `python tests/support/families.py` prints into models.md"
