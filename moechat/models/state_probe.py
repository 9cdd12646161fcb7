"""Finds out whether the states of a family carry across the parts of a prompt.

Layers with linear attention or convolutions keep states instead of keys and values, and others compress their
keys. A prompt may be computed in parts only if the family's code goes on from what the last part has left.
Some families, and older versions of transformers, begin again from nothing in every pass of several tokens.
The configuration does not tell, so a small model with the same layers is built, with random weights, and a
prompt in parts is compared with the same prompt in one pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from moechat.models.cache_argument import CACHE
from moechat.models.cache_states import states_of
from moechat.models.compressing_layer import ENTRIES
from moechat.models.decode.probe import probing
from moechat.models.dense import initialise_rest
from moechat.models.light_meta import light_meta
from moechat.models.skeleton import Skeleton, build_skeleton
from moechat.models.state_layer import STATES

# Tokens of the parts: longer than the blocks in which families compute linear attention (64), shorter than
# a convolution, and one.
_PARTS = (67, 75, 2, 1)
# Largest difference that counts as rounding, relative to the largest logit; and how many times the difference
# disturbed states have to make, or else the comparison would show nothing.
_ROUNDING = 1e-4
_EFFECT = 30
_LEAST_ROUNDING = 1e-6
# Largest values in the small model.
_HIDDEN = 64
_VOCABULARY = 128
_MOST_WEIGHTS = 32 << 20
# Keys of configurations.
_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "q_lora_rank",
    "o_lora_rank",
)
_ATTENTION = ("num_attention_heads", "num_key_value_heads")
# Each group of the output projection has some of the heads.
_GROUPS = ("num_attention_heads", "o_groups")
_LINEAR = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads")
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_DERIVED = ("per_layer_config", "layers_block_type", "transformers_version", "architectures", "dtype")


@dataclass(frozen=True)
class Carry:
    """Whether states carry across parts.

    Attributes:
        carries: They do.
        reason: Why they do not; empty if they do.
    """

    carries: bool
    reason: str = ""


def states_carry(config: Any) -> Carry:
    """Compare a prompt in parts with one pass, on a small model of the same layers.

    Args:
        config: Configuration of a model, in full size.
    """
    failure = "no small model of its layers can be built"
    for values in _small_values(config.get_text_config()):
        try:
            skeleton = _random_model(_configuration(config, values))
            if skeleton is not None:
                return _compare(skeleton)
        except Exception as error:  # families refuse sizes in many ways
            failure = f"a small model of its layers fails: {type(error).__name__}"
    return Carry(False, failure)


def _compare(skeleton: Skeleton) -> Carry:
    model, config = skeleton.model, skeleton.model.config
    vocabulary = int(config.get_text_config().vocab_size)
    with (
        probing() as generator,
        skeleton.experts_computed_by(lambda hidden, _index, _weights: 0.5 * hidden),
    ):
        ids = torch.randint(3, vocabulary, (1, sum(_PARTS)), generator=generator)
        held = DynamicCache(config=config)
        whole = model(input_ids=ids, use_cache=True, **{CACHE: held}).logits[0]
        size = float(whole.abs().max())

        def difference(disturbed: str = "") -> float:
            cache, found = DynamicCache(config=config), []
            for part in torch.split(ids, list(_PARTS), dim=1):
                found.append(model(input_ids=part, use_cache=True, **{CACHE: cache}).logits[0])
                for layer in cache.layers:
                    for state in states_of(layer, disturbed):
                        state.add_(1)
            return float((torch.cat(found) - whole).abs().max()) / size

        rounding = difference()
        if not rounding <= _ROUNDING:
            return Carry(False, "its code begins again from nothing in each part of a prompt")
        for kind in (*STATES, ENTRIES):
            if any(states_of(layer, kind) for layer in held.layers):
                effect = difference(kind)
                if not effect >= _EFFECT * max(rounding, _LEAST_ROUNDING):
                    return Carry(False, "a trial cannot tell whether its states carry across parts")
    return Carry(True)


# ---- the small model


def _configuration(config: Any, values: dict[str, Any]) -> Any:
    """A configuration with other values for the part for text; of that part alone if it is a model type."""
    text = config.get_text_config()
    small = type(text)(**values)
    if text is config or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return small
    whole = copy.deepcopy(config)
    whole.text_config = small
    return whole


def _random_model(config: Any) -> Skeleton | None:
    """A model with random weights; ``None`` if it is not small."""
    skeleton = build_skeleton(config, torch.float32)
    model = skeleton.model
    if sum(weight.numel() for weight in model.parameters()) > _MOST_WEIGHTS:
        return None
    # Buffers are still on the meta device.
    with light_meta(), torch.random.fork_rng(devices=[]), probing() as generator:
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    empty = torch.empty(weight.shape, dtype=weight.dtype)
                    module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        initialise_rest(skeleton)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.6 / weight.shape[-1] ** 0.5, generator=generator)
            else:
                weight.uniform_(0.1, 0.9, generator=generator)
    return skeleton


def _small_values(text: Any) -> Iterator[dict[str, Any]]:
    """Values for configurations with the layers of a family, but few and narrow ones."""
    layers = int(text.num_hidden_layers)
    kept = _kept_layers(text, layers)
    values = {
        name: value[:kept] if isinstance(value, list) and len(value) == layers else value
        for name, value in text.to_dict().items()
        if value is not None and name not in _DERIVED and not name.startswith("_")
    }
    values.update(num_hidden_layers=kept, vocab_size=min(_VOCABULARY, int(text.vocab_size)))
    values.update({name: place for place, name in enumerate(_TOKENS) if name in values})
    for name in _FIRST_LAYERS:
        if isinstance(values.get(name), int):
            values[name] = min(1, values[name])
    for name in _WIDTHS:
        if isinstance(values.get(name), int):
            values[name] = min(_HIDDEN, values[name])
    hidden = int(text.hidden_size)
    # Heads have a size of their own in some families, so hidden states can be of any size. In others heads
    # divide the hidden states, or a multiple of them.
    yield {
        **values,
        **_fewer(values, _GROUPS if "o_groups" in values else _ATTENTION),
        **_fewer(values, _LINEAR),
        "hidden_size": min(_HIDDEN, hidden),
    }
    yield {**values, **_fewer(values, ("hidden_size", *_ATTENTION, "mamba_n_heads"))}


def _fewer(values: dict[str, Any], names: Sequence[str]) -> dict[str, int]:
    """The numbers with these names, divided by their greatest common divisor."""
    numbers = {name: values[name] for name in names if isinstance(values.get(name), int)}
    divisor = math.gcd(*numbers.values())
    return {name: number // divisor for name, number in numbers.items()}


def _kept_layers(text: Any, layers: int) -> int:
    """Number of first layers that has a layer of each kind."""
    lists = [getattr(text, "layer_types", None), *text.to_dict().values()]
    kinds = [repr(kind) for kind in zip(*(each for each in lists if _is_list(each, layers)), strict=True)]
    return min(layers, max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]))


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length
