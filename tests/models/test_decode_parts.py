"""The native parts of a decoding step: recognised by behaviour, in agreement with torch, or left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from isa_runner import isa_fixture
from tiny import tiny_config, write_tiny_checkpoint
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name the field uses
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next

import moechat
from moechat import _native
from moechat.models.cache_argument import cache_of
from moechat.models.decode import attention
from moechat.models.decode.norms import Norm, native_norm, recognise_norm
from moechat.models.decode.probe import close
from moechat.models.decode.rotary import recognise_rotary
from moechat.models.decode.routers import native_router, recognise_router
from moechat.models.element_types import ELEMENTS

DTYPES = list(ELEMENTS)


def draw(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def threads() -> Iterator[None]:
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 72, 7, 300])
@pytest.mark.parametrize(
    ("kind", "offset"),
    [
        (modeling_qwen3_moe.Qwen3MoeRMSNorm, 0.0),
        (modeling_gpt_oss.GptOssRMSNorm, 0.0),
        (modeling_qwen3_next.Qwen3NextRMSNorm, 1.0),
    ],
)
def test_norms_of_families_are_recognised_and_agree(
    kind: Any, offset: float, width: int, dtype: torch.dtype
) -> None:
    module = kind(width, eps=1e-5)
    module.weight = nn.Parameter((draw(width) * 0.2 + 1 - offset).to(dtype), requires_grad=False)
    norm = recognise_norm(module)
    assert norm is not None
    assert (norm.eps, norm.offset) == (1e-5, offset)
    if dtype is torch.bfloat16 and width > 7:
        assert norm.round_first == (kind is modeling_qwen3_moe.Qwen3MoeRMSNorm)
    x = draw(2, 3, width, dtype=dtype, seed=5)
    assert close(native_norm(module, norm)(x), module(x))


def test_other_norms_are_not_replaced() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))
            self.eps = 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (32,), self.weight, None, self.eps)

    class Tripled(modeling_qwen3_moe.Qwen3MoeRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(hidden_states)

    class Gated(modeling_qwen3_moe.Qwen3MoeRMSNorm):
        def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            out = super().forward(hidden_states)
            return out if gate is None else out * F.silu(gate)

    for module in (nn.LayerNorm(32), Centred(), Tripled(32), Gated(32), nn.Linear(8, 8)):
        assert recognise_norm(module) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_norm_that_subtracts_the_mean_is_not_replaced(dtype: torch.dtype) -> None:
    assert recognise_norm(nn.LayerNorm(4096, bias=False).to(dtype)) is None
    assert recognise_norm(modeling_qwen3_moe.Qwen3MoeRMSNorm(4096).to(dtype)) is not None


def test_a_norm_uses_the_module_for_unsupported_inputs() -> None:
    module = modeling_qwen3_moe.Qwen3MoeRMSNorm(32)
    calls = []
    own = module.forward
    module.forward = lambda x: calls.append(x) or own(x)
    forward = native_norm(module, Norm(1e-6, 0.0, True))
    forward(draw(4, 32))
    assert not calls
    wide = draw(4, 64)[:, ::2]
    assert torch.equal(forward(wide), own(wide))
    assert forward(draw(4, 32).double()).dtype is torch.float64
    assert len(calls) == 2


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, tokens, heads, value_dim] in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(group, 1) for part in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        extra = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


class RefusedError(Exception):
    """The native attention does not support a call."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    *,
    prompt: bool = False,
) -> torch.Tensor:
    """[1, tokens, heads, value_dim]; raises ``RefusedError`` if the native code does not support the call."""
    _, heads, tokens, key_dim = query.shape
    _, kv_heads, context, value_dim = value.shape
    run = _native.Attention(
        ELEMENTS[query.dtype],
        kv_heads,
        heads // kv_heads,
        key_dim,
        0,
        value_dim,
        scale,
        0 if sinks is None else sinks.data_ptr(),
    )
    out = torch.full((1, tokens, heads, value_dim), math.nan, dtype=query.dtype)
    done = run(
        query.data_ptr(),
        *query.stride()[1:3],
        tokens,
        key.data_ptr(),
        *key.stride()[1:3],
        0,
        0,
        value.data_ptr(),
        *value.stride()[1:3],
        context,
        0 if visible is None else visible.data_ptr(),
        0 if visible is None else visible.stride(2),
        out.data_ptr(),
        prompt,
    )
    if not done:
        raise RefusedError
    return out


def test_a_fully_masked_query_gives_zero_as_in_torch() -> None:
    query, key, value = draw(1, 2, 2, 16), draw(1, 1, 20, 16), draw(1, 1, 20, 16)
    visible = torch.ones((1, 1, 2, 20), dtype=torch.bool)
    visible[..., 1, :] = False
    found = attend(query, key, value, 0.25, None, visible)
    assert torch.isfinite(found).all()
    assert not found[0, 1].any()
    assert found[0, 0].abs().max() > 0.01


