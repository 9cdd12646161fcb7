"""Native attention of prompts against a softmax in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_decode_parts
import torch
from isa_runner import isa_fixture
from test_decode_parts import DTYPES, RefusedError, draw, reference
from tiny import tiny_config, write_tiny_checkpoint
from transformers.models.gpt_oss import modeling_gpt_oss

import moechat
from moechat import _native
from moechat.models.decode import attention
from moechat.models.decode.probe import close

attend = functools.partial(test_decode_parts.attend, prompt=True)


def causal(tokens: int, context: int, window: int | None = None) -> torch.Tensor:
    """bool [1, 1, tokens, context]; the last token is that of the last key."""
    own = torch.arange(context - tokens, context)[:, None]
    keys = torch.arange(context)[None]
    seen = keys <= own
    return (seen if window is None else seen & (keys > own - window))[None, None]


def inputs(
    heads: int, kv_heads: int, key_dim: int, value_dim: int, context: int, tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values are parts of larger tensors, as in the cache."""
    return (
        draw(1, tokens, heads, key_dim, dtype=dtype).transpose(1, 2),
        draw(1, kv_heads, context + 9, key_dim, dtype=dtype, seed=2)[..., :context, :],
        draw(1, kv_heads, context + 9, value_dim, dtype=dtype, seed=3)[..., :context, :],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim", "context", "tokens"),
    [
        (8, 2, 64, 64, 150, 150),
        (3, 3, 24, 12, 129, 40),
        (6, 2, 128, 128, 200, 17),
        (4, 4, 20, 36, 64, 64),
        (64, 1, 16, 16, 33, 33),
    ],
)
def test_prompts_agree_with_a_softmax_in_double(
    heads: int, kv_heads: int, key_dim: int, value_dim: int, context: int, tokens: int, dtype: torch.dtype
) -> None:
    query, key, value = inputs(heads, kv_heads, key_dim, value_dim, context, tokens, dtype)
    sinks = draw(heads, seed=4)
    whole, window = causal(tokens, context), causal(tokens, context, 30)
    for given, seen in ((None, whole), (whole, whole), (window, window)):
        for extra in (None, sinks):
            wanted = reference(query, key, value, 0.3, extra, seen)
            found = attend(query, key, value, 0.3, extra, given)
            assert close(found, wanted.to(dtype))


@pytest.mark.parametrize("heads", [4, 8])  # one or two for each key head
def test_a_token_s_result_depends_neither_on_other_tokens_nor_on_threads(heads: int) -> None:
    before = _native.num_threads()
    query, key, value = inputs(heads, 4, 32, 48, 300, 300, torch.float32)
    try:
        _native.set_num_threads(1)
        whole = attend(query, key, value, 0.2)
        for threads in (2, 3, 7):
            _native.set_num_threads(threads)
            again = attend(query, key, value, 0.2)
            assert torch.equal(again, whole)
        for tokens in (1, 15, 37, 299):
            part = attend(query[:, :, -tokens:], key, value, 0.2)
            assert torch.equal(part, whole[:, -tokens:])
    finally:
        _native.set_num_threads(before)
    window = causal(300, 300, 70)
    windowed = attend(query, key, value, 0.2, None, window)
    part = attend(query[:, :, -41:], key, value, 0.2, None, window[:, :, -41:].contiguous())
    assert torch.equal(part, windowed[:, -41:])


def test_a_token_that_sees_nothing_gets_zero_as_in_torch() -> None:
    query, key, value = inputs(2, 1, 16, 16, 20, 20, torch.float32)
    visible = causal(20, 20)
    visible[..., 7, :] = False
    found = attend(query, key, value, 0.25, None, visible)
    assert torch.isfinite(found).all()
    assert not found[0, 7].any()
    assert found[0, 6].abs().max() > 0.01


def test_masks_with_gaps_and_too_many_heads_are_refused() -> None:
    query, key, value = inputs(2, 1, 16, 16, 20, 20, torch.float32)
    visible = causal(20, 20)
    visible[..., 12, 5] = False
    with pytest.raises(RefusedError):
        attend(query, key, value, 0.25, None, visible)
    with pytest.raises(RefusedError):
        attend(*inputs(65, 1, 16, 16, 20, 20, torch.float32), 0.25)
    with pytest.raises(ValueError, match="fewer keys than tokens"):
        attend(query, key[..., :19, :], value[..., :19, :], 0.25)


def assert_prompts_do_not_call(
    module: Any,
    name: str,
    config: Any,
    tokens: list[int],
    dtype: str,
    directory: Path,
    patch: pytest.MonkeyPatch,
) -> None:
    """Logits of a prompt do not call a function, and are as near to those of float32 as with it."""
    # All experts, since rounding would choose others where two are nearly alike.
    config.num_experts_per_tok = getattr(config, "num_local_experts", None) or config.num_experts
    write_tiny_checkpoint(directory, config)
    with moechat.load(directory, bits=16, dtype=dtype) as engine:
        ours = engine.logits(tokens)

        def forbidden(*_: object, **__: object) -> None:
            raise AssertionError("called")

        with patch.context() as forbidding:
            forbidding.setattr(module, name, forbidden)
            assert torch.equal(engine.logits(tokens), ours)
        engine.loaded.native_modules.undo()
        theirs = engine.logits(tokens)
    with moechat.load(directory, bits=16, dtype="float32") as engine:
        engine.loaded.native_modules.undo()
        exact = engine.logits(tokens)
    error, their_error = ((found - exact).norm(dim=1).median() for found in (ours, theirs))
    assert error <= 1.2 * their_error + 1e-5 * exact.norm(dim=1).median()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral"])
def test_prompts_do_not_call_torch_s_attention(
    family: str, dtype: str, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention._torch_uses_amx(getattr(torch, dtype)):
        pytest.skip("on this processor bfloat16 is left to torch")
    tokens, name = [(7 * i) % 50 + 3 for i in range(40)], "scaled_dot_product_attention"
    config = tiny_config(family)
    assert_prompts_do_not_call(
        torch.nn.functional, name, config, tokens, dtype, tmp_path / "model", monkeypatch
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_with_sinks_do_not_call_the_family_s_attention(
    dtype: str, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss has windows and sinks, and masks of numbers that are added to scores."""
    config, name = tiny_config("gpt_oss"), "eager_attention_forward"
    tokens = [(7 * i) % 50 + 3 for i in range(3 * config.sliding_window + 5)]
    assert_prompts_do_not_call(modeling_gpt_oss, name, config, tokens, dtype, tmp_path / "model", monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_of_numbers_are_read_where_they_only_hide_keys(dtype: torch.dtype) -> None:
    seen = causal(5, 9, 3)
    for hidden in (-torch.inf, torch.finfo(dtype).min):
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, hidden)
        found = attention._visible(mask)
        assert found is not None
        assert torch.equal(found, seen)
        assert attention._visible(mask) is found, "layers share it"
        mask = mask.clone()
        mask[0, 0, 2, :] = hidden
        assert attention._visible(mask) is None, "a token sees nothing"
        mask = mask.clone()
        mask[0, 0, 2, 4] = -0.5
        assert attention._visible(mask) is None, "a bias"
    assert attention._visible(seen) is seen
    assert attention._visible(seen.int()) is None


run_under = isa_fixture(__file__, "softmax_in_double or nothing")


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_attends_alike(isa: str, run_under: Callable[[str], None]) -> None:
    run_under(isa)
