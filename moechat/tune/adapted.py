"""The model in training: adapters on the experts, trained routers, and the losses of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moechat.models.skeleton import ExpertsModule
from moechat.tune.batches import Batch
from moechat.tune.losses import cache_loss, chosen_mask, rank_loss, straight_through
from moechat.tune.router_taps import RouterTaps
from moechat.tune.settings import TuneSettings


@dataclass(frozen=True)
class RoutedPass:
    """What a pass without gradient gives.

    Attributes:
        nll: Sum of the negative log-likelihood over trained tokens, of each sequence, float32 ``[B]``.
        probabilities: Of the routers, float32 ``[layers, B, T, experts]``.
        chosen: Experts, int64 ``[layers, B, T, K]``.
    """

    nll: torch.Tensor
    probabilities: torch.Tensor
    chosen: torch.Tensor


class AdaptedModel(nn.Module):
    """A model whose routers and expert adapters are trained; everything else stays as it is.

    Attributes:
        taps: The routers.
    """

    def __init__(self, model: Any, entries: Sequence[ExpertsModule], settings: TuneSettings) -> None:
        """Add adapters to a model, which is changed in place.

        Args:
            model: A transformers model with its weights.
            entries: Its expert layers.
            settings: See there.

        Raises:
            UnsupportedModelError: See :class:`RouterTaps`.
        """
        super().__init__()
        from peft import LoraConfig, get_peft_model

        model.config.use_cache = False
        self.taps = RouterTaps(model, entries)
        self._settings = settings
        self._capacity = settings.capacity_of(self.taps.experts)
        torch.manual_seed(settings.seed)
        config = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
            target_modules=[],
            target_parameters=[
                name
                for entry in entries
                for name in (f"{entry.name}.{entry.inputs_name}", f"{entry.name}.down_proj")
            ],
        )
        with warnings.catch_warnings():
            # peft asks transformers under a name that is about to go.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
            self.model: Any = get_peft_model(model, config)
        if not settings.tune_gate:
            self._hold_gates(entries)
        self._base_routers: list[torch.Tensor] = []
        for router in self.taps.routers:
            for parameter in router.parameters:
                self._base_routers.append(parameter.detach().clone())
                # Steps of 1e-5 would vanish in 16 bits.
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()

    def _hold_gates(self, entries: Sequence[ExpertsModule]) -> None:
        """Keep the gate's half of fused gate and up projections: its rows of the second factor stay 0."""
        by_name = {f"{entry.name}.": entry for entry in entries if entry.gate.gated}
        for name, module in self.model.named_modules():
            if getattr(module, "parameter_name", None) != "gate_up_proj":
                continue
            entry = next(e for prefix, e in by_name.items() if prefix in f"{name}.")
            rows = torch.zeros(2 * entry.intermediate_size, 1)
            rows[slice(1, None, 2) if entry.interleaved else slice(entry.intermediate_size, None)] = 1.0
            weight = module.lora_B["default"].weight
            assert weight.shape[0] == len(rows)
            weight.register_hook(lambda grad, rows=rows: grad * rows.to(grad))

    def trained(self) -> dict[str, nn.Parameter]:
        """All trained parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Compute the block with the base model: without adapters, with the routers as they were."""
        live = [parameter for router in self.taps.routers for parameter in router.parameters]
        kept = [parameter.data for parameter in live]
        for parameter, base in zip(live, self._base_routers, strict=True):
            parameter.data = base.to(parameter.device)
        try:
            with self.model.disable_adapter():
                yield
        finally:
            for parameter, data in zip(live, kept, strict=True):
                parameter.data = data

    def forward(
        self, ids: torch.Tensor, trained: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three parts of the loss.

        Args:
            ids: Token ids, int64 ``[B, T]``, padded at the end.
            trained: Whether each token is predicted in the loss, bool ``[B, T]``.
            tokens: Of each sequence, int64 ``[B]``.

        Returns:
            The sum of the negative log-likelihood over trained tokens, and the sums over sequences of the
            cache and the rank loss. Each is a scalar in float32.
        """
        settings, rows = self._settings, len(ids)
        mask = _mask(ids, tokens)
        base = None
        if settings.rank_weight and settings.base_router == "model":
            with torch.no_grad(), self.base_model(), self.taps.recording() as before:
                self.model(input_ids=ids, attention_mask=mask, use_cache=False)
                base = self.taps.probabilities(before, rows)
        with self.taps.recording() as routing:
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        nll = _nll(logits, ids, trained).sum()
        none = nll.new_zeros(())
        if not (settings.cache_weight or settings.rank_weight):
            return nll, none, none
        tuned = self.taps.probabilities(routing, rows)
        cache, rank = none, none
        if settings.cache_weight:
            index = self.taps.chosen(routing, rows)
            requests = straight_through(chosen_mask(index, self.taps.experts), tuned)
            cache = cache_loss(
                requests,
                tokens,
                gamma=settings.gamma,
                capacity=self._capacity,
                top_k=index.shape[-1],
                uniform=settings.initial == "uniform",
            ).sum()
        if settings.rank_weight:
            if base is None:
                with torch.no_grad(), self.base_model():
                    base = self.taps.probabilities(routing, rows)
            rank = rank_loss(tuned, base, tokens, margin=settings.margin).sum()
        return nll, cache, rank

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's embeddings of tokens, ``[n, embedding size]``; not trained."""
        table = self.model.get_input_embeddings()
        return table(ids.to(table.weight.device)).float()  # type: ignore[no-any-return]

    def merge(self, dtype: torch.dtype) -> Any:
        """Merge the adapters into the experts; afterwards this object only runs passes.

        Args:
            dtype: Weights are rounded as if they had this type, so that what is measured is what is saved.

        Returns:
            The transformers model.
        """
        merged = self.model.merge_and_unload()
        with torch.no_grad():
            for parameter in merged.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype).to(_computing(merged, parameter))
        self.model = merged
        return merged


def _computing(model: Any, parameter: torch.Tensor) -> torch.dtype:
    """Type that a merged weight is computed in: that of the embeddings."""
    weight = model.get_input_embeddings().weight
    return weight.dtype if isinstance(weight, torch.Tensor) else parameter.dtype


@torch.no_grad()
def routed_pass(model: Any, taps: RouterTaps, batch: Batch, device: torch.device) -> RoutedPass:
    """Run a model over a batch without gradient.

    Args:
        model: A transformers model, with or without adapters.
        taps: Its routers.
        batch: The sequences.
        device: Where the model is.
    """
    batch = batch.to(device)
    with taps.recording() as routing:
        mask = _mask(batch.ids, batch.tokens)
        logits = model(input_ids=batch.ids, attention_mask=mask, use_cache=False).logits
    rows = len(batch.ids)
    return RoutedPass(
        _nll(logits, batch.ids, batch.trained).sum(1),
        taps.probabilities(routing, rows),
        taps.chosen(routing, rows),
    )


def _mask(ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return (torch.arange(ids.shape[1], device=ids.device) < tokens[:, None]).long()


def _nll(logits: torch.Tensor, ids: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the trained tokens, 0 for others, float32 ``[B, T - 1]``."""
    target = torch.where(trained[:, 1:], ids[:, 1:], -100)
    flat = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), target.flatten(), ignore_index=-100, reduction="none"
    )
    return flat.reshape(target.shape)
