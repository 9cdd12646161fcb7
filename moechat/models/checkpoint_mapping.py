"""Maps checkpoint tensors to model parameters with transformers' conversion rules.

Checkpoints keep the names of their first release (``block_sparse_moe.experts.3.w1.weight``); transformers
maps them to its modules while loading. Here the same rules are applied to names only: expert tensors become
:class:`~moechat.store.expert_refs.ExpertRef` descriptions for the store, the others are dense weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from moechat.errors import CheckpointError, UnsupportedModelError, UsageError
from moechat.geometry import ExpertGeometry, WeightType
from moechat.models.checkpoint_checks import about_config, require_each_expert, require_no_further_layers
from moechat.models.expert_tensors import named_experts, plan_named_layer
from moechat.models.joined_weights import joining_rules, joins
from moechat.models.linear_experts import linear_experts
from moechat.models.mtp import build_mtp_skeleton, mtp_names
from moechat.models.mtp_types import MTP_TYPES
from moechat.models.read_order import first_reads
from moechat.models.skeleton import ExpertsModule, Skeleton, build_skeleton, config_from, experts_geometry
from moechat.store.checkpoint import Checkpoint
from moechat.store.expert_refs import CheckpointPlan, ExpertLayerSource, ExpertRef, MatrixRef, VectorRef
from moechat.store.kept import kept_encodings

_WEIGHT_TYPES = {"BF16": WeightType.BF16, "F16": WeightType.FP16, "F32": WeightType.FP32}
# Safetensors types that dense weights may have.
FLOAT_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
READABLE_TYPES = FLOAT_TYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass
class Target:
    """A model parameter and the checkpoint tensors that it is made from.

    Attributes:
        name: Parameter or buffer name in the model; the first one if a rule yields several.
        converter: The rule that combines the sources; ``None`` if the single source is the parameter itself.
        sources: Checkpoint names by the rule's source pattern, in natural order of their numbers.
    """

    name: str
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """Checkpoint names of all sources."""
        return [key for group in self.sources.values() for key in group]

    @property
    def names(self) -> list[str]:
        """Parameters that are made of the sources: ``name``, and the others of a rule that splits one."""
        patterns = [] if self.converter is None else self.converter.target_patterns
        return [self.name, *(self.name.replace(patterns[0], other) for other in patterns[1:])]


def map_keys(skeleton: Skeleton, keys: Iterable[str]) -> tuple[dict[str, Target], list[str]]:
    """Find the model parameter of every checkpoint tensor.

    Returns:
        Targets by name, and the unused checkpoint names.
    """
    model, state = skeleton.model, skeleton.state
    rules = [*get_model_conversion_mapping(model), *joining_rules(state)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    targets: dict[str, Target] = {}
    unused = []
    for key in sorted(keys, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            unused.append(key)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        target = targets.setdefault(name, Target(name, converter))
        target.sources.setdefault(pattern if pattern is not None else key, []).append(key)
    return targets, unused


def combine(target: Target, tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Run a target's rule on loaded tensors.

    Args:
        target: The rule and its checkpoint names.
        tensors: The loaded tensors by checkpoint name.
        model: The skeleton's model; some rules read sizes from it.

    Returns:
        Tensors by model parameter name; several if the rule splits one source.

    Raises:
        CheckpointError: The tensors do not have the shapes that the rule expects.
    """
    if target.converter is None:
        ((_, keys),) = target.sources.items()
        return {target.name: tensors[keys[-1]]}
    rule = deepcopy(target.converter)
    for pattern, keys in target.sources.items():
        for key in keys:
            rule.add_tensor(target.name, key, pattern, tensors[key])  # type: ignore[arg-type]
    try:
        combined = rule.convert(target.name, model=model, config=model.config)
    except Exception as error:
        raise CheckpointError(f"the tensors for {target.name} do not fit together: {error}") from error
    return {name: value[0] if isinstance(value, list) else value for name, value in combined.items()}


