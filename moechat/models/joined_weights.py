"""Weights that GGUF files hold in two tensors and transformers in one, as rules for loading.

Both parts stay separate tensors in stores, so that they can come from different files of a split model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter


class _Join(ConversionOps):
    """Makes one tensor of those of all source patterns, in their order.

    Attributes:
        by_rows: Rows stay whole, so that encoded ones can be joined too.
    """

    by_rows = False

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See :class:`ConversionOps`."""
        parts = []
        for pattern in source_patterns:
            if pattern not in input_dict:
                raise ValueError(f"there is no tensor like {pattern!r}")
            found = input_dict[pattern]
            parts.append(found[0] if isinstance(found, list) else found)
        return {target_patterns[0]: self._joined(parts, kwargs["config"].get_text_config())}

    def _joined(self, parts: list[torch.Tensor], config: Any) -> torch.Tensor:
        raise NotImplementedError


class JoinLatentHeads(_Join):
    """``kv_b_proj`` of ``[heads, latent, key]`` and ``[heads, value, latent]``."""

    def _joined(self, parts: list[torch.Tensor], config: Any) -> torch.Tensor:
        keys, values = parts
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


class JoinKeyHeads(_Join):
    """``in_proj_qkvz`` of all queries, keys and values, and all gates: by heads of keys."""

    by_rows = True

    def _joined(self, parts: list[torch.Tensor], config: Any) -> torch.Tensor:
        mixed, gates = parts
        heads, size = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        pieces = [*torch.split(mixed, [heads * size, heads * size, values]), gates]
        return torch.cat([piece.reshape(heads, -1, mixed.shape[1]) for piece in pieces], dim=1).flatten(0, 1)


class JoinRows(_Join):
    """The rows of both tensors, one after the other."""

    by_rows = True

    def _joined(self, parts: list[torch.Tensor], config: Any) -> torch.Tensor:
        return torch.cat(parts)


def joining_rules(parameters: Iterable[str]) -> list[WeightConverter]:
    """Rules to apply besides those of transformers.

    Args:
        parameters: Names of the model's. Rules for others are left out: families with parameters named like a
            source of a rule (Qwen3.5) would lose them.
    """
    rules = [
        WeightConverter(
            ["self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"],
            "self_attn.kv_b_proj.weight",
            [JoinLatentHeads()],
        ),
        WeightConverter(
            ["linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"],
            "linear_attn.in_proj_qkvz.weight",
            [JoinKeyHeads()],
        ),
        WeightConverter(
            ["shared_mlp.gate_linear.weight", "shared_mlp.up_linear.weight"],
            "shared_mlp.input_linear.weight",
            [JoinRows()],
        ),
    ]
    names = tuple(parameters)
    return [rule for rule in rules if any(name.endswith(rule.target_patterns[0]) for name in names)]


def joins(rule: WeightConverter | None) -> bool:
    """Whether a rule is one of :func:`joining_rules`."""
    return rule is not None and any(isinstance(operation, _Join) for operation in rule.operations)


def joins_rows(rule: WeightConverter | None) -> bool:
    """Whether a rule joins tensors by whole rows."""
    operations = [] if rule is None else rule.operations
    return bool(operations) and all(isinstance(each, _Join) and each.by_rows for each in operations)
