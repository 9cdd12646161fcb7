"""Replays over attention caches with states, which every pass overwrites (see ``interpreted_graph.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from families import tiny_family
from test_graphs import PROMPT, TOKENS, each, error_of, feed, load, replayed
from tiny import write_tiny_checkpoint
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionLayer

from moechat.config import RUN_AHEAD_VARIABLE
from moechat.models import packed_rows
from moechat.models.state_layer import StateLayer
from moechat.offload.kernels import gated_delta
from moechat.offload.kernels.device_rows import DeviceRows
from moechat.offload.next_token import NextToken

# Gated delta rule, convolutions alone, Mamba beside layers without a cache, and a decay for each element.
FAMILIES = ["qwen3_next", "lfm2_moe", "nemotron_h", "kimi_linear"]
OTHERS = ["qwen3_5_moe_text", "jamba", "granitemoehybrid", "bailing_hybrid"]
# Sums of a few layers more than those of test_graphs.py.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, moechat_home: Path):
    """Checkpoints of families, each written once."""
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("states") / family
            write_tiny_checkpoint(made[family], tiny_family(family))
        return made[family]

    return checkpoint


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, checkpoints) -> Path:
    return checkpoints(request.param)


def without_graphs(model: Path, gpu, monkeypatch: pytest.MonkeyPatch, run, **arguments):
    """What ``run`` returns for an engine without graphs."""
    with monkeypatch.context() as patch:
        patch.setenv("MOECHAT_CUDA_GRAPHS", "0")
        with load(model, gpu, **arguments) as engine:
            return run(engine)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
@pytest.mark.parametrize("whole", [False, True])
def test_replays_overwrite_states_as_passes_do(
    family: str, whole: bool, gpu, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    passes = [PROMPT, *each(TOKENS)]
    expected, wanted = without_graphs(
        checkpoints(family), gpu, monkeypatch, lambda engine: feed(engine, passes)
    )
    assert not gpu.graphs_made
    with load(checkpoints(family), gpu) as engine:
        found, cache = feed(engine, passes)
        graphs = engine.describe().expert_layers + 1
        assert engine.notices() == []
        states = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
        kept = [[tensor.clone() for tensor in layer.tensors()] for layer in states]
        made, count = [len(each.made) for each in gpu.graphs_made], replayed(gpu)
        # The next answer begins with states of zeros, in the same memory, over the same graphs.
        del cache, states
        again, _ = feed(engine, passes)
        assert error_of(again, expected) < TOLERANCE
        assert [len(each.made) for each in gpu.graphs_made] == made
    assert error_of(found, expected) < TOLERANCE
    if not whole:
        assert count == len(TOKENS) * graphs
    # Two are compared with passes, and two with tokens whose layers the host launches.
    assert sum(graphs.all_replayed for graphs in gpu.graphs_made) > 0
    theirs = [layer.tensors() for layer in wanted.layers if isinstance(layer, StateLayer)]
    assert kept
    for ours, other in zip(kept, theirs, strict=True):
        for tensor, reference in zip(ours, other, strict=True):
            assert error_of(tensor, reference) < TOLERANCE


def test_layers_of_states_that_hold_none_are_replayed(
    gpu, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 creates such layers for a model's feed-forward layers."""
    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "dummy", LinearAttentionLayer)
    model, passes = checkpoints("nemotron_h"), [PROMPT, *each(TOKENS)]
    expected, _ = without_graphs(model, gpu, monkeypatch, lambda engine: feed(engine, passes))
    with load(model, gpu) as engine:
        found, cache = feed(engine, passes)
        assert engine.notices() == []
        assert any(isinstance(layer, StateLayer) and not layer.tensors() for layer in cache.layers)
    assert error_of(found, expected) < TOLERANCE
    assert replayed(gpu) > 0