def plan_checkpoint(checkpoint: Checkpoint, *, heads: bool = True) -> CheckpointPlan:
    """Determine the expert and dense tensors of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        heads: With its head for multi-token prediction, if it has one.

    Raises:
        UnsupportedModelError: moechat cannot run the model; the message gives the reason.
        CheckpointError: Tensors are missing, or their shapes differ from the configuration's.
    """
    config = config_from(checkpoint.config, checkpoint.path)
    depth = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(depth, int) and depth > len(checkpoint.keys()):
        raise CheckpointError(f"{checkpoint.title} has {len(checkpoint.keys())} tensors for {depth} layers")
    with about_config(checkpoint):
        skeleton = build_skeleton(config, torch.float32)
        experts_geometry(skeleton.experts, 16)
    expert_names = skeleton.expert_names
    named = named_experts(checkpoint.keys())
    targets, unused = map_keys(skeleton, checkpoint.keys() - named)
    linear = linear_experts(skeleton, unused, lambda key: next(iter(map_keys(skeleton, [key])[0]), None))
    dense = [target for name, target in targets.items() if name not in expert_names]
    if isinstance(depth, int):
        inside = f"{skeleton.layers_name}."
        used = [key for name, target in targets.items() if name.startswith(inside) for key in target.keys]
        require_no_further_layers(checkpoint, used, unused, depth)

    layers = tuple(
        plan_named_layer(entry, named, checkpoint)
        if named
        else linear.get(entry.name) or _plan_layer(entry, targets, checkpoint)
        for entry in skeleton.experts
    )
    dense_keys = sorted((key for target in dense for key in target.keys), key=_natural)
    reads = first_reads(skeleton)
    weight_type = _weight_type(checkpoint, layers)
    geometry = experts_geometry(skeleton.experts, 16, weight_type)
    kept, not_kept = kept_encodings(checkpoint, geometry, layers)
    head = _plan_mtp(checkpoint, config, unused, named, geometry, weight_type, kept) if heads else None
    if head is not None:
        dense_keys = sorted([*dense_keys, *head.dense_keys], key=_natural)
    plan = CheckpointPlan(
        model_type=config.model_type,
        experts=geometry,
        weight_type=weight_type,
        layers=layers,
        dense_keys=tuple(dense_keys),
        read_before=() if reads is None else _read_before(reads, dense, len(layers)),
        kept=kept,
        not_kept=not_kept,
        mtp=None if head is None else head.experts,
        mtp_ordinal=0 if head is None else head.ordinal,
    )
    _check_dense(skeleton, checkpoint, dense)
    made = {name for target in targets.values() for name in target.names}
    missing = missing_dense(skeleton, made | expert_names)
    if missing:
        raise CheckpointError(
            f"{checkpoint.title} lacks {len(missing)} tensors of the model, first {missing[0]!r}"
        )
    return plan


class _Head(NamedTuple):
    """A head for multi-token prediction: its experts, its other tensors, and a layer with its encodings."""

    experts: ExpertLayerSource
    dense_keys: list[str]
    ordinal: int


def _plan_mtp(
    checkpoint: Checkpoint,
    config: Any,
    unused: list[str],
    named: frozenset[str],
    geometry: ExpertGeometry,
    weight_type: WeightType,
    kept: tuple[tuple[str, str], ...],
) -> _Head | None:
    """The experts and the dense tensors of a head for multi-token prediction.

    Args:
        checkpoint: The checkpoint.
        config: Its configuration.
        unused: Tensors that the model without the head does not use.
        named: Those that are named as experts, if there are such.
        geometry: Of the model's experts.
        weight_type: Of the model's experts in the checkpoint.
        kept: Encodings that a store keeps; those of the head have to be the same as in one layer.

    Returns:
        ``None``: there is none that can be used.
    """
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    if config.model_type not in MTP_TYPES or geometry.layer_gates or not isinstance(depth, int):
        return None
    if not any(key.startswith("mtp.") or f"layers.{depth}." in key for key in unused):
        return None
    try:
        skeleton = build_mtp_skeleton(config, torch.float32)
        (entry,) = skeleton.experts
        keys = mtp_names(skeleton, unused, depth)
        targets, _ = map_keys(skeleton, keys)
        for target in targets.values():
            target.sources = {
                pattern: [keys[own] for own in names] for pattern, names in target.sources.items()
            }
        made = {name for target in targets.values() for name in target.names}
        missing = missing_dense(skeleton, made | (skeleton.expert_names if named else frozenset()))
        if missing or entry.geometry(16, geometry.weight_type) != geometry:
            return None
        dense = [target for name, target in targets.items() if name not in skeleton.expert_names]
        _check_dense(skeleton, checkpoint, dense)
        if named:
            experts = plan_named_layer(replace(entry, layer=depth), named, checkpoint)
        else:
            experts = replace(_plan_layer(entry, targets, checkpoint), layer=depth)
        same_type = _weight_type(checkpoint, (experts,)) is weight_type
    except (CheckpointError, UnsupportedModelError, UsageError):
        return None  # the model runs without it
    own = kept_encodings(checkpoint, geometry, [experts])[0] if kept else ()
    if not same_type or (kept and not (own and own[0] in kept)):
        return None
    keys_of_dense = [key for target in dense for key in target.keys]
    return _Head(experts, keys_of_dense, kept.index(own[0]) if kept else 0)


