"""Runs a model once over a text, with the dense weights of one decoder layer in memory at a time.

The routed experts are left to the caller, who gets their inputs layer by layer. The pass ends after the
experts of the last layer, so the head is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from moechat.errors import CheckpointError
from moechat.models.checkpoint_mapping import Target, combine, map_keys
from moechat.models.dense import TensorSource, assign_weight, initialise_rest, read_tensor
from moechat.models.light_meta import light_meta
from moechat.models.quiet import without_warnings
from moechat.models.skeleton import Skeleton, build_skeleton

# Computes the experts of a layer: its ordinal, hidden states [tokens, hidden] in float32, top-k indices and
# weights [tokens, k]; returns [tokens, hidden].
ExpertsFunction = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Finished(Exception):  # noqa: N818 - no error
    """Ends the pass."""


class OnePass:
    """A model in float32, for one pass; see the module.

    Attributes:
        skeleton: The model; its dense weights are on the meta device unless its pass uses them.
    """

    def __init__(self, config: Any) -> None:
        """Build the model of a transformers configuration; no weight is read.

        Raises:
            UnsupportedModelError: The installed transformers cannot build it.
        """
        with without_warnings():
            self.skeleton: Skeleton = build_skeleton(config, torch.float32)
        self._of_layer: list[str] = []  # weights of the layer in memory

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return int(self.skeleton.model.get_input_embeddings().weight.shape[0])  # type: ignore[index]

    def run(
        self,
        source: TensorSource,
        keys: Iterable[str],
        ids: torch.Tensor,
        experts: ExpertsFunction,
        last: int | None = None,
    ) -> None:
        """Run the pass; call once.

        Args:
            source: The checkpoint. A tensor of a layer has to be readable when the experts of the layer
                before it have been computed, the others from the beginning. Those of layers behind the
                last one are not read.
            keys: Its dense tensors that the pass reads.
            ids: Token ids, int64 ``[texts, tokens]``.
            experts: Computes the experts of each layer in turn.
            last: Ordinal of the expert layer behind which the pass ends; ``None``: of all.

        Raises:
            CheckpointError: A tensor does not fit the model.
            Exception: What ``experts``, or the model, raises.
        """
        skeleton, model = self.skeleton, self.skeleton.model
        outside, layers = self._targets(keys)
        embeddings = {
            f"{name}.weight" for name, part in model.named_modules() if isinstance(part, nn.Embedding)
        }
        end = len(skeleton.experts) - 1 if last is None else last

        def compute(ordinal: int) -> Callable[..., torch.Tensor]:
            def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                flat = hidden.reshape(-1, hidden.shape[-1])
                chosen = index.reshape(len(flat), -1)
                out = experts(ordinal, flat.float(), chosen, weights.reshape(chosen.shape))
                if ordinal == end:
                    raise _Finished
                return out.reshape(hidden.shape).to(hidden.dtype)

            return forward

        with torch.inference_mode():
            for target in outside:
                self._load(source, target, embeddings)
            with light_meta():
                initialise_rest(skeleton)
            for ordinal, entry in enumerate(skeleton.experts):
                entry.module.forward = compute(ordinal)
            for name, part in model.named_modules():
                if f"{name}.weight" in embeddings:
                    # Rows are used as stored; a float32 copy of the table could be larger than the machine.
                    part.register_forward_hook(lambda _part, _args, rows: rows.float())
            self._load_while_running(source, layers)
            try:
                model(input_ids=ids, use_cache=False)
            except _Finished:
                return
            finally:
                self._drop_layer()
        raise CheckpointError("the model's pass ended before the experts of its last layer")

    def _targets(self, keys: Iterable[str]) -> tuple[list[Target], dict[int, list[Target]]]:
        """Weights outside the decoder layers, and those of each layer."""
        prefix = self.skeleton.layers_name + "."
        outside: list[Target] = []
        layers: dict[int, list[Target]] = {}
        for target in map_keys(self.skeleton, keys)[0].values():
            number = target.name.removeprefix(prefix).partition(".")[0]
            if target.name.startswith(prefix) and number.isdigit():
                layers.setdefault(int(number), []).append(target)
            else:
                outside.append(target)
        return outside, layers

    def _load(self, source: TensorSource, target: Target, kept: Iterable[str] = ()) -> list[str]:
        tensors = {key: read_tensor(source, key) for key in target.keys}
        combined = combine(target, tensors, self.skeleton.model)
        for name, tensor in combined.items():
            # Always a copy: products with a tensor where it lies in a file can depend on its address.
            own = tensor if name in kept else tensor.clone()
            assign_weight(self.skeleton, name, own, keep=name in kept)
        del tensors
        source.release(target.keys)
        return list(combined)

    def _load_while_running(self, source: TensorSource, layers: dict[int, list[Target]]) -> None:
        """Load each decoder layer when it is called, and drop its weights when it has returned."""
        parts = self.skeleton.model.get_submodule(self.skeleton.layers_name)
        for number, part in enumerate(parts.children()):

            def load(_part: nn.Module, _args: object, number: int = number) -> None:
                for target in layers.get(number, ()):
                    self._of_layer.extend(self._load(source, target))

            part.register_forward_pre_hook(load)
            part.register_forward_hook(lambda _part, _args, _out: self._drop_layer())

    def _drop_layer(self) -> None:
        for name in self._of_layer:
            parent, _, leaf = name.rpartition(".")
            owner = self.skeleton.model.get_submodule(parent)
            if leaf in owner._parameters:
                meta = nn.Parameter(self.skeleton.state[name], requires_grad=False)
                owner._parameters[leaf] = meta
        self._of_layer.clear()