def test_states_are_replayed_where_blocks_are_missing(
    model: Path, gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where graphs would be replayed again for the same token, which would overwrite states twice."""
    passes = [PROMPT, *each(TOKENS)]

    def run(engine):
        pages, blocks = engine.loaded.near.pages, engine.loaded.near.blocks
        assert pages < blocks
        return feed(engine, passes)[0]

    expected = without_graphs(model, gpu, monkeypatch, run, pages=4)
    for ahead in ("0", "1"):
        monkeypatch.setenv(RUN_AHEAD_VARIABLE, ahead)
        before = replayed(gpu)
        with load(model, gpu, pages=4) as engine:
            assert error_of(run(engine), expected) < TOLERANCE
            assert engine.notices() == []
            assert replayed(gpu) - before == len(TOKENS) * (engine.describe().expert_layers + 1)


def test_states_that_move_are_not_replayed(checkpoints, gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [PROMPT, *each(TOKENS[:4])]
    own, model = LinearAttentionLayer.update_recurrent_state, checkpoints("bailing_hybrid")

    def moving(layer, *arguments, **named):
        made = own(layer, *arguments, **named)
        layer.recurrent_states[0] = made.clone()
        return layer.recurrent_states[0]

    expected = without_graphs(model, gpu, monkeypatch, lambda engine: feed(engine, passes)[0])
    monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", moving)
    with load(model, gpu) as engine:
        found, _ = feed(engine, passes)
        (note,) = engine.notices()
        assert "do not stay where they are" in note
    assert error_of(found, expected) < TOLERANCE


def test_a_new_cache_begins_with_states_of_zeros(checkpoints, gpu) -> None:
    with load(checkpoints("qwen3_next"), gpu) as engine:
        found, cache = feed(engine, [PROMPT, *each(TOKENS[:3])])
        addresses = [tensor.data_ptr() for tensor in cache.layers[0].tensors()]
        del cache
        again, cache = feed(engine, [PROMPT, *each(TOKENS[:3])])
        assert [tensor.data_ptr() for tensor in cache.layers[0].tensors()] == addresses
    assert torch.equal(found, again)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe"])
def test_states_stand_beside_packed_keys_and_weights(
    family: str, gpu, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stand-in is a "cpu" to torch: its prompts and passes pack and unpack by the GPU's kernels too.
    monkeypatch.setitem(packed_rows._CODECS, "cpu", DeviceRows())
    packed = {"kv_bits": 8, "dense_bits": 8}
    passes = [PROMPT, *each(TOKENS[:3])]
    expected = without_graphs(
        checkpoints(family), gpu, monkeypatch, lambda engine: feed(engine, passes)[0], **packed
    )
    with load(checkpoints(family), gpu, **packed) as engine:
        found, _ = feed(engine, passes)
        assert engine.notices() == []
        assert replayed(gpu) > 0
    assert error_of(found, expected) < TOLERANCE


@pytest.mark.parametrize("when", [5, 6, 7])
def test_without_memory_for_copies_of_states_the_host_launches_every_layer(
    when: int, gpu, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the recording of a whole token, and of the first that is compared, before and after its replay."""
    passes, model = [PROMPT, *each(TOKENS)], checkpoints("lfm2_moe")
    expected = without_graphs(model, gpu, monkeypatch, lambda engine: feed(engine, passes)[0])
    without_memory(monkeypatch, when)
    with load(model, gpu) as engine:
        found, _ = feed(engine, passes)
        (note,) = engine.notices()
        assert note.startswith("the GPU waits for the host at every expert layer")
        assert not engine.loaded.decoder.off
    assert error_of(found, expected) < TOLERANCE


@pytest.mark.parametrize("ahead", [None, "0"])
def test_states_that_a_replay_does_not_write_are_noticed(
    ahead: str | None, gpu, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token's logits are right then, and the comparison's pass would begin from the same states."""
    if ahead is not None:
        monkeypatch.setenv(RUN_AHEAD_VARIABLE, ahead)
    passes, model = [PROMPT, *each(TOKENS)], checkpoints("qwen3_next")
    expected = without_graphs(model, gpu, monkeypatch, lambda engine: feed(engine, passes)[0])
    own = gated_delta.step

    def stale(delta, rows, before, state):
        kept = before.clone(), state.clone()
        made = own(delta, rows, before, state)
        before.copy_(kept[0])
        state.copy_(kept[1])
        return made

    monkeypatch.setattr(gated_delta, "step", stale)
    with load(model, gpu) as engine:
        found, _ = feed(engine, passes)
        (note,) = engine.notices()
        assert note.startswith("layers are computed step by step, which is slower: a replay differed")
    assert error_of(found, expected) < TOLERANCE


def wrong(_, gpu):
    """Replays differ from passes."""
    return lambda _, __, out: out + (0.5 if gpu.graphs_made and gpu.graphs_made[-1].recording else 0.0)


def waiting(_, __):
    """Waits for the GPU, as a family may: that cannot be recorded."""
    return lambda _, __, out: out if out.sum() > 0 else +out


def without_memory(patch, which: int):
    """The memory does not suffice for one of the copies: of the recording, and of two comparisons, before and
    after their replays.
    """
    own, calls = NextToken.copies, []

    def copies(token):
        calls.append(token.position)
        if len(calls) == which + 1:
            raise torch.OutOfMemoryError
        return own(token)

    patch.setattr(NextToken, "copies", copies)


@pytest.mark.parametrize("way", ["wrong", "waiting", *range(5)])
def test_a_recording_that_is_not_used_leaves_the_states_as_they_were(
    way: str | int, model: Path, gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = [PROMPT, *each(TOKENS[:4])]
    expected = without_graphs(model, gpu, monkeypatch, lambda engine: feed(engine, passes)[0])
    if isinstance(way, int):
        without_memory(monkeypatch, way)
    with load(model, gpu) as engine:
        if way == "wrong":
            engine.loaded.model.get_input_embeddings().register_forward_hook(wrong(engine, gpu))
        elif way == "waiting":
            engine.loaded.model.model.layers[-1].register_forward_hook(waiting(engine, gpu))
        found, _ = feed(engine, passes)
        (note,) = engine.notices()
        assert {
            "wrong": "a replay differed from the model's own pass by",
            "waiting": "not permitted when stream is capturing",
        }.get(way, "does not suffice for copies of this model's states") in note
    assert error_of(found, expected) < TOLERANCE
