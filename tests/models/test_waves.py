"""Prompts in waves: the results of passes over the same chunks, bit by bit, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny_family
from tiny import CASES, SHAPES, UNLISTED, tiny_config

from moechat.models.attention_cache import cache_shape, new_cache
from moechat.models.cache_argument import CACHE
from moechat.models.cache_states import tensors_of
from moechat.models.decode import install_native_modules
from moechat.models.skeleton import EXPERTS_RUNNER, Skeleton, build_skeleton
from moechat.models.threads import make_thread_invariant, thread_invariant_pass
from moechat.models.wave_chunks import NotInWavesError
from moechat.models.waves import Waves
from moechat.offload.experts import IMPLEMENTATION, register
from moechat.sizes.cache_shape import CacheShape

CPU = torch.device("cpu")
FAMILIES = [
    *dict.fromkeys(family for family, _ in CASES),
    *UNLISTED,
    *("qwen3_5_moe_text", "kimi_linear", "bailing_hybrid", "granitemoehybrid", "nemotron_h"),
    # Layers whose results are read by the next layer; indexers that choose tokens; hidden states in streams.
    *("zaya", "deepseek_v32", "glm_moe_dsa", "hy_v4"),
]
# Its states do not carry across chunks.
ONE_PASS = {"minimax"}
CHUNKS = (16, 16, 16, 11)


class Experts:
    """Experts whose result depends on every input of the token, and which count their calls."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.tokens.append(len(hidden))
        mixed = (weights.float() * (1 + index.float() / 8)).sum(-1, keepdim=True)
        return (hidden.float() * mixed).to(hidden.dtype)


class Subject:
    """A tiny model with random weights and native modules."""

    def __init__(self, family: str, dtype: torch.dtype = torch.float32, bits: int = 16) -> None:
        register()
        torch.manual_seed(3)
        self.skeleton: Skeleton = build_skeleton(
            tiny_config(family) if family in {*SHAPES, *UNLISTED} else tiny_family(family),
            dtype,
            IMPLEMENTATION,
        )
        self.model = self.skeleton.model
        self.experts = [Experts() for _ in self.skeleton.experts]
        for entry, runner in zip(self.skeleton.experts, self.experts, strict=True):
            vars(entry.module)[EXPERTS_RUNNER] = runner
        self.shape: CacheShape = cache_shape(self.model, self.model.config, dtype, bits=bits)
        self.model.to_empty(device="cpu")
        for name, tensor in self.model.named_parameters():
            tensor.data.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
        for _, tensor in self.model.named_buffers():
            tensor.data.normal_().abs_()
        make_thread_invariant(self.model)
        install_native_modules(self.model)
        self.waves = Waves(
            self.model, self.skeleton.layers_name, [entry.module for entry in self.skeleton.experts]
        )
        for runner in self.experts:
            runner.tokens.clear()

    def cache(self, tokens: int = 80) -> Any:
        return new_cache(self.shape, self.model.config, tokens)

    def one_by_one(self, chunks: list[torch.Tensor], cache: Any) -> list[torch.Tensor]:
        found = []
        for chunk in chunks:
            with thread_invariant_pass(chunk.shape[1]):
                found.append(self.model(input_ids=chunk, use_cache=True, **{CACHE: cache}).logits)
        return found

    def in_waves(self, chunks: list[torch.Tensor], cache: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        self.waves.run(chunks, cache, each=lambda _, output: found.append(output.logits))
        return found


@pytest.fixture(scope="module")
def mixtral() -> Subject:
    """A model whose waves have been tried."""
    subject = Subject("mixtral")
    with torch.inference_mode():
        assert subject.waves.usable(subject.cache, CPU)
    return subject


def chunks(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 100, (1, size), generator=generator) for size in sizes]


def held(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in tensors_of(layer)]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ONE_PASS])
def test_waves_are_passes_bit_by_bit(family: str) -> None:
    subject = Subject(family)
    assert subject.shape.unlimited
    with torch.inference_mode():
        assert subject.waves.usable(subject.cache, CPU)
        theirs, ours = subject.cache(), subject.cache()
        # Behind tokens that are there, as in the second turn of a chat.
        before = chunks(5)
        assert torch.equal(*(subject.one_by_one(before, cache)[0] for cache in (theirs, ours)))
        subject.experts[0].tokens.clear()
        wanted = subject.one_by_one(chunks(*CHUNKS), theirs)
        found = subject.in_waves(chunks(*CHUNKS), ours)
        assert subject.experts[0].tokens == [*CHUNKS, sum(CHUNKS)]
        assert all(map(torch.equal, wanted, found))
        assert all(map(torch.equal, held(theirs), held(ours)))
        # The model is as before, and decoding continues from the cache.
        assert torch.equal(*(subject.one_by_one(chunks(1), cache)[0] for cache in (theirs, ours)))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 16), (torch.float32, 8)])