@pytest.mark.skipif("deepseek_v32" not in CONFIG_MAPPING, reason="this transformers does not have the family")
def test_a_family_with_sparse_attention_keeps_it(tmp_path: Path, moechat_home: Path) -> None:
    # Its mask is made for attention of transformers' own names alone.
    sizes = tiny_config("deepseek_v3").to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        sizes.pop(name, None)
    config = AutoConfig.for_model("deepseek_v32", **{**sizes, "index_topk": 8, "index_n_heads": 2})
    write_tiny_checkpoint(tmp_path / "model", config)
    tokens = [(7 * i) % 50 + 3 for i in range(40)]
    with moechat.load(tmp_path / "model", bits=16, dtype="float32") as engine:
        ours = engine.logits(tokens)
        engine.loaded.native_modules.undo()
        theirs = engine.logits(tokens)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim", "context", "tokens"),
    [(8, 2, 64, 64, 700, 1), (6, 3, 24, 12, 129, 1), (4, 4, 20, 36, 1, 1), (4, 1, 128, 128, 333, 5)],
)
def test_attention_agrees_with_a_softmax_in_double(
    heads: int, kv_heads: int, key_dim: int, value_dim: int, context: int, tokens: int, dtype: torch.dtype
) -> None:
    query = draw(1, tokens, heads, key_dim, dtype=dtype).transpose(1, 2)
    # Keys and values are parts of larger tensors, as in the cache.
    key = draw(1, kv_heads, context + 9, key_dim, dtype=dtype, seed=2)[..., :context, :]
    value = draw(1, kv_heads, context + 9, value_dim, dtype=dtype, seed=3)[..., :context, :]
    sinks = draw(heads, seed=4)
    visible = torch.rand((1, 1, tokens, context), generator=torch.Generator().manual_seed(6)) > 0.4
    visible[..., 0] = True
    for more in ({}, {"sinks": sinks}, {"visible": visible}, {"sinks": sinks, "visible": visible}):
        wanted = reference(query, key, value, 0.3, **more)
        assert close(attend(query, key, value, 0.3, **more), wanted.to(dtype))


def test_attention_does_not_depend_on_threads_and_propagates_nan(threads: None) -> None:
    query, key, value = draw(1, 32, 1, 128), draw(1, 4, 2000, 128, seed=2), draw(1, 4, 2000, 128, seed=3)
    results = []
    for count in (1, 2, 3, 7):
        _native.set_num_threads(count)
        results.append(attend(query, key, value, 0.1))
    assert all(torch.equal(results[0], other) for other in results)
    key[0, 1, 77, 5] = math.nan
    broken = attend(query, key, value, 0.1).isnan().flatten(2).any(-1)
    assert attend(query, key, value, 0.1)[0, 0, 8:16].isnan().all()
    assert broken.any()
    assert not attend(query, key, value, 0.1)[0, 0, :8].isnan().any()


run_under = isa_fixture(
    __file__, "agrees_with_a_softmax or routers_of_families or norms_of_families and 72 or rotary"
)


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_computes_the_same_parts(isa: str, run_under: Callable[[str], None]) -> None:
    run_under(isa)


FAMILIES = [
    "qwen3_moe",
    "olmoe",
    "mixtral",
    "gpt_oss",
    "deepseek_v2",
    "glm4_moe",
    "ernie4_5_moe",
    "qwen3_next",
]


# Those whose routers are modules of a kind that the native code has.
ROUTED = {"qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v2", "glm4_moe", "qwen3_next"}


