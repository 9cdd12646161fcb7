"""Mixers of the gated delta rule, and states for them."""

from __future__ import annotations

import torch
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from moechat.models.decode.gated_delta import GatedDelta, recognise_gated_deltas

_KINDS = {
    # What the projections give for a head of keys is in one place, or in several.
    "together": (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
    "apart": (Qwen3_5MoeTextConfig, Qwen3_5MoeGatedDeltaNet),
}


def mixer_of(
    layout: str,
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    taps: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    hidden: int = 32,
) -> GatedDelta:
    """A mixer with random weights, as it is recognised."""
    config_class, mixer_class = _KINDS[layout]
    config = config_class(
        hidden_size=hidden,
        num_hidden_layers=4,
        linear_num_key_heads=k_heads,
        linear_num_value_heads=v_heads,
        linear_key_head_dim=k_dim,
        linear_value_head_dim=v_dim,
        linear_conv_kernel_dim=taps,
    )
    torch.manual_seed(7)
    mixer = mixer_class(config, 1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
        mixer.conv1d.weight.normal_()
    mixer = mixer.to(dtype).eval()
    found = recognise_gated_deltas(mixer)
    assert list(found) == [mixer]
    mixer.to(device)
    return found[mixer]


def drawn_states(
    delta: GatedDelta, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """States as of :meth:`GatedDelta.states_of`."""
    generator = torch.Generator().manual_seed(11)
    before = torch.randn((1, delta.channels, delta.taps), generator=generator).to(dtype)
    state = torch.randn((1, delta.v_heads, delta.k_dim, delta.v_dim), generator=generator)
    return before.to(device), state.to(device)