def test_waves_are_passes_in_other_types_and_with_packed_keys(dtype: torch.dtype, bits: int) -> None:
    subject = Subject("gpt_oss", dtype, bits)
    with torch.inference_mode():
        assert subject.waves.usable(subject.cache, CPU)
        wanted = subject.one_by_one(chunks(*CHUNKS), subject.cache())
        assert all(map(torch.equal, wanted, subject.in_waves(chunks(*CHUNKS), subject.cache())))


def test_only_the_last_output_is_computed_unless_all_are_wanted(mixtral: Subject) -> None:
    subject = mixtral
    with torch.inference_mode():
        wanted = subject.one_by_one(chunks(*CHUNKS), subject.cache())[-1]
        heads: list[int] = []
        hook = subject.model.lm_head.register_forward_hook(lambda *_: heads.append(1))
        found = subject.waves.run(chunks(*CHUNKS), subject.cache(), logits_to_keep=1).logits
        hook.remove()
        assert heads == [1]
        assert found.shape[1] == 1
        assert torch.allclose(found[0, -1], wanted[0, -1])


def test_masks_of_chunks_share_memory() -> None:
    subject = Subject("gpt_oss")
    kept: list[Any] = []
    with torch.inference_mode():
        assert subject.waves.usable(subject.cache, CPU)
        own = subject.waves._reach

        def look(number: int, layer: Any, part: Any, inputs: Any) -> None:
            if number == 1:  # attends to all tokens
                kept.append(part.calls[1][1]["attention_mask"].untyped_storage().data_ptr())
            own(number, layer, part, inputs)

        subject.waves._reach = look  # type: ignore[method-assign]
        subject.waves.run(chunks(16, 16, 16), subject.cache())
    assert len(kept) == 3
    assert len(set(kept)) == 1


def test_the_progress_grows_evenly_to_the_end(mixtral: Subject) -> None:
    subject = mixtral
    seen: list[float] = []
    with torch.inference_mode():
        subject.waves.run(chunks(*CHUNKS), subject.cache(), tick=seen.append)
    assert len(seen) == 2 * len(CHUNKS)
    assert seen == sorted(seen)
    assert seen[-1] == 1


def test_an_interrupt_at_any_time_leaves_the_model_as_it_was(mixtral: Subject) -> None:
    tokens = chunks(6, 6)
    with torch.inference_mode():
        wanted = mixtral.one_by_one(tokens, mixtral.cache())
    left = 0

    def interrupt(_share: float) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1

    with torch.inference_mode():
        for call in range(4):
            left, cache = call, mixtral.cache()
            with pytest.raises(KeyboardInterrupt):
                mixtral.waves.run(tokens, cache, tick=interrupt)
            assert all(map(torch.equal, wanted, mixtral.one_by_one(tokens, mixtral.cache())))
            for layer in cache.layers:
                layer.crop(-layer.get_seq_length())
            assert all(map(torch.equal, wanted, mixtral.in_waves(tokens, cache)))


def _twice(layer: Any) -> None:
    own = layer.mlp.forward
    layer.mlp.forward = lambda hidden: own(hidden) + own(hidden)


def _in_place(layer: Any) -> None:
    own = layer.self_attn.o_proj.forward

    def attend(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = own(hidden)
        layer.last = out
        return out

    layer.self_attn.o_proj.forward = attend
    normalise = layer.post_attention_layernorm.forward

    def change(hidden: torch.Tensor) -> torch.Tensor:
        layer.last.mul_(2)  # the output of attention, after it was used
        return normalise(hidden)

    layer.post_attention_layernorm.forward = change


def _between(layer: Any) -> None:
    layer.register_forward_hook(lambda _layer, _args, out: out * 2)


@pytest.mark.parametrize("change", [_twice, _in_place, _between])
def test_a_model_that_does_something_else_is_not_computed_in_waves(change: Any) -> None:
    subject = Subject("mixtral")
    change(subject.model.model.layers[0])
    with torch.inference_mode():
        wanted = subject.one_by_one(chunks(*CHUNKS), subject.cache())
        assert not subject.waves.usable(subject.cache, CPU)
        assert all(map(torch.equal, wanted, subject.one_by_one(chunks(*CHUNKS), subject.cache())))


def test_a_cache_of_another_kind_is_refused(mixtral: Subject) -> None:
    with (
        torch.inference_mode(),
        pytest.raises(NotInWavesError, match="attention cache is a NoneType"),
    ):
        mixtral.waves.run(chunks(4, 4), None)