def _read_before(
    reads: dict[str, int], dense: list[Target], expert_layers: int
) -> tuple[tuple[str, ...], ...]:
    """Checkpoint tensors by the first expert layer before whose experts they are read."""
    by_layer: list[list[str]] = [[] for _ in range(expert_layers)]
    for target in dense:
        if target.name in reads:
            by_layer[reads[target.name]].extend(target.keys)
    return tuple(tuple(sorted(keys, key=_natural)) for keys in by_layer)


def missing_dense(skeleton: Skeleton, present: set[str]) -> list[str]:
    """Names of the state dict that neither ``present`` nor a tied weight provides."""
    tied = dict(getattr(skeleton.model, "all_tied_weights_keys", None) or {})
    return sorted(
        name
        for name in skeleton.state
        if name not in present and tied.get(name, name) not in present - {name}
    )


def _check_dense(skeleton: Skeleton, checkpoint: Checkpoint, targets: list[Target]) -> None:
    """Check before a long conversion that the dense weights can be loaded."""
    for target in targets:
        for key in target.keys:
            dtype, shape = checkpoint.info(key)
            readable = FLOAT_TYPES if skeleton.state[target.name].is_floating_point() else READABLE_TYPES
            if dtype not in readable:
                raise _unreadable(checkpoint, key, dtype, "the dense part", readable)
            wanted = tuple(skeleton.state[target.name].shape)
            if target.converter is None and tuple(shape) != wanted:
                raise CheckpointError(
                    f"{checkpoint.place(key)} has shape {list(shape)}; the configuration says {list(wanted)}"
                )
        if joins(target.converter):
            parts = {key: torch.empty(checkpoint.info(key)[1], device="meta") for key in target.keys}
            ((name, made),) = combine(target, parts, skeleton.model).items()
            if made.shape != skeleton.state[name].shape:
                raise CheckpointError(
                    f"{checkpoint.title}: the tensors for {name} have shapes "
                    f"{[list(part.shape) for part in parts.values()]}, which do not fit the configuration"
                )


def _plan_layer(
    entry: ExpertsModule, targets: dict[str, Target], checkpoint: Checkpoint
) -> ExpertLayerSource:
    def source(suffix: str) -> Target:
        name = f"{entry.name}.{suffix}"
        if name not in targets:
            raise CheckpointError(f"{checkpoint.title} has no tensors for {name}")
        return targets[name]

    size, interleaved, gated = entry.intermediate_size, entry.interleaved, entry.gate.gated
    gate_rows, up_rows = ((0, 2), (1, 2)) if interleaved else ((0, 1), (size, 1))
    inputs, down = source(entry.inputs_name), source("down_proj")
    biases = (source(f"{entry.inputs_name}_bias"), source("down_proj_bias")) if entry.has_bias else None
    experts = []
    for index in range(entry.num_experts):
        vectors: dict[str, VectorRef | None] = {}
        if biases is not None:
            first, second = (_only_key(target) for target in biases)
            vectors = {
                "gate_bias": VectorRef(first, index, gate_rows[0], gate_rows[1], size),
                "up_bias": VectorRef(first, index, up_rows[0], up_rows[1], size) if gated else None,
                "down_bias": VectorRef(second, index, 0, 1, entry.hidden_size),
            }
        experts.append(
            ExpertRef(
                gate=_matrix(entry, inputs, checkpoint, index, 0, *gate_rows, size),
                up=_matrix(entry, inputs, checkpoint, index, 1, *up_rows, size) if gated else None,
                down=_matrix(entry, down, checkpoint, index, 0, 0, 1, entry.hidden_size),
                **vectors,
            )
        )
    return ExpertLayerSource(layer=entry.layer, module=entry.name, experts=tuple(experts))


