"""Feedback from second moments: the factorisation, and what it saves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moechat import _native
from moechat.calibration import moments as module
from moechat.calibration.moments import block_width, feedback, moments
from moechat.geometry import ExpertGeometry, WeightType


def correlated(tokens: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Values of which a few directions explain most."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(tokens, 8, generator=generator) @ torch.randn(8, cols, generator=generator)
    return few + 0.3 * torch.randn(tokens, cols, generator=generator)


@pytest.mark.parametrize(
    ("cols", "width"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (1025, 576), (4096, 1024)]
)
def test_blocks_are_equally_wide_and_whole_groups(cols: int, width: int) -> None:
    assert block_width(cols) == width


def test_moments_are_sums_of_products_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_COLUMNS", 64)
    values, shares = correlated(50, 100), torch.rand(50)
    found = moments(values, shares)
    assert found.shape == (2, 64, 64)
    wanted = (values * shares[:, None]).T @ values
    torch.testing.assert_close(found[0], wanted[:64, :64], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found[1, :36, :36], wanted[64:, 64:], rtol=1e-4, atol=1e-3)
    assert not found[1, 36:].any()
    assert not found[1, :, 36:].any()
    torch.testing.assert_close(moments(values), moments(values, torch.ones(50)))


def test_importances_and_factors_are_those_of_the_factorisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DAMPING", 0.0)
    values = correlated(4000, 64)
    found = feedback(moments(values), 64)
    inverse = torch.from_numpy(found.factors[0]).double()
    assert torch.equal(inverse.diagonal(), torch.ones(64, dtype=torch.float64))
    assert torch.equal(inverse, inverse.triu())
    unit = torch.linalg.inv(inverse)
    product = unit @ torch.diag(torch.from_numpy(found.importance).double()) @ unit.T
    moment = (values.T @ values).double()
    torch.testing.assert_close(product, moment / moment.diagonal().mean(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_without_usable_moments_columns_are_alike_and_independent(value: float) -> None:
    found = feedback(torch.full((2, 64, 64), value), 100)
    assert np.array_equal(found.importance, np.ones(100, np.float32))
    assert np.array_equal(found.factors, np.broadcast_to(np.eye(64, dtype=np.float32), (2, 64, 64)))


def test_moments_of_fewer_tokens_than_columns_are_usable() -> None:
    found = feedback(moments(correlated(3, 640)), 640)
    assert np.isfinite(found.factors).all()
    assert (found.importance > 0).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("hidden", "neurons"), [(128, 192), (100, 80)])
def test_measured_inputs_lessen_the_error_of_products(bits: int, hidden: int, neurons: int) -> None:
    geometry = ExpertGeometry(
        hidden_size=hidden,
        intermediate_size=neurons,
        num_experts=1,
        bits=bits,
        weight_type=WeightType.BF16,
    )
    generator = np.random.default_rng(0)
    gate, up = (generator.standard_normal((neurons, hidden), np.float32) for _ in range(2))
    down = generator.standard_normal((hidden, neurons), np.float32)
    inputs, active = correlated(500, hidden), correlated(500, neurons, seed=1)
    given = (feedback(moments(inputs), hidden).arrays, feedback(moments(active), neurons).arrays)

    def errors(given: object) -> list[float]:
        out = np.empty((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
        _native.pack_expert(geometry.layout, gate, up, down, None, out, feedback=given)  # type: ignore[arg-type]
        packed = _native.unpack_expert(geometry.layout, out)[:3]
        return [
            float(np.square((p - w) @ x.numpy().T).sum())
            for p, w, x in zip(packed, (gate, up, down), (inputs, inputs, active), strict=True)
        ]

    for measured, plain in zip(errors(given), errors(None), strict=True):
        assert measured < 0.7 * plain
