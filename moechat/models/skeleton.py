"""A transformers model without weights and without its routed experts' parameters.

The skeleton is built on the meta device from ``config.json`` alone. Parameters of experts modules are removed
and only their shapes kept, because expert weights are read from the block store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from moechat.errors import UnsupportedModelError, one_line
from moechat.geometry import ExpertGeometry, Gate, WeightType
from moechat.models.experts_interface import adapt_experts, is_experts_module
from moechat.models.gates import recognise_gate
from moechat.models.light_meta import light_meta
from moechat.models.mamba_scan import carry_scan_states
from moechat.models.refused_families import REASONS
from moechat.store.checkpoint_files import CONFIG_FILE, config_bytes, config_of
from moechat.store.config_limits import decoded_floats, require_sane_config
from moechat.store.quantised.schemes import require_readable

# Attribute of an experts module that holds the object that computes it.
EXPERTS_RUNNER = "_moechat_layer"

_COMPARE = (
    "compare config.json with that of the model's repository; `moechat help models` lists the models that run"
)
_OTHERS = "`moechat help models` lists the models that run"
_MOST_TOLD = 160  # characters of an error of transformers
# In transformers: the decoder in a model that also takes pictures or sound.
_TEXT_PART = "language_model"


@dataclass(frozen=True)
class ExpertsModule:
    """The routed experts of one decoder layer.

    Attributes:
        name: Module name inside the model, ``model.layers.3.mlp.experts``.
        layer: Decoder layer index.
        module: The module, without its weight parameters.
        num_experts: Experts in the layer.
        hidden_size: Columns of gate and up.
        intermediate_size: Neurons of one expert.
        transposed: Parameters are ``[experts, in, out]`` instead of ``[experts, out, in]``.
        has_bias: ``gate_up_proj_bias``, or ``up_proj_bias``, and ``down_proj_bias`` exist.
        gate: The computation between the projections.
        interleaved: Rows of gate and up alternate; else all gate rows come first.
    """

    name: str
    layer: int
    module: nn.Module
    num_experts: int
    hidden_size: int
    intermediate_size: int
    transposed: bool
    has_bias: bool
    gate: Gate
    interleaved: bool

    @property
    def inputs_name(self) -> str:
        """Parameter with the input projections: ``gate_up_proj``, or ``up_proj`` without gates."""
        return _inputs_name(self.gate.gated)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Full names of the removed parameters."""
        names = (self.inputs_name, "down_proj")
        biases = tuple(f"{name}_bias" for name in names) if self.has_bias else ()
        return tuple(f"{self.name}.{suffix}" for suffix in names + biases)

    def parameter_shape(self, name: str) -> tuple[int, int, int]:
        """Shape of the removed parameter :attr:`inputs_name` or ``down_proj``, by its full name."""
        first, second = self.hidden_size, self.intermediate_size
        inputs = name.endswith(self.inputs_name)
        rows, columns = ((2 if self.gate.gated else 1) * second, first) if inputs else (first, second)
        return (self.num_experts, columns, rows) if self.transposed else (self.num_experts, rows, columns)

    def geometry(self, bits: int, weight_type: WeightType = WeightType.BF16) -> ExpertGeometry:
        """Shape and encoding of the experts with ``bits`` bits per weight.

        Args:
            bits: Bits of a weight.
            weight_type: Of the checkpoint; at 16 bits fp32 weights become bf16.

        Raises:
            UsageError: A size or ``bits`` is out of range.
        """
        return ExpertGeometry(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            bits=bits,
            weight_type=WeightType.FP16 if weight_type is WeightType.FP16 else WeightType.BF16,
            gate=self.gate,
            has_bias=self.has_bias,
        )


def experts_geometry(
    experts: Sequence[ExpertsModule], bits: int, weight_type: WeightType = WeightType.BF16
) -> ExpertGeometry:
    """Shape, encoding and gates of all expert layers; otherwise as :meth:`ExpertsModule.geometry`."""
    geometry = experts[0].geometry(bits, weight_type)
    gates = tuple(entry.gate for entry in experts)
    return replace(geometry, layer_gates=gates) if len(set(gates)) > 1 else geometry


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and its removed expert parameters.

    Attributes:
        model: The transformers model; all its parameters and buffers are meta tensors, the experts have none.
        experts: Its expert layers, ascending.
        state: Names and meta tensors of the whole state dict, including the experts.
    """

    model: PreTrainedModel
    experts: tuple[ExpertsModule, ...]
    state: dict[str, torch.Tensor]

    @property
    def expert_names(self) -> frozenset[str]:
        """Full names of all removed parameters."""
        return frozenset(name for entry in self.experts for name in entry.parameter_names)

    @contextmanager
    def experts_computed_by(self, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Compute the experts by a function in the block; their own would need the removed weights."""
        for entry in self.experts:
            entry.module.forward = forward
        try:
            yield
        finally:
            for entry in self.experts:
                del entry.module.forward

    @property
    def layers_name(self) -> str:
        """Name of the list of decoder layers: ``model.layers``."""
        first = self.experts[0]
        return f".{first.name}.".partition(f".{first.layer}.")[0][1:]


