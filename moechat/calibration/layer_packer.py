"""Packs the experts of one layer with feedback from their inputs and activations on the calibration text."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moechat import _native
from moechat.calibration.moments import Feedback, feedback, moments
from moechat.geometry import ExpertGeometry
from moechat.models.gates import apply_gate
from moechat.store.quantizer import Biases, Matrices

# What is known before an expert's own tokens counts as much as this many of them: the inputs of all tokens of
# the layer for gate and up; for down, independent neurons of the sizes that the weights of gate and up alone
# suggest. On the demo model, whose experts see 1,000 tokens each, divergence was 6.6 millinats with 16, 6.2
# with 64, and 6.0 with 128 and 256.
_PRIOR_TOKENS = 128.0


class LayerPacker:
    """Packs the experts of one layer; experts that the router chose more often are measured better."""

    def __init__(
        self,
        geometry: ExpertGeometry,
        ordinal: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Take the inputs of the layer's experts.

        Args:
            geometry: Of the store.
            ordinal: Of the layer among those with experts, from 0.
            hidden: float32 ``[tokens, hidden]``.
            index: Chosen experts ``[tokens, k]``.
            weights: Their router weights ``[tokens, k]``.
        """
        self._geometry = geometry
        self._gate = geometry.gate_of(ordinal)
        self._hidden = hidden
        self._index = index
        self._weights = weights.float()
        self._of_any_token = moments(hidden) / len(hidden)

    def __call__(
        self, number: int, matrices: Matrices, biases: Biases | None, out: NDArray[np.uint8]
    ) -> None:
        """Pack expert ``number``; see :func:`moechat.store.quantizer.make_packer`."""
        tokens, slots = (self._index == number).nonzero(as_tuple=True)
        inputs = self._hidden[tokens]
        # An error in the output of a token counts as much as the router weighs it.
        shares = self._weights[tokens, slots].square()
        shares *= len(shares) / shares.sum().clamp(min=1e-30)
        gate = _tensor(matrices[0])
        up = None if matrices[1] is None else _tensor(matrices[1])
        of_inputs = feedback(
            moments(inputs, shares) + _PRIOR_TOKENS * self._of_any_token, self._geometry.hidden_size
        )
        of_neurons = self._neurons(inputs, shares, gate, up, biases)
        measured = (of_inputs.arrays, of_neurons.arrays)
        _native.pack_expert(self._geometry.layout, *matrices, biases, out, feedback=measured)

    def _neurons(
        self,
        inputs: torch.Tensor,
        shares: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor | None,
        biases: Biases | None,
    ) -> Feedback:
        """Feedback for the columns of down, for inputs ``[tokens, hidden]`` and shares ``[tokens]``."""
        projected = []
        for matrix, bias in zip((gate, up), (biases or (None, None))[:2], strict=True):
            if matrix is not None:
                rows = inputs @ matrix.T
                projected.append(rows if bias is None else rows + torch.from_numpy(bias))
        active = apply_gate(self._gate, *projected)
        found = moments(active, shares)
        diagonal = found.diagonal(dim1=1, dim2=2)
        prior = torch.zeros(diagonal.numel())
        prior[: len(gate)] = _expected_squares(gate, gate if up is None else up)
        total = float(diagonal.sum())
        scale = total / (len(inputs) * float(prior.sum())) if total > 0 else 1.0
        diagonal += _PRIOR_TOKENS * scale * prior.reshape(diagonal.shape)
        return feedback(found, len(gate))


def _expected_squares(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Expected squares of the neurons, from the weights alone; see ``neuron_importance`` in ``pack.cc``."""
    lengths = torch.linalg.vector_norm(gate, dim=1) * torch.linalg.vector_norm(up, dim=1)
    squares: torch.Tensor = lengths.square() + 2 * torch.linalg.vecdot(gate, up).square()
    return squares.clamp(min=1e-30)


def _tensor(matrix: NDArray[Any]) -> torch.Tensor:
    """A matrix of a checkpoint in float32."""
    with warnings.catch_warnings():
        # Mapped read-only; nothing writes through the tensor.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        if matrix.dtype == np.uint16:
            tensor = torch.from_numpy(matrix.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(matrix)
    # Always a copy: the results of products can depend on where their inputs lie.
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
