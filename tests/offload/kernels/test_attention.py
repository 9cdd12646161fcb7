"""Attention of decoded tokens, in Triton's interpreter on machines without a GPU, against float64.

The interpreter shows what they compute, not that they compile: for that see ``test_triton_compiles.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernel_support import DEVICE

from moechat.models.packed_rows import ROW_TYPE, pack, row_bytes, unpack
from moechat.offload.kernels import attention
from moechat.offload.kernels.attention import AttentionShape, CacheAttention, Launch
from moechat.offload.kernels.device_rows import DeviceRows

TYPES = [torch.float32, torch.float16, torch.bfloat16]
# Relative to the largest result. In 16 bits the weights of the keys are rounded, and the result once.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
F32 = torch.float32
# Mixtral, Qwen3-30B-A3B, gpt-oss, DeepSeek with expanded heads: all heads of one or two heads of keys.
MIXTRAL = AttentionShape(2, 4, 128, 128, F32)
QWEN3 = AttentionShape(1, 8, 128, 128, F32)
GPT_OSS = AttentionShape(2, 8, 64, 64, F32, window=128)
DEEPSEEK = AttentionShape(2, 1, 192, 128, F32)
ODD = AttentionShape(2, 3, 80, 20, F32)


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for each program. So a split has several tiles, too."""
    monkeypatch.setattr(attention, "PROGRAMS", 8)
    monkeypatch.setattr(attention, "TILE_KEYS", (16, 32))


