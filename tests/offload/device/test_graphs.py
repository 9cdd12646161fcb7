"""Decoded tokens replayed from graphs, against the same passes without (see ``interpreted_graph.py``)."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from families import tiny_family
from interpreted_graph import InterpretedGraph
from tiny import tiny_config, write_tiny_chat_model, write_tiny_checkpoint
from transformers.cache_utils import Cache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

import moechat
from moechat.config import RUN_AHEAD_VARIABLE
from moechat.models import packed_rows
from moechat.models.cache_argument import cache_of
from moechat.offload import fused_steps
from moechat.offload.gpu_layer import GpuExpertLayer
from moechat.offload.graph_decoder import GraphDecoder
from moechat.offload.kernels import attention
from moechat.offload.kernels.device_rows import DeviceRows
from moechat.offload.kernels.launch import BlockKernels
from moechat.offload.settings import OffloadOptions

PROMPT = [5, 17, 9, 33, 21]
TOKENS = [3, 10, 17, 24, 31, 38, 45]
# float32: our attention adds up in another order.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _the_host_launches_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of the parts between expert layers; ``test_run_ahead.py`` has those of whole tokens."""
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """Loads with graphs switched off."""

    def load_without(model: Path, gpu, **arguments):
        with monkeypatch.context() as patch:
            patch.setenv("MOECHAT_CUDA_GRAPHS", "0")
            return load(model, gpu, **arguments)

    return load_without


def load(model: Path, gpu, pages: int | None = None, **arguments):
    # moepic fetches what is missing: how CPU and GPU share a layer depends on time, and rounds differently.
    usual = {"ctx": 64, "vram": "1G", "system": "moepic"}
    offload = OffloadOptions(accelerator=gpu, pages=pages)
    return moechat.load(model, device="cuda", offload=offload, **{**usual, **arguments})


def config_of(family: str, **changes):
    """Experts of one block: what the interpreter computes, it computes slowly."""
    short = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    return tiny_config(family, 0, **short, **changes)


def feed(engine, passes, cache=None):
    """Last logits of passes of given tokens, and the cache after them; a negative number is cut off it."""
    found = []
    cache = engine.decoder.new_cache() if cache is None else cache
    for tokens in passes:
        if isinstance(tokens, int):
            for layer in cache.layers:
                layer.crop(tokens)
            continue
        output = engine.passes.run(torch.tensor([tokens]), cache)
        cache = cache_of(output)
        found.append(output.logits[0, -1])
    return torch.stack(found), cache


def _no_experts(_, asked, into=None, packed=None):
    return (torch.empty_like(asked.x) if into is None else into).zero_()


def each(tokens):
    return [[token] for token in tokens]


def answer(engine, prompt, count=5):
    return [step.token_id for step in engine.generate(prompt, max_new_tokens=count, temperature=0.0)]