def _matrix(
    entry: ExpertsModule,
    target: Target,
    checkpoint: Checkpoint,
    expert: int,
    part: int,
    start: int,
    step: int,
    rows: int,
) -> MatrixRef:
    """One expert's matrix: ``part`` 0 is gate (or down), 1 is up; rows as in the fused parameter."""
    operations = [] if target.converter is None else [type(op).__name__ for op in target.converter.operations]
    if not operations:
        key = _only_key(target)
        transposed = entry.transposed and not checkpoint.tensors.rows_first(key)
        return MatrixRef(key, expert, start, step, rows, transposed=transposed)
    assert target.converter is not None
    if operations in (["Transpose"], ["Interleave"]) and len(target.keys) == 1:
        start, step, transposed = _rearranged(entry, target, checkpoint, part, start, step)
        return MatrixRef(target.keys[0], expert, start, step, rows, transposed=transposed)
    patterns = target.converter.source_patterns
    lists = [target.sources.get(pattern, []) for pattern in patterns]
    both = len(patterns) == 2 and not entry.interleaved
    if operations == ["Concatenate"] and both and all(len(keys) == 1 for keys in lists):
        # Gate and up of all experts in a tensor each.
        return MatrixRef(lists[part][0], expert, 0, 1, rows, transposed=entry.transposed)
    if expert == 0:
        for pattern, keys in zip(patterns, lists, strict=True):
            require_each_expert(checkpoint, pattern, keys, entry.num_experts)
    if operations == ["MergeModulelist"] and len(patterns) == 1:
        return MatrixRef(lists[0][expert], None, start, step, rows, transposed=entry.transposed)
    if operations == ["MergeModulelist", "Concatenate"] and both:
        return MatrixRef(lists[part][expert], None, 0, 1, rows, transposed=entry.transposed)
    raise UnsupportedModelError(
        f"{target.name} is stored in a layout that moechat does not read ({' then '.join(operations)})"
    )


def _rearranged(
    entry: ExpertsModule, target: Target, checkpoint: Checkpoint, part: int, start: int, step: int
) -> tuple[int, int, bool]:
    """First row, distance of rows, and whether matrices are transposed, in a fused tensor whose matrices
    transformers transposes, or whose rows it reorders.
    """
    assert target.converter is not None
    (operation,) = target.converter.operations
    name, options = type(operation).__name__, vars(operation)
    if name == "Transpose" and {options["dim0"], options["dim1"]} == {1, 2}:
        # Checkpoints that transformers has written have the model's shape already; such a rule checks it.
        same_shape = tuple(checkpoint.info(target.keys[0])[1]) == entry.parameter_shape(target.name)
        turned = not (options.get("check_dims", False) and same_shape)
        return start, step, entry.transposed != turned
    plain = not (entry.transposed or entry.interleaved)
    if name == "Interleave" and options["dim"] == 1 and not options["inverse"] and plain:
        # Rows of gate and up alternate in the file, and come after each other in the model.
        return part, 2, False
    raise UnsupportedModelError(f"{target.name} is stored in a layout that moechat does not read")


def _only_key(target: Target) -> str:
    if len(target.keys) != 1 or target.converter is not None:
        raise UnsupportedModelError(
            f"{target.name} comes from {len(target.keys)} tensors; moechat reads it from one"
        )
    return target.keys[0]


def _weight_type(checkpoint: Checkpoint, layers: tuple[ExpertLayerSource, ...]) -> WeightType:
    kinds: dict[str, str] = {}
    for layer in layers:
        for expert in layer.experts:
            for _, ref in expert.matrices:
                kinds[checkpoint.info(ref.key)[0]] = ref.key
    if len(kinds) != 1:
        found = "; ".join(f"{checkpoint.place(key)} is {dtype}" for dtype, key in sorted(kinds.items()))
        raise UnsupportedModelError(
            f"experts have {len(kinds)} different types: {found}",
            hint="take a version of the model whose experts all have one type",
        )
    ((dtype, key),) = kinds.items()
    if dtype not in _WEIGHT_TYPES:
        raise _unreadable(checkpoint, key, dtype, "an expert", _WEIGHT_TYPES)
    return _WEIGHT_TYPES[dtype]


def _unreadable(
    checkpoint: Checkpoint, key: str, dtype: str, kind: str, readable: Iterable[str]
) -> UnsupportedModelError:
    """The error for a tensor whose element type is not read."""
    place = checkpoint.place(key)
    if dtype.startswith("F8_"):
        return UnsupportedModelError(
            f"{place}, of {kind}, is {dtype}, and {checkpoint.path / 'config.json'} has no "
            "quantization_config that says how it is scaled",
            hint="take config.json and tensors from the same repository",
        )
    return UnsupportedModelError(
        f"{place}, of {kind}, has type {dtype}; moechat reads {', '.join(readable)}",
        hint="use the model's bf16 or fp16 checkpoint; moechat quantises it itself",
    )


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sort key by dotted parts, numbers by value, so that expert 10 follows expert 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]