def load_config(directory: Path) -> Any:
    """Read ``config.json`` as a transformers configuration, without running code of the checkpoint.

    Args:
        directory: The model's directory, or the file itself.

    Raises:
        UnsupportedModelError: The model type is unknown to transformers, or moechat cannot read the packing
            of the weights.
        CheckpointError: The file cannot be read, or has a number beyond its limit.
    """
    path = directory / CONFIG_FILE if directory.is_dir() else directory
    return config_from(config_of(path, config_bytes(directory)), directory)


def config_from(values: dict[str, Any], directory: Path) -> Any:
    """The transformers configuration of a ``config.json``; nothing else of moechat makes one of a model's
    file.

    It is made of values that were read and checked before, because transformers' own reader would build lists
    and dictionaries as long as they say, and reads other files in place of this one if it names some.

    Args:
        values: Its content, from :func:`moechat.store.checkpoint_files.config_of`.
        directory: The model's directory.

    Raises:
        UnsupportedModelError: As :func:`load_config`.
        CheckpointError: A number is beyond its limit.
    """
    values = decoded_floats(values)
    require_sane_config(values, str(directory / CONFIG_FILE if directory.is_dir() else directory))
    try:
        config = _config_class(values).from_dict(dict(values), name_or_path=str(directory))
        for part in (config, config.get_text_config()):
            # A checkpoint must not choose the attention function, whose name could refer to downloaded code.
            part._attn_implementation = None
    except Exception as error:  # transformers raises many types for malformed values
        reason = f"its config.json is not understood{_told(error)}"
        if "trust_remote_code" in str(error):
            reason = "it needs custom code, which moechat never runs"
        raise UnsupportedModelError(
            f"the model in {directory} cannot be used: {reason}", hint=_COMPARE
        ) from error
    for part in (config, config.get_text_config()):
        quantisation = getattr(part, "quantization_config", None)
        if quantisation is not None:
            as_dict = quantisation.to_dict() if hasattr(quantisation, "to_dict") else quantisation
            method = as_dict.get("quant_method") if isinstance(as_dict, dict) else None
            require_readable(str(method or "unknown"), str(directory))
            del part.quantization_config
    return config