def replayed(gpu) -> int:
    return sum(graphs.replayed for graphs in gpu.graphs_made)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_replayed_logits_equal_those_of_passes(
    family: str, gpu, without, tmp_path: Path, moechat_home: Path
) -> None:
    # gpt_oss has windows of 8 tokens, so that one moves on, and sinks; qwen2_moe makes a mask that no layer
    # uses.
    write_tiny_checkpoint(tmp_path / family, config_of(family))
    with without(tmp_path / family, gpu) as engine:
        expected, _ = feed(engine, [PROMPT, *each(TOKENS)])
    assert not gpu.graphs_made
    with load(tmp_path / family, gpu) as engine:
        found, _ = feed(engine, [PROMPT, *each(TOKENS)])
        graphs = engine.describe().expert_layers + 1
        assert engine.notices() == []
    assert error_of(found, expected) < TOLERANCE
    assert len(gpu.graphs_made) == 1
    assert len(gpu.graphs_made[0].made) == graphs
    assert replayed(gpu) == len(TOKENS) * graphs


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2"])
def test_a_whole_token_of_two_graphs_equals_passes(
    family: str, gpu, without, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN_AHEAD_VARIABLE)
    write_tiny_checkpoint(tmp_path / family, config_of(family))
    with without(tmp_path / family, gpu) as engine:
        expected, _ = feed(engine, [PROMPT, *each(TOKENS)])
    with load(tmp_path / family, gpu) as engine:
        # Two are compared with passes, and two with tokens whose layers the host launches.
        found, cache = feed(engine, [PROMPT, *each(TOKENS[:5])])
        before = sum(graphs.all_replayed for graphs in gpu.graphs_made)
        rest, _ = feed(engine, each(TOKENS[5:]), cache)
        after = sum(graphs.all_replayed for graphs in gpu.graphs_made)
        assert after - before == 2 * len(TOKENS[5:])
        assert engine.notices() == []
    assert error_of(torch.cat([found, rest]), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2"])
def test_replays_read_keys_and_values_of_8_bits(
    family: str, gpu, without, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stand-in is a "cpu" to torch: its prompts and passes pack and unpack by the GPU's kernels too.
    monkeypatch.setitem(packed_rows._CODECS, "cpu", DeviceRows())
    write_tiny_checkpoint(tmp_path / family, config_of(family))
    passes = [PROMPT, *each(TOKENS[:3]), [8, 8, 7], *each(TOKENS[3:4])]
    with without(tmp_path / family, gpu, kv_bits=8) as engine:
        expected, _ = feed(engine, passes)
    with load(tmp_path / family, gpu, kv_bits=8) as engine:
        found, cache = feed(engine, passes)
        graphs = engine.describe().expert_layers + 1
        assert all(layer.keys.dtype is torch.uint8 for layer in cache.layers)
        assert engine.notices() == []
    assert error_of(found, expected) < TOLERANCE
    assert replayed(gpu) == 4 * graphs
    monkeypatch.undo()
    with moechat.load(
        tmp_path / family, ctx=64, dtype="float32", dense_bits=16, activation_bits=32, kv_bits=8
    ) as engine:
        assert error_of(found, feed(engine, passes)[0]) < TOLERANCE


def test_one_recording_serves_contexts_beyond_2048_tokens(
    gpu, without, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILE_KEYS", (16, 64))
    monkeypatch.setattr(GpuExpertLayer, "answer", _no_experts)  # the interpreter takes seconds for so many
    config = tiny_config("qwen3_moe", 0, moe_intermediate_size=64, max_position_embeddings=4096)
    write_tiny_checkpoint(tmp_path / "long", config)
    rng = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, 90, (2045,), generator=rng).tolist()
    passes = [PROMPT, *each(TOKENS[:3]), prompt[:-8], *each(TOKENS)]
    with without(tmp_path / "long", gpu, ctx=3000) as engine:
        expected, _ = feed(engine, passes)
    with load(tmp_path / "long", gpu, ctx=3000) as engine:
        found, cache = feed(engine, passes)
        assert cache.get_seq_length() == 2052
        graphs = engine.describe().expert_layers + 1
        assert engine.notices() == []
    assert error_of(found, expected) < TOLERANCE
    assert len(gpu.graphs_made[0].made) == graphs
    assert replayed(gpu) == (3 + len(TOKENS)) * graphs


@pytest.mark.parametrize("kind", ["keys", "window"])
def test_attention_that_the_kernel_does_not_compute_is_left_to_passes(
    kind: str, gpu, without, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_one(loads):
        engine = loads(tmp_path / "tiny", gpu)
        if kind == "window":
            # Masks of a window over a cache that keeps all tokens, which shows only in long contexts.
            def mask(*, config, **named):
                config = copy.copy(config)
                config.sliding_window = 20
                return create_sliding_window_causal_mask(config=config, **named)

            monkeypatch.setattr(modeling, "create_causal_mask", mask)
        else:
            # As in a family that changes keys after they are stored, whose layers are not known.
            monkeypatch.setattr(fused_steps, "recognise_layers", lambda *_: {})
            whole = Cache.update

            def update(cache, *arguments, **named):
                keys, values = whole(cache, *arguments, **named)
                return keys * 1.0, values

            monkeypatch.setattr(Cache, "update", update)
        return engine

    monkeypatch.setattr(GpuExpertLayer, "answer", _no_experts)
    write_tiny_checkpoint(tmp_path / "tiny", tiny_config("qwen3_moe", 0, moe_intermediate_size=64))
    with load_one(without) as engine:
        expected = answer(engine, PROMPT, 2)
    with load_one(load) as engine:
        assert answer(engine, PROMPT, 2) == expected
        (note,) = engine.notices()
        assert "its attention kernel does not serve this model" in note
        assert {"keys": "changes keys or values", "window": "its window of 20 tokens"}[kind] in note
    assert replayed(gpu) == 0


def test_replays_are_compared_again_as_the_context_grows(
    model: Path, gpu, without, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuExpertLayer, "answer", _no_experts)
    longer = list(range(3, 33))
    passes = [PROMPT, *each(TOKENS[:3]), longer, *each(TOKENS[:3])]
    with without(model, gpu) as engine:
        expected, _ = feed(engine, passes)
    whole = attention.CacheAttention.attend

    def forgets_old_keys(kernels, query, keys, values, numbers, place, **named):
        # Right in short contexts only.
        kernels = attention.CacheAttention(dataclasses.replace(kernels.shape, window=16))
        return whole(kernels, query, keys, values, numbers, place, **named)

    monkeypatch.setattr(attention.CacheAttention, "attend", forgets_old_keys)
    with load(model, gpu) as engine:
        found, _ = feed(engine, passes)
        (note,) = engine.notices()
        assert "a replay differed from the model's own pass by" in note
    assert error_of(found, expected) < TOLERANCE
    # The last two are of recordings without our layers and norms, which might have been the reason.
    assert replayed(gpu) == 6 * 3


def test_a_family_whose_cache_cannot_be_replayed_is_decoded_without_graphs(
    gpu, without, tmp_path: Path, moechat_home: Path
) -> None:
    write_tiny_checkpoint(tmp_path / "glm_moe_dsa", tiny_family("glm_moe_dsa"))
    with without(tmp_path / "glm_moe_dsa", gpu) as engine:
        expected = answer(engine, PROMPT)
    with load(tmp_path / "glm_moe_dsa", gpu) as engine:
        assert answer(engine, PROMPT) == expected
        assert engine.notices() == []
    assert replayed(gpu) == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_replays_passes_and_truncations_can_alternate(
    family: str, gpu, without, tmp_path: Path, moechat_home: Path
) -> None:
    write_tiny_checkpoint(tmp_path / family, config_of(family, sliding_window=12))
    cut = [-2] if family == "qwen3_moe" else []
    passes = [PROMPT, *each(TOKENS[:2]), [8, 8, 7], *each(TOKENS[2:4]), *cut, *each(TOKENS[4:6]), [2, 4]]
    passes += each(TOKENS[6:])
    with without(tmp_path / family, gpu) as engine:
        expected, _ = feed(engine, passes)
    with load(tmp_path / family, gpu) as engine:
        found, cache = feed(engine, passes)
        held = sum(item if isinstance(item, int) else len(item) for item in passes)
        assert [layer.get_seq_length() for layer in cache.layers] == [held] * len(cache.layers)
        assert engine.notices() == []
    assert error_of(found, expected) < TOLERANCE
    assert replayed(gpu) == 3 * len(TOKENS)


def test_a_full_sliding_window_is_moved_before_a_replay(
    gpu, without, tmp_path: Path, moechat_home: Path
) -> None:
    # Memory of 7 tokens before and 16 of a pass.
    write_tiny_checkpoint(tmp_path / "gpt_oss", tiny_config("gpt_oss", 0))
    passes = [PROMPT, [1, 2, 3, 4, 5, 6], *each(TOKENS[:3]), [1, 2, 3, 4, 5, 6], *each([9, *TOKENS[:4]])]
    with without(tmp_path / "gpt_oss", gpu, ctx=26) as engine:
        expected, _ = feed(engine, passes)
    with load(tmp_path / "gpt_oss", gpu, ctx=26) as engine:
        cache = engine.decoder.new_cache()
        cache.layers[0]._capacity = 7 + 12
        found, _ = feed(engine, passes, cache)
        assert cache.layers[0]._reserved[0].shape[-2] == 19
    assert error_of(found, expected) < TOLERANCE


def test_a_chat_and_later_answers_use_the_same_graphs(
    gpu, without, tmp_path: Path, moechat_home: Path
) -> None:
    # A token a byte.
    write_tiny_chat_model(tmp_path / "chat", moe_intermediate_size=64)

    def talk(engine):
        messages = [{"role": "user", "content": "hi"}]
        first = list(engine.generate(messages, max_new_tokens=4, temperature=0.0))
        messages += [
            {"role": "assistant", "content": "".join(step.text for step in first)},
            {"role": "user", "content": "so"},
        ]
        second = answer(engine, messages, 4)
        return [step.token_id for step in first], second, answer(engine, "no", 4)

    with without(tmp_path / "chat", gpu) as engine:
        expected = talk(engine)
    with load(tmp_path / "chat", gpu) as engine:
        assert talk(engine) == expected
        recorded = len(gpu.graphs_made[0].made)
        assert talk(engine) == expected
        assert engine.notices() == []
    assert len(gpu.graphs_made) == 1
    assert len(gpu.graphs_made[0].made) == recorded


def test_replays_share_missing_blocks_with_the_cpu(model: Path, gpu, without) -> None:
    # Who computes a block depends on time, so the CPU must not round its inputs otherwise than the GPU.
    few = {"system": "auto:miss=both", "vram": None, "activation_bits": 32}
    with without(model, gpu, pages=8, **few) as engine:
        expected, _ = feed(engine, [PROMPT, *each(TOKENS)])
    with load(model, gpu, pages=8, **few) as engine:
        found, _ = feed(engine, [PROMPT, *each(TOKENS)])
        assert engine.loaded.near.stats()["blocks_far"] > 0
    assert error_of(found, expected) < 1e-4  # sums of other parts, rounded in 32 bits
    assert replayed(gpu) > 0


def test_simultaneous_answers_do_not_share_memory(model: Path, gpu, without) -> None:
    with without(model, gpu) as engine:
        expected, other = answer(engine, PROMPT, 6), answer(engine, TOKENS, 4)
    with load(model, gpu) as engine:
        steps = engine.generate(PROMPT, max_new_tokens=6, temperature=0.0)
        found = [next(steps).token_id for _ in range(3)]
        assert answer(engine, TOKENS, 4) == other
        found += [step.token_id for step in steps]
        assert found == expected
        assert answer(engine, TOKENS, 4) == other
        assert engine.notices() == []
    assert len(gpu.graphs_made) == 1


def test_a_failed_recording_is_reported_once_and_changes_no_token(model: Path, gpu, without) -> None:
    with without(model, gpu) as engine:
        expected = answer(engine, PROMPT)
    with load(model, gpu) as engine:
        # Waits for the GPU, as a family may.
        engine.loaded.model.model.norm.register_forward_hook(
            lambda _, __, out: out if out.sum() > 0 else +out
        )
        assert answer(engine, PROMPT) == expected
        (note,) = engine.notices()
        assert note.startswith("tokens are decoded without CUDA graphs, which would be faster")
        assert "not permitted when stream is capturing" in note
        assert answer(engine, TOKENS)
        assert engine.notices() == []
    assert replayed(gpu) == 0
    # Once with our layers, once with our kernels for norms and the like, and once without.
    assert [graphs.abandoned for graphs in gpu.graphs_made] == [1, 1, 1]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_wrong_replay_is_reported_and_not_used(
    family: str, gpu, without, tmp_path: Path, moechat_home: Path
) -> None:
    write_tiny_checkpoint(tmp_path / family, config_of(family))
    passes = [PROMPT, TOKENS[:5], *each(TOKENS[:3])]
    with without(tmp_path / family, gpu) as engine:
        expected, _ = feed(engine, passes)
    with load(tmp_path / family, gpu) as engine:

        def frozen(_, __, out):
            recording = bool(gpu.graphs_made) and gpu.graphs_made[-1].recording is not None
            return out + (0.5 if recording else 0.0)

        engine.loaded.model.model.layers[0].self_attn.o_proj.register_forward_hook(frozen)
        found, _ = feed(engine, passes)
        assert error_of(found, expected) < TOLERANCE
        (note,) = engine.notices()
        assert "a replay differed from the model's own pass by" in note
    assert replayed(gpu) == 3 * 3  # one token: with our layers, with our norms and the like, and without


def test_a_python_counter_frozen_by_recording_is_detected(model: Path, gpu, without) -> None:
    def run(engine):
        passes = 0

        def counted(*_):
            nonlocal passes
            if not gpu.graphs_made or gpu.graphs_made[-1].recording is None:
                passes = layers[0].get_seq_length()

        def shifted(_, __, out):
            return out + 0.1 * passes

        engine.loaded.model.model.embed_tokens.register_forward_hook(counted)
        engine.loaded.model.model.layers[1].self_attn.o_proj.register_forward_hook(shifted)
        cache = engine.decoder.new_cache()
        layers = cache.layers
        return feed(engine, [PROMPT, *each(TOKENS[:6])], cache)[0]

    with without(model, gpu) as engine:
        expected = run(engine)
    with load(model, gpu) as engine:
        assert error_of(run(engine), expected) < TOLERANCE
        assert len(engine.notices()) == 1
    assert replayed(gpu) == 2 * 3 * 3  # two tokens each: with our layers, with our norms, and without


def test_ctrl_c_during_a_replay_leaves_the_cache_unchanged(
    model: Path, gpu, without, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without(model, gpu) as engine:
        expected, _ = feed(engine, [PROMPT, *each(TOKENS[:4])])
    whole = BlockKernels.combine
    with load(model, gpu) as engine:
        _, cache = feed(engine, [PROMPT, *each(TOKENS[:2])])
        calls = []

        def combine(*arguments):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            whole(*arguments)

        monkeypatch.setattr(BlockKernels, "combine", combine)
        with pytest.raises(KeyboardInterrupt):
            feed(engine, each(TOKENS[2:3]), cache)
        monkeypatch.undo()
        assert [layer.get_seq_length() for layer in cache.layers] == [7, 7]
        found, _ = feed(engine, each(TOKENS[2:4]), cache)
        assert engine.notices() == []
    assert error_of(found, expected[3:]) < TOLERANCE


def test_ctrl_c_while_recording_postpones_the_recording(
    model: Path, gpu, without, monkeypatch: pytest.MonkeyPatch
) -> None:
    from interpreted_graph import InterpretedGraph

    with without(model, gpu) as engine:
        expected = answer(engine, PROMPT)
    whole = InterpretedGraph.begin

    def begin(graph):
        whole(graph)
        if len(graph.graphs.made) == 2:
            raise KeyboardInterrupt

    with load(model, gpu) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(InterpretedGraph, "begin", begin)
            with pytest.raises(KeyboardInterrupt):
                answer(engine, PROMPT)
        assert answer(engine, PROMPT) == expected
        assert engine.notices() == []
    assert replayed(gpu) > 0


def test_infinite_keys_of_one_answer_do_not_reach_the_next(model: Path, gpu, without) -> None:
    """Masked slots are multiplied by zero, which infinity survives."""
    with without(model, gpu) as engine:
        expected = answer(engine, PROMPT)
    with load(model, gpu) as engine:
        _, cache = feed(engine, [PROMPT, *each(TOKENS)])
        with torch.inference_mode():
            for layer in cache.layers:
                for tensor in layer._reserved:
                    tensor.fill_(torch.inf)
        del cache, layer, tensor
        assert answer(engine, PROMPT) == expected
        assert engine.notices() == []
    assert len(gpu.graphs_made) == 1


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_running_out_of_memory_while_recording_frees_some_and_records_later(
    model: Path, gpu, without, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, failures = InterpretedGraph.begin, [1]

    def run_out(self) -> None:
        begin(self)
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("as wanted")

    with without(model, gpu) as engine:
        expected = answer(engine, PROMPT)
    monkeypatch.setattr(InterpretedGraph, "begin", run_out)
    with load(model, gpu) as engine:
        pages = engine.loaded.near.pages
        assert answer(engine, PROMPT) == expected
        assert engine.loaded.near.pages < pages, "experts have made room"
        assert not engine.loaded.decoder.off
    assert replayed(gpu) > 0


def test_rounding_differences_of_many_layers_are_tolerated(model: Path, gpu) -> None:
    with load(model, gpu) as engine:
        decoder = engine.loaded.decoder
        after = [decoder._allowed(place) for place in (0, 1, 47)]
    assert after == pytest.approx([1e-4, 1e-4, 4.9e-4], rel=0.01)


def test_a_deterministic_engine_replays_nothing(model: Path, gpu) -> None:
    with load(model, gpu, deterministic=True) as engine:
        assert not isinstance(engine.loaded.decoder, GraphDecoder)


def test_an_answer_does_not_depend_on_what_was_recorded_before_it(model: Path, gpu) -> None:
    with load(model, gpu, system="moepic") as engine:  # the CPU computes none
        # Recorded, compared and replayed; then replayed alone. The first cache is gone by then.
        first = feed(engine, [PROMPT, *each(TOKENS)])[0]
        second = feed(engine, [PROMPT, *each(TOKENS)])[0]
        assert torch.equal(first, second)


def test_a_replay_makes_a_fraction_of_the_torch_calls(
    model: Path, gpu, without, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the experts take is the same with graphs and without.
    monkeypatch.setattr(GpuExpertLayer, "answer", _no_experts)

    def calls(engine) -> int:
        # Two replays are compared.
        _, cache = feed(engine, [PROMPT, *each([4, 6])])
        with _Count() as count:
            feed(engine, each([8]), cache)
        return count.calls

    with without(model, gpu) as engine:
        before = calls(engine)
    with load(model, gpu) as engine:
        after = calls(engine)
    assert after < before / 8