def module_of(family: str, suffix: str, dtype: torch.dtype) -> nn.Module:
    """The first module of a tiny random model whose name ends with ``suffix``."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 2 or "bias" in suffix:
            parameter.copy_(draw(*parameter.shape, dtype=dtype, seed=8))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.3 * draw(*buffer.shape, seed=9))
    found: nn.Module = next(module for name, module in model.named_modules() if name.endswith(suffix))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "suffix"),
    [
        ("qwen3_moe", "mlp.gate"),
        ("olmoe", "mlp.gate"),
        ("mixtral", "mlp.gate"),
        ("gpt_oss", "mlp.router"),
        ("deepseek_v2", "mlp.gate"),
        ("glm4_moe", "mlp.gate"),
    ],
)
def test_routers_of_families_are_recognised_and_choose_the_same(
    family: str, suffix: str, dtype: torch.dtype
) -> None:
    module = module_of(family, suffix, dtype)
    rule = recognise_router(module)
    assert rule is not None
    hidden = draw(3, 64, dtype=dtype, seed=11) * 0.2
    wanted, found = module(hidden), native_router(module, rule)(hidden)
    assert close(found[rule.order[0]], wanted[rule.order[0]])
    ours = torch.zeros(3, wanted[rule.order[0]].shape[1])
    theirs = ours.clone()
    ours.scatter_(1, found[rule.order[2]], found[rule.order[1]].float())
    theirs.scatter_(1, wanted[rule.order[2]], wanted[rule.order[1]].float())
    assert close(ours.to(dtype), theirs.to(dtype))
    # Many tokens go the module's own way, bit for bit.
    many = draw(40, 64, dtype=dtype, seed=12)
    assert all(map(torch.equal, native_router(module, rule)(many), module(many)))


def test_routers_that_choose_groups_are_not_replaced() -> None:
    assert recognise_router(module_of("deepseek_v3", "mlp.gate", torch.float32)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("module", "name"), [(modeling_qwen3_moe, "Qwen3Moe"), (modeling_gpt_oss, "GptOss")])
def test_rotary_embeddings_are_recognised_and_agree(module: Any, name: str, dtype: torch.dtype) -> None:
    config = tiny_config(module.__name__.rsplit(".", 1)[1].removeprefix("modeling_"))
    config._attn_implementation = "eager"
    layer = getattr(module, f"{name}Attention")(config, 0)
    ours = recognise_rotary(layer)
    assert ours is not None
    angles = 24 if module is modeling_qwen3_moe else 12
    for tokens in (1, 3, 20):
        q = draw(1, tokens, 4, 24, dtype=dtype).transpose(1, 2)
        k = draw(1, tokens, 2, 24, dtype=dtype, seed=2).transpose(1, 2)
        cos, sin = draw(2, 1, tokens, angles, dtype=dtype, seed=3)
        wanted = module.apply_rotary_pos_emb(q, k, cos, sin)
        assert all(map(torch.equal, ours(q, k, cos, sin), wanted))


def test_rotary_embeddings_of_adjacent_pairs_are_not_replaced() -> None:
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie

    config = tiny_config("ernie4_5_moe")
    config._attn_implementation = "eager"
    assert recognise_rotary(ernie.Ernie4_5_MoeAttention(config, 0)) is None


def relative_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of each row."""
    return torch.linalg.norm(found - wanted, dim=-1) / torch.linalg.norm(wanted, dim=-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_native_decoding_equals_the_family_s_modules(
    family: str, dtype: str, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config(family))
    # Where inputs become integers, the least difference grows, and parts of latent attention have other ones.
    load = partial(moechat.load, tmp_path / "model", bits=16, activation_bits=32)
    engine = load(dtype=dtype)
    vars(engine.loaded.model).pop("forward", None)
    for name in engine.loaded.native_modules.layers:
        del vars(engine.loaded.model.get_submodule(name))[
            "forward"
        ]  # so that every part is a call of its own
    native = []
    real = attention._attend
    latents = attention._attend_latents

    def attend_or_none(*arguments: Any) -> torch.Tensor | None:
        native.append(real(*arguments))
        return native[-1]

    def over_latents(*arguments: Any) -> torch.Tensor | None:
        out = latents(*arguments)
        if out is not None:
            native.append(out)
        return out

    monkeypatch.setattr(attention, "_attend", attend_or_none)
    monkeypatch.setattr(attention, "_attend_latents", over_latents)
    tokens = [5, 17, 3, 80, 44, 9, 21, 70, 2, 33, 61, 13]

    def decode(engine: moechat.Engine = engine, tokens: list[int] = tokens) -> torch.Tensor:
        cache = engine.decoder.new_cache()
        rows = []
        for part in ([tokens[:9]], [tokens[9:10]], [tokens[10:11]], [tokens[11:]]):
            out = engine.passes.run(torch.tensor(part), cache)
            cache = cache_of(out)
            rows.append(out.logits[0, -1].float())
        return torch.stack(rows)

    ours = decode()
    layers = len(native) // 4
    assert layers >= 1
    # The first pass has nine tokens: a prompt, see test_prompt_attention.py.
    assert all(out is not None for out in native[layers:])
    again = decode()
    assert torch.equal(ours, again)
    texts = torch.randint(0, 90, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()
    ours = torch.cat([ours, *(decode(engine, text) for text in texts)])
    done = engine.loaded.native_modules
    assert done.norms
    assert bool(done.routers) == (family in ROUTED)
    assert done.attention
    assert bool(done.latent) == family.startswith("deepseek")
    done.undo()
    count = len(native)
    plain = torch.cat([decode(), *(decode(engine, text) for text in texts)])
    assert len(native) == count
    if dtype == "float32":
        assert relative_errors(ours, plain).max() < 1e-5
        return
    # Roundings differ by processor and library, and one may change which expert is chosen. So most tokens are
    # to be as close to float32 as with the family's modules.
    whole = load(dtype="float32")
    whole.loaded.native_modules.undo()
    exact = torch.cat([decode(whole), *(decode(whole, text) for text in texts)])
    assert relative_errors(ours, exact).median() < 1.25 * relative_errors(plain, exact).median()


def test_attention_with_other_results_is_not_replaced() -> None:
    class Module(nn.Module):
        pass

    def own(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        return reference(query, key, value, 0.1).float() + 1, None

    arguments = (draw(1, 4, 1, 16), draw(1, 2, 30, 16, seed=2), draw(1, 2, 30, 16, seed=3), None)
    assert attention._attend(Module(), *arguments, {"scaling": 0.1}, own) is None
    # An argument that it has never heard of may mean anything.
    plain = lambda m, q, k, v, *_, **__: (reference(q, k, v, 0.1).float(), None)  # noqa: E731
    assert attention._attend(Module(), *arguments, {"scaling": 0.1}, plain) is not None
    assert attention._attend(Module(), *arguments, {"scaling": 0.1, "softcap": 30.0}, plain) is None
