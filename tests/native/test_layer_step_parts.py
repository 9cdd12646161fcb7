"""The native step of a layer against its parts, each called separately."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moechat import _native

HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, CHOSEN, CAPACITY = 96, 6, 2, 24, 10, 3, 40
INNER = 32
Floats = npt.NDArray[np.float32]


def at(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


class Layer:
    """Weights of one layer; ``kind`` is the format of its matrices."""

    def __init__(
        self, kind: str, head_norms: bool, seed: int = 3, *, gated: bool = False, shared: bool = False
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.kept: list[Any] = []
        self.gated = gated
        sizes = [(HEADS * (2 if gated else 1), HIDDEN), (KV_HEADS, HIDDEN), (KV_HEADS, HIDDEN)]
        shapes = [(heads * DIM, cols) for heads, cols in sizes] + [(HIDDEN, HEADS * DIM)]
        self.products, self.multiply = zip(*(self.product(kind, *shape) for shape in shapes), strict=True)
        self.norms = [self.norm(HIDDEN), self.norm(HIDDEN)]
        self.head_norms = (self.norm(DIM), self.norm(DIM)) if head_norms else None
        self.sinks = self.drawn(HEADS)
        self.attention = _native.Attention(
            "float32", KV_HEADS, HEADS // KV_HEADS, DIM, 0, DIM, 0.2, at(self.sinks)
        )
        self.router, self.bias = self.drawn(EXPERTS, HIDDEN), self.drawn(EXPERTS)
        self.routing = _native.Routing(
            "float32", at(self.router), at(self.bias), EXPERTS, HIDDEN, "softmax", CHOSEN, 0, True, 1.0,
            "float32", "float32",
        )  # fmt: skip
        self.angles = (self.drawn(DIM), self.drawn(DIM))
        self.shared = self.gate = None
        if shared:
            gate, up, down = (
                self.product(kind, *shape)[0] for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
            )
            self.shared = (_native.Mlp("float32", gate, up, down),)
            self.gate = self.product("rows16", 1, HIDDEN)

    def step(self, *, routes: bool) -> _native.LayerStep:
        return _native.LayerStep(
            "float32", self.norms[0], *self.products, self.gated, self.head_norms, self.attention, DIM, DIM,
            self.feed(routes=routes),
        )  # fmt: skip

    def feed(self, *, routes: bool) -> _native.FeedStep:
        shared, gate = (None, None) if self.shared is None else (self.shared[0], self.gate[0])
        routing = self.routing if routes else None
        return _native.FeedStep(self.norms[1], routing, *((shared, gate) if routes else (None, None)))

    def drawn(self, *sizes: int) -> Floats:
        return (self.rng.standard_normal(sizes) * 0.5).astype(np.float32)

    def norm(self, columns: int) -> _native.RmsNorm:
        weight = self.drawn(columns)
        self.kept.append(weight)
        return _native.RmsNorm("float32", at(weight), columns, 1e-5, 0.0, True)

    def product(self, kind: str, rows: int, cols: int) -> Any:
        weights, bias = self.drawn(rows, cols), self.drawn(rows)
        if kind == "rows16":
            words = (weights.view(np.uint32) >> 16).astype(np.uint16)

            def multiply(x: Floats) -> Floats:
                out = np.empty((1, rows), np.float32)
                _native.rows16_forward(words, False, x, bias, out)
                return out

            return _native.rows16_product(words, False, bias), multiply
        layout = _native.LinearLayout(rows, cols, 4)
        data = _native.pack_linear(layout, weights)

        def packed(x: Floats) -> Floats:
            out = np.empty((1, rows), np.float32)
            _native.linear_forward(layout, data, x, bias, out, activation_bits=16)
            return out

        return _native.packed_product(layout, data, bias, 16), packed

    def normalised(self, norm: _native.RmsNorm, x: Floats, columns: int) -> Floats:
        out = np.empty_like(x)
        norm(at(x), at(out), x.size // columns)
        return out

    def by_parts(self, hidden: Floats, keys: Floats, values: Floats, held: int) -> tuple[Any, ...]:
        """Residual, input of the experts, chosen experts and weights; keys and values are appended."""
        x = self.normalised(self.norms[0], hidden, HIDDEN)
        query, key, value = (multiply(x) for multiply in self.multiply[:3])
        if self.gated:
            both = query.reshape(HEADS, 2, DIM)
            query, gates = (np.ascontiguousarray(both[:, half]).reshape(1, -1) for half in (0, 1))
        if self.head_norms is not None:
            query = self.normalised(self.head_norms[0], query, DIM)
            key = self.normalised(self.head_norms[1], key, DIM)
        turned = []
        for rows, heads in ((query, HEADS), (key, KV_HEADS)):
            out = np.empty_like(rows)
            cos, sin = self.angles
            _native.rotate("float32", at(rows), 0, DIM, at(out), 1, heads, DIM, at(cos), at(sin), DIM, DIM)
            turned.append(out)
        keys[:, held], values[:, held] = turned[1].reshape(KV_HEADS, DIM), value.reshape(KV_HEADS, DIM)
        mixed = np.empty((1, HEADS * DIM), np.float32)
        head = CAPACITY * DIM
        self.attention(
            at(turned[0]), DIM, DIM, 1, at(keys), head, DIM, 0, 0, at(values), head, DIM, held + 1, 0, 0,
            at(mixed),
        )  # fmt: skip
        if self.gated:
            mixed *= sigmoid(gates)
        residual = hidden + self.multiply[3](mixed)
        x = self.normalised(self.norms[1], residual, HIDDEN)
        logits = np.empty((1, EXPERTS), np.float32)
        index, weights = np.empty((1, CHOSEN), np.int64), np.empty((1, CHOSEN), np.float32)
        self.routing(at(x), 1, at(logits), at(index), at(weights))
        return residual, x, index, weights


def sigmoid(x: Floats) -> Floats:
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


def caches() -> tuple[Floats, Floats]:
    rng = np.random.default_rng(8)
    return tuple(rng.standard_normal((KV_HEADS, CAPACITY, DIM)).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "head_norms"), list(itertools.product(["rows16", "packed"], [True, False])))
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_is_its_parts_one_after_the_other(kind: str, head_norms: bool, threads: int) -> None:
    before = _native.num_threads()
    _native.set_num_threads(threads)
    try:
        layer = Layer(kind, head_norms)
        step, short = layer.step(routes=True), layer.step(routes=False)
        ours, theirs, third = caches(), caches(), caches()
        for held in range(CAPACITY - 3, CAPACITY):
            hidden = layer.drawn(1, HIDDEN)
            wanted = layer.by_parts(hidden, *theirs, held)
            residual, x = np.empty_like(hidden), np.empty_like(hidden)
            index, weights = np.empty((1, CHOSEN), np.int64), np.empty((1, CHOSEN), np.float32)
            head = CAPACITY * DIM
            places = [
                (
                    at(hidden),
                    *map(at, layer.angles),
                    [(at(kept[0]), head, at(kept[1]), head, held, False)],
                    at(residual),
                )
                for kept in (ours, third)
            ]
            step.route(*places[0], at(x), at(index), at(weights), 0)
            for found, part in zip((residual, x, index, weights), wanted, strict=True):
                np.testing.assert_array_equal(found, part)
            normed = np.empty_like(hidden)
            short.normalise(*places[1], at(normed))
            np.testing.assert_array_equal(normed, x)
            for cache in (ours, third):
                for found, part in zip(cache, theirs, strict=True):
                    np.testing.assert_array_equal(found, part)
            layer.feed(routes=True).add(at(x), 0, at(residual), 1)
            np.testing.assert_array_equal(residual, wanted[0] + wanted[1])
    finally:
        _native.set_num_threads(before)


@pytest.mark.parametrize("kind", ["rows16", "packed"])
def test_gates_and_a_shared_expert_are_their_parts(kind: str) -> None:
    layer = Layer(kind, True, gated=True, shared=True)
    assert layer.shared is not None
    assert layer.gate is not None
    step, ours, theirs = layer.step(routes=True), caches(), caches()
    for held in range(3):
        hidden = layer.drawn(1, HIDDEN)
        wanted = layer.by_parts(hidden, *theirs, held)
        residual, x, shared = (np.empty_like(hidden) for _ in range(3))
        index, weights = np.empty((1, CHOSEN), np.int64), np.empty((1, CHOSEN), np.float32)
        head = CAPACITY * DIM
        places = [(at(ours[0]), head, at(ours[1]), head, held, False)]
        step.route(
            *(at(hidden), *map(at, layer.angles), places, at(residual)),
            *(at(x), at(index), at(weights), at(shared)),
        )
        for found, part in zip((residual, x, weights), (*wanted[:2], wanted[3]), strict=True):
            np.testing.assert_allclose(found, part, rtol=3e-4, atol=1e-4)  # inputs are quantised
        np.testing.assert_array_equal(index, wanted[2])
        alone = np.empty_like(hidden)
        layer.shared[0](at(x), 1, at(alone))
        np.testing.assert_allclose(shared, alone * sigmoid(layer.gate[1](x)), rtol=1e-6, atol=1e-7)
        for found, part in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(found, part)
        before = residual.copy()
        layer.feed(routes=True).add(at(x), at(shared), at(residual), 1)
        np.testing.assert_array_equal(residual, before + (x + shared))


def test_tokens_of_several_caches_have_the_bits_of_each_alone() -> None:
    layer = Layer("packed", True, gated=True, shared=True)
    step, count = layer.step(routes=True), 5
    hidden, head = layer.drawn(count, HIDDEN), CAPACITY * DIM
    angles = [layer.drawn(count, DIM) for _ in range(2)]
    results = []
    for groups in ([range(count)], [range(row, row + 1) for row in range(count)]):
        kept = [caches() for _ in range(count)]
        made = [np.empty((count, HIDDEN), np.float32) for _ in range(3)]
        index, weights = np.empty((count, CHOSEN), np.int64), np.empty((count, CHOSEN), np.float32)
        for rows in groups:
            first = rows[0]
            places = [(at(kept[row][0]), head, at(kept[row][1]), head, row, False) for row in rows]
            residual, x, shared = (at(part[first:]) for part in made)
            given = at(hidden[first:]), *(at(part[first:]) for part in angles), places, residual
            step.route(*given, x, at(index[first:]), at(weights[first:]), shared)
        results.append([*made, index, weights, *(part for pair in kept for part in pair)])
    for together, alone in zip(*results, strict=True):
        np.testing.assert_array_equal(together, alone)


def test_a_shared_expert_of_another_size_is_refused() -> None:
    layer = Layer("rows16", False, shared=True)
    assert layer.shared is not None
    product = layer.product("rows16", 2, HIDDEN)[0]
    for routing, shared, gate, why in (
        (None, layer.shared[0], None, "without a router"),
        (layer.routing, layer.shared[0], product, "gate of the shared expert"),
        (layer.routing, narrow_mlp(layer), None, "shared expert and hidden size"),
    ):
        with pytest.raises(ValueError, match=why):
            _native.FeedStep(layer.norms[1], routing, shared, gate)


def narrow_mlp(layer: Layer) -> _native.Mlp:
    shapes = ((INNER, HIDDEN // 2), (INNER, HIDDEN // 2), (HIDDEN, INNER))
    return _native.Mlp("float32", *(layer.product("rows16", *shape)[0] for shape in shapes))


def test_the_wrong_half_of_a_step_is_refused() -> None:
    layer = Layer("rows16", False)
    place = (0, 0, 0, 0, 0, False)
    with pytest.raises(ValueError, match="this step has no router"):
        layer.step(routes=False).route(0, 0, 0, [place], 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="this step has a router"):
        layer.step(routes=True).normalise(0, 0, 0, [place], 0, 0)


def test_a_step_of_no_tokens_or_too_many_is_refused() -> None:
    layer = Layer("rows16", False)
    place = (0, 0, 0, 0, 0, False)
    for count in (0, _native.MOST_STEP_TOKENS + 1):
        with pytest.raises(ValueError, match=f"1 to {_native.MOST_STEP_TOKENS} tokens, not {count}"):
            layer.step(routes=False).normalise(0, 0, 0, [place] * count, 0, 0)
    with pytest.raises(ValueError, match="held is negative"):
        layer.step(routes=False).normalise(0, 0, 0, [(0, 0, 0, 0, -1, False)], 0, 0)