def expected(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``[tokens, heads, value_dim]`` in float64; the last keys are those of the query tokens."""
    heads, tokens, _ = query.shape
    group, count = heads // len(keys), keys.shape[1]
    keys, values = (states.double().repeat_interleave(group, 0) for states in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key, token = torch.arange(count)[None, :], torch.arange(count - tokens, count)[:, None]
    seen = (key <= token) & (key > token - (window or count))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, tokens, 1)], -1)
    weights = scores.softmax(-1)[..., :count]
    return (weights @ values).transpose(0, 1)


@dataclasses.dataclass
class Case:
    """A cache with some tokens, all other memory poisoned, and the states of new tokens."""

    shape: AttentionShape
    before: int
    tokens: int = 1
    start: int = 0  # slot of the first token that is kept
    sinks: torch.Tensor | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        generator = torch.Generator().manual_seed(self.before)

        def drawn(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(shape.dtype)

        count, heads = self.before + self.tokens, shape.kv_heads
        self.keys, self.values = drawn(heads, count, shape.key_dim), drawn(heads, count, shape.value_dim)
        # As families give them: heads and tokens of a view in another order.
        query = drawn(1, self.tokens, heads * shape.group, shape.key_dim + shape.tail_dim) * 2
        self.query = query.transpose(1, 2)
        self.tails = drawn(1, count, shape.tail_dim) if shape.tail_dim else None

    def reserved(self, states: torch.Tensor) -> torch.Tensor:
        """Memory with the states of the tokens before."""
        held = min(self.before, self.shape.window - 1) if self.shape.window else self.before
        slots = self.start + self.before + self.tokens + 3
        states = states[:, : self.before].narrow(1, self.before - held, held)
        heads, _, dim = states.shape
        if self.shape.packed:
            # 255 stands for NaN in the byte of a group.
            memory = torch.full((1, heads, slots, row_bytes(dim)), 255, dtype=ROW_TYPE)
            if held:
                pack(states[None], memory.narrow(2, self.start, held))
        else:
            memory = torch.full((1, heads, slots, dim), torch.nan, dtype=states.dtype)
            memory[0, :, self.start : self.start + held] = states
        return memory.to(DEVICE)

    def run(self) -> torch.Tensor:
        """``[tokens, heads, value_dim]``, on the CPU."""
        shape, new = self.shape, slice(self.before, None)
        held = min(self.before, shape.window - 1) if shape.window else self.before
        # Other layers of the cache have other slots.
        numbers = torch.tensor([self.before, 999, self.start + held, 777]).to(DEVICE)
        keys, values = self.reserved(self.keys), self.reserved(self.values)
        tails = None
        states = self.keys[None, :, new].to(DEVICE), self.values[None, :, new].to(DEVICE)
        if self.tails is not None:
            tails = values = self.reserved(self.tails)
            states = states[0], self.tails[None, :, new].to(DEVICE)
        kernels = CacheAttention(shape)
        attention.append(*states, keys, values, numbers, 1)
        found = kernels.attend(
            self.query.to(DEVICE),
            keys,
            keys if shape.shared else values,
            numbers,
            1,
            scaling=self.scaling,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.to(DEVICE),
            tails=tails,
        )
        return found[0].cpu()

    @property
    def scaling(self) -> float:
        return float((self.shape.key_dim + self.shape.tail_dim) ** -0.5)

    def seen(self, states: torch.Tensor) -> torch.Tensor:
        """The states as the cache holds them."""
        if not self.shape.packed:
            return states
        rows = torch.empty((1, *states.shape[:-1], row_bytes(states.shape[-1])), dtype=ROW_TYPE)
        pack(states[None], rows)
        return unpack(rows, states.shape[-1], states.dtype)[0]

    def error(self) -> float:
        """Largest distance from float64, relative to the largest result."""
        keys = self.seen(self.keys)
        values = keys if self.shape.shared else self.seen(self.values)
        if self.tails is not None:
            keys = torch.cat([keys, self.seen(self.tails).expand(len(keys), -1, -1)], -1)
        wanted = expected(
            self.query[0],
            keys,
            values,
            scaling=self.scaling,
            window=self.shape.window,
            sinks=self.sinks,
            softcap=self.softcap,
        )
        return float((self.run().double() - wanted).abs().max() / wanted.abs().max())


def variant(shape: AttentionShape, **changes: Any) -> AttentionShape:
    return dataclasses.replace(shape, **changes)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape", [MIXTRAL, QWEN3, DEEPSEEK, ODD], ids=["mixtral", "qwen3", "deepseek", "odd"]
)
def test_heads_of_every_shape_match_float64(shape: AttentionShape, dtype: torch.dtype) -> None:
    assert Case(variant(shape, dtype=dtype), 150).error() < TOLERANCE[dtype]


@pytest.mark.parametrize("before", [0, 1, 15, 16, 31, 32, 63, 64, 127, 128, 129, 200])
def test_contexts_end_anywhere_in_a_tile_or_a_split(before: int) -> None:
    # Tiles of 16 keys in at most four splits: from 64 keys on a split has two tiles.
    shape = variant(ODD, key_dim=32, group=2)
    assert Launch.of(shape, 1, tensor_cores=True).splits == 4
    assert Launch.of(shape, 1, tensor_cores=True).block == 16
    assert Case(shape, before).error() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("before", [3, 126, 127, 128, 300])
def test_a_window_with_sinks_anywhere_in_its_memory_matches_float64(before: int, dtype: torch.dtype) -> None:
    shape = variant(GPT_OSS, kv_heads=1, dtype=dtype)
    sinks = torch.linspace(-1, 2, 8).to(dtype)
    assert Case(shape, before, start=9, sinks=sinks).error() < TOLERANCE[dtype]


def test_a_sink_takes_weight() -> None:
    shape = variant(QWEN3, key_dim=16, value_dim=16)
    plain = Case(shape, 20).run()
    assert torch.equal(plain, Case(shape, 20, sinks=torch.full((8,), -200.0)).run())
    assert Case(shape, 20, sinks=torch.full((8,), 200.0)).run().abs().max() < 1e-6


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("tokens", [2, 5, 8])
def test_a_token_of_a_few_attends_to_no_later_one(tokens: int, window: int) -> None:
    shape = variant(ODD, window=window)
    assert Case(shape, 50, tokens).error() < TOLERANCE[torch.float32]
    assert Case(shape, 0, tokens).error() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("group", [16, 20])
def test_latents_that_all_heads_share_match_float64(group: int, packed: bool, dtype: torch.dtype) -> None:
    shape = AttentionShape(1, group, 512, 512, dtype, tail_dim=64, shared=True, packed=packed)
    assert Case(shape, 70).error() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape", [MIXTRAL, GPT_OSS, DEEPSEEK, ODD], ids=["mixtral", "gpt-oss", "deepseek", "odd"]
)
def test_packed_rows_give_the_attention_of_their_elements(shape: AttentionShape, dtype: torch.dtype) -> None:
    case = Case(variant(shape, dtype=dtype, packed=True), 140, tokens=2)
    assert case.error() < TOLERANCE[dtype]


def test_capped_scores_match_float64() -> None:
    case = Case(ODD, 90, softcap=0.7)
    assert case.error() < TOLERANCE[torch.float32]
    assert not torch.allclose(case.run(), Case(ODD, 90).run(), atol=1e-3)


def test_bits_do_not_depend_on_the_reserved_memory_or_a_windows_place() -> None:
    shape = variant(ODD, window=40)
    assert torch.equal(Case(shape, 90).run(), Case(shape, 90, start=31).run())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [1, 16, 33, 64, 128, 576])
def test_rows_are_packed_and_unpacked_as_on_the_cpu(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    states = (
        torch.randn((1, 20, 2, dim), generator=generator)
        * torch.randn((1, 20, 2, dim), generator=generator).mul(4).exp()
    )
    states[0, 3, 0, 0], states[0, 4, 1, -1], states[0, 5] = torch.inf, torch.nan, 0.0
    states[0, 6] *= 1e-30  # nothing, or numbers below the smallest normal one
    states = states.to(dtype).transpose(1, 2)
    wanted = torch.empty((1, 2, 20, row_bytes(dim)), dtype=ROW_TYPE)
    pack(states, wanted)
    rows = torch.full((1, 2, 24, row_bytes(dim)), 7, dtype=ROW_TYPE, device=DEVICE)
    part = rows.narrow(2, 2, 20)
    DeviceRows().pack(states.to(DEVICE), part)
    assert torch.equal(part.cpu(), wanted)
    assert (rows[:, :, :2] == 7).all()
    assert (rows[:, :, 22:] == 7).all()
    found = DeviceRows().unpack(part, dim, dtype).cpu()
    assert torch.equal(found.nan_to_num(5.0), unpack(wanted, dim, dtype).nan_to_num(5.0))


@pytest.mark.parametrize("dtype", TYPES)
def test_new_tokens_are_packed_as_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    keys, values = (torch.randn((1, 2, 3, dim), generator=generator).to(dtype) for dim in (80, 20))
    reserved = [torch.zeros((1, 2, 9, row_bytes(dim)), dtype=ROW_TYPE, device=DEVICE) for dim in (80, 20)]
    attention.append(keys.to(DEVICE), values.to(DEVICE), *reserved, torch.tensor([4, 4]).to(DEVICE), 0)
    for states, rows in zip((keys, values), reserved, strict=True):
        wanted = torch.zeros((1, 2, 9, rows.shape[-1]), dtype=ROW_TYPE)
        pack(states, wanted.narrow(2, 4, 3))
        assert torch.equal(rows.cpu(), wanted)


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (AttentionShape(8, 4, 128, 128, torch.float16), 1),
        (AttentionShape(4, 8, 128, 128, torch.float16), 8),
        (AttentionShape(8, 8, 64, 64, torch.bfloat16, window=128), 1),
        (AttentionShape(1, 128, 512, 512, torch.bfloat16, tail_dim=64, shared=True), 1),
        (AttentionShape(32, 1, 128, 128, torch.float16, packed=True), 1),
    ],
)
def test_a_launch_fits_the_counted_memory(
    shape: AttentionShape, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.budget.gpu_sizes import ATTENTION_PROGRAMS, ATTENTION_SUMS

    monkeypatch.undo()
    launch = Launch.of(shape, tokens, tensor_cores=True)
    parts = shape.kv_heads * -(-shape.group * tokens // launch.rows)
    assert launch.splits * parts <= ATTENTION_PROGRAMS
    if not shape.window:
        assert launch.splits * parts > ATTENTION_PROGRAMS // 4
    assert launch.rows * shape.value_dim <= ATTENTION_SUMS