def _config_class(values: dict[str, Any]) -> Any:
    """The class of a configuration, as ``AutoConfig`` chooses it.

    Raises:
        ValueError: There is none, or a value would hide a method of it.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise ValueError("it names no model_type")
    if kind == "mistral" and "layer_types" in values:
        kind = "ministral"  # layers of several kinds
    if kind not in CONFIG_MAPPING:
        if "auto_map" in values:
            raise ValueError("it needs trust_remote_code")
        raise ValueError(f"transformers does not know the model_type {kind[:80]!r}")
    found = CONFIG_MAPPING[kind]
    for key in values:
        if callable(getattr(found, key, None)):
            raise ValueError(f"{key[:80]!r} is no setting, but a method of configurations")
    return found


def build_skeleton(config: Any, dtype: torch.dtype, experts_implementation: str = "eager") -> Skeleton:
    """Build the model of ``config`` on the meta device and remove its experts' parameters.

    Args:
        config: A transformers configuration of a text model.
        dtype: Type of the dense parameters.
        experts_implementation: Name in ``ALL_EXPERTS_FUNCTIONS`` of the function that computes the experts.

    Raises:
        UnsupportedModelError: The type has no causal language model, it has no routed experts, or moechat
            cannot run its experts; the message gives the reason.
    """
    try:
        return _built(config, dtype, experts_implementation)
    except UnsupportedModelError as error:
        reason = REASONS.get(config.model_type)
        if reason is None:
            raise
        raise UnsupportedModelError(
            f"models of type {config.model_type!r} do not run: {reason}", hint=_OTHERS
        ) from error


def _built(config: Any, dtype: torch.dtype, experts_implementation: str) -> Skeleton:
    try:
        with light_meta(), torch.device("meta"):
            model = _class_for(config).from_config(
                config, dtype=dtype, trust_remote_code=False, experts_implementation=experts_implementation
            )
    except Exception as error:  # depends on the family
        raise UnsupportedModelError(
            f"transformers cannot build a model of type {config.model_type!r} from this config.json"
            f"{_told(error)}",
            hint=_COMPARE,
        ) from error
    _keep_text_part(model)
    adapt_experts(model, experts_implementation)
    carry_scan_states(model)
    _keep_only_read_keys(model)
    model.eval()
    state = model.state_dict()
    experts = tuple(sorted(_find_experts(model), key=lambda entry: entry.layer))
    if not experts:
        raise _no_experts(model, config.model_type)
    _check_uniform(experts, config)
    for entry in experts:
        for name in entry.parameter_names:
            del entry.module._parameters[name.rsplit(".", 1)[1]]
    return Skeleton(model, experts, state)


def _class_for(config: Any) -> Any:
    """The automatic class that builds a model of text: of text alone if the type has one."""
    of_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (
        AutoModelForImageTextToText
        if of_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        else AutoModelForCausalLM
    )


def decoder_of(model: nn.Module) -> nn.Module:
    """The decoder of a model that also takes pictures or sound, else the whole model."""
    decoder = getattr(getattr(model, "base_model", None), _TEXT_PART, model)
    return decoder if isinstance(decoder, nn.Module) else model


def base_of(model: Any) -> Any:
    """What a model has below its head: embedding, decoder layers and last norm."""
    decoder = decoder_of(model)
    return model.base_model if decoder is model else decoder


def _keep_only_read_keys(model: nn.Module) -> None:
    """Let no layer hand on keys and values if none reads them, as Gemma's do since transformers 5.24: they
    would be held until the pass ends, and the layer would need a place for them.
    """
    modules: list[Any] = [each for each in model.modules() if hasattr(each, "store_full_length_kv")]
    if not any(getattr(each, "is_kv_shared_layer", True) for each in modules):
        for each in modules:
            each.store_full_length_kv = False


def _keep_text_part(model: PreTrainedModel) -> None:
    """Remove what turns pictures and sound into hidden states: without such inputs it is never called."""
    if decoder_of(model) is not model:
        for name, _ in list(model.base_model.named_children()):
            if name != _TEXT_PART:
                delattr(model.base_model, name)


def _find_experts(model: PreTrainedModel) -> list[ExpertsModule]:
    found = []
    for name, module in model.named_modules():
        if not is_experts_module(module):
            continue
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", f".{name}.")
        if len(numbers) != 1:
            raise UnsupportedModelError(f"{name} does not say which decoder layer it belongs to")
        if getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModelError(f"{name} normalises each expert's output, which moechat cannot run")
        gate, interleaved = recognise_gate(module, name)
        transposed = bool(module.is_transposed)
        has_bias = bool(getattr(module, "has_bias", False))
        inputs = _inputs_name(gate.gated)
        known = {inputs, "down_proj"} | ({f"{inputs}_bias", "down_proj_bias"} if has_bias else set())
        present = {key for key, value in module.named_parameters() if value is not None}
        if present != known:
            raise UnsupportedModelError(
                f"{name} has parameters {sorted(present)}; moechat understands {sorted(known)}"
            )
        shape = tuple(getattr(module, inputs).shape)
        num_experts, hidden, rows = shape if transposed else (shape[0], shape[2], shape[1])
        found.append(
            ExpertsModule(
                name=name,
                layer=int(numbers[0]),
                module=module,
                num_experts=num_experts,
                hidden_size=hidden,
                intermediate_size=rows // 2 if gate.gated else rows,
                transposed=transposed,
                has_bias=has_bias,
                gate=gate,
                interleaved=interleaved,
            )
        )
    return found


def _inputs_name(gated: bool) -> str:
    return "gate_up_proj" if gated else "up_proj"


def _told(error: Exception) -> str:
    """What an error says, for the end of a sentence: its beginning after a colon, if it says anything."""
    text = one_line(error, _MOST_TOLD)
    if text and isinstance(error, KeyError):  # it says the key alone
        text = f"it does not know {text}"
    return f": {text}" if text else ""


def _no_experts(model: PreTrainedModel, model_type: str) -> UnsupportedModelError:
    classes = {type(module).__name__ for name, module in model.named_modules() if "layers." in name}
    others = sorted(name for name in classes if name.endswith(("Experts", "MoE", "Moe")))
    if not others:
        return UnsupportedModelError(
            f"model type {model_type!r} has no routed experts",
            hint="moechat runs Mixture-of-Experts models; dense models need another tool",
        )
    return UnsupportedModelError(
        f"model type {model_type!r} computes its experts in {', '.join(others)}, in a form of their own"
    )


def _check_uniform(experts: tuple[ExpertsModule, ...], config: Any) -> None:
    model_type = config.model_type
    layers = [entry.layer for entry in experts]
    if len(set(layers)) != len(layers):
        raise UnsupportedModelError(
            f"model type {model_type!r} has several expert modules in one decoder layer"
        )
    if len({(entry.gate.gated, entry.interleaved) for entry in experts}) != 1:
        raise UnsupportedModelError(f"the layers of {model_type!r} arrange their projections differently")
    shapes = {(e.num_experts, e.hidden_size, e.intermediate_size, e.transposed, e.has_bias) for e in experts}
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"model type {model_type!r} has expert layers of {len(shapes)} different shapes"
        )
    top_k = getattr(config.get_text_config(), "num_experts_per_tok", None)
    if isinstance(top_k, int) and not 0 < top_k <= experts[0].num_experts:
        raise UnsupportedModelError(f"{top_k} experts per token of {experts[0].num_experts} are not valid")
