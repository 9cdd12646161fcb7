"""Replays over attention caches with states, which every pass overwrites (see ``interpreted_graph.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from families import tiny_family
from test_graphs import PROMPT, TOKENS, answer, each, error_of, feed, load, replayed
from tiny import write_tiny_checkpoint
from transformers.cache_utils import LinearAttentionLayer

from moechat.config import RUN_AHEAD_VARIABLE
from moechat.models import packed_rows
from moechat.models.state_layer import StateLayer
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
    assert error_of(found, expected) < TOLERANCE
    if not whole:
        assert replayed(gpu) == len(TOKENS) * graphs
    # Two are compared with passes, and two with tokens whose layers the host launches.
    assert sum(graphs.all_replayed for graphs in gpu.graphs_made) > 0
    states = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    theirs = [layer for layer in wanted.layers if isinstance(layer, StateLayer)]
    assert states
    for ours, other in zip(states, theirs, strict=True):
        for tensor, reference in zip(ours.tensors(), other.tensors(), strict=True):
            assert error_of(tensor, reference) < TOLERANCE


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


def test_one_recording_serves_later_answers(model: Path, gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPT, TOKENS, [*PROMPT, *TOKENS], TOKENS]

    def run(engine):
        return [answer(engine, prompt, 6) for prompt in prompts]

    expected = without_graphs(model, gpu, monkeypatch, run)
    with load(model, gpu) as engine:
        found = run(engine)
        assert engine.notices() == []
        made = [len(graphs.made) for graphs in gpu.graphs_made]
        assert run(engine) == found == expected
    assert [len(graphs.made) for graphs in gpu.graphs_made] == made


def test_a_wrong_replay_leaves_the_states_as_they_were(
    model: Path, gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = [PROMPT, *each(TOKENS[:3])]
    expected = without_graphs(model, gpu, monkeypatch, lambda engine: feed(engine, passes)[0])
    with load(model, gpu) as engine:

        def wrong(_, __, out):
            recording = bool(gpu.graphs_made) and gpu.graphs_made[-1].recording is not None
            return out + (0.5 if recording else 0.0)

        engine.loaded.model.get_input_embeddings().register_forward_hook(wrong)
        found, _ = feed(engine, passes)
        (note,) = engine.notices()
        assert "a replay differed from the model's own pass by" in note
    assert error_of(found, expected) < TOLERANCE


def test_a_failed_recording_leaves_the_states_as_they_were(
    model: Path, gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = [PROMPT, *each(TOKENS[:3])]
    expected = without_graphs(model, gpu, monkeypatch, lambda engine: feed(engine, passes)[0])
    with load(model, gpu) as engine:
        # Waits for the GPU, as a family may.
        engine.loaded.model.model.layers[-1].register_forward_hook(
            lambda _, __, out: out if out.sum() > 0 else +out
        )
        found, _ = feed(engine, passes)
        (note,) = engine.notices()
        assert "not permitted when stream is capturing" in note
    assert error_of(found, expected) < TOLERANCE


def test_states_that_move_are_not_replayed(checkpoints, gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [PROMPT, *each(TOKENS[:4])]
    own, model = LinearAttentionLayer.update_recurrent_state, checkpoints("kimi_linear")

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


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_without_memory_for_copies_of_states_graphs_are_dropped(
    when: int, gpu, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the recording, of the first comparison before and after its replay, and of the second."""
    passes, model = [PROMPT, *each(TOKENS[:4])], checkpoints("lfm2_moe")
    expected = without_graphs(model, gpu, monkeypatch, lambda engine: feed(engine, passes)[0])
    own, calls = NextToken.copies, []

    def copies(token):
        calls.append(token.position)
        if len(calls) == when + 1:
            raise torch.OutOfMemoryError
        return own(token)

    monkeypatch.setattr(NextToken, "copies", copies)
    with load(model, gpu) as engine:
        found, _ = feed(engine, passes)
        (note,) = engine.notices()
        assert "does not suffice for copies of this model's states" in note
        assert len(calls) == when + 1
    assert error_of(found, expected) < TOLERANCE
