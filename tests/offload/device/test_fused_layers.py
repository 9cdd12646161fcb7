"""Whole layers of recorded passes, in a few launches (see ``interpreted_graph.py``)."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from families import tiny_family
from interpreted_graph import Launch, Recorder
from test_fused_steps import PROMPT, TOKENS, config_of, feed, load
from tiny import tiny_config, write_tiny_checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from moechat.config import RUN_AHEAD_VARIABLE
from moechat.configurator import gpu_pattern
from moechat.models.decode import plain_layer
from moechat.models.decode.angles import angle_counts
from moechat.models.decode.norms import Norm
from moechat.offload import fused_layers
from moechat.offload.fused_layers import Sums
from moechat.offload.fused_steps import recognise_steps
from moechat.offload.kernels import layer_steps

TOLERANCE = 1e-5
# Enough tokens for recording again, twice.
PASSES = [PROMPT, *([token] for token in [*TOKENS, *TOKENS])]
# Families whose layers are computed as a whole, and what a feed-forward part launches, without experts.
ROUTED = ["products", "routed_request"]
FAMILIES = {
    "qwen3_moe": ROUTED,
    "mixtral": ROUTED,
    "gpt_oss": ROUTED,
    "glm4_moe": None,  # shared experts, and a router of groups
    "qwen2_moe": None,  # shared experts
    # Those too, with linear attention, and gates of attention.
    "qwen3_next": None,
    "qwen3_5_moe_text": None,
}
DENSE = ["rms_norm", "products", "heads", "attend", "merge", "products", "rms_norm"]
EXPERTS = ["look_up", "blocks", "combine"]


def launched(graph) -> list[str]:
    """Names of the kernels in a graph, and of torch's operations that compute."""
    names = []
    for operation in graph.operations:
        if isinstance(operation, Launch):
            names.append(operation.executor.fn.__name__)
        elif any(operation.fresh) or operation.function._schema.is_mutable:
            names.append(operation.function.overloadpacket.__name__)
    # Memory, and the copy of a request to the host's, which is no kernel.
    return [name for name in names if not name.startswith("empty") and name not in ("full", "copy_")]


def family_config(family: str):
    if family.startswith(("qwen3_next", "qwen3_5")):
        return tiny_family(family)
    if family in ("glm4_moe", "qwen2_moe"):
        return tiny_config(family, 0, **({"moe_intermediate_size": 64} if family == "glm4_moe" else {}))
    return config_of(family)


@pytest.mark.parametrize(
    ("family", "bits"), [*((family, 16) for family in FAMILIES), ("qwen3_moe", 8), ("gpt_oss", 8)]
)
def test_layers_of_families_are_a_few_launches_with_the_same_logits(
    family: str, bits: int, gpu, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_checkpoint(tmp_path / family, family_config(family))
    with monkeypatch.context() as patch:
        patch.setenv("MOECHAT_CUDA_GRAPHS", "0")
        with load(tmp_path / family, gpu, kv_bits=bits) as engine:
            expected = feed(engine, PASSES)
    with load(tmp_path / family, gpu, kv_bits=bits) as engine:
        found = feed(engine, PASSES)
        layers = engine.loaded.decoder._steps.layers
        assert len(layers) == len(engine.loaded.model.model.layers)
        assert all(layer.follower is not None for layer in layers.values())
        assert engine.notices() == []
        dense = [*DENSE[:3], *(["append"] if bits == 8 else []), *DENSE[3:]]
        if FAMILIES[family] is not None:
            one = [*dense, *FAMILIES[family]]
            pieces, complete = gpu.graphs_made[0].made[:3], gpu.graphs_made[0].made[3]
            assert launched(pieces[0])[-len(one) :] == one
            assert launched(pieces[1]) == one
            assert launched(pieces[2]) == ["rms_norm", "linear"]
            every = [*one, *EXPERTS]
            assert launched(complete)[-2 * len(every) :] == [*every, *every]
            assert bits == 8 or len(one) == gpu_pattern.DENSE_KERNELS
            assert len(EXPERTS) == gpu_pattern.LOOKUP_KERNELS + gpu_pattern.EXPERT_KERNELS + 1
    # 8 bits: a key may be rounded to the next code.
    assert float((found - expected).abs().max() / expected.abs().max()) < (TOLERANCE if bits == 16 else 2e-3)


@contextmanager
def loaded(path: Path, gpu, config, **more):
    """A loaded model."""
    write_tiny_checkpoint(path / "tiny", config)
    with load(path / "tiny", gpu, **more) as engine:
        yield engine.loaded.model


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_recognised_in_every_type(
    family: str, dtype: str, gpu, tmp_path: Path, moechat_home: Path
) -> None:
    with loaded(tmp_path, gpu, family_config(family), dtype=dtype) as model:
        before = {name: dict(vars(module)) for name, module in model.named_modules()}
        layers = recognise_steps(model).layers
        if (family, dtype) == ("gpt_oss", "float16"):
            assert model.model.norm.weight.dtype is torch.float32, "transformers keeps it so"
            assert layers == {}
            return
        assert list(layers) == list(model.model.layers)
        routed = [layer.router is not None for layer in layers.values()]
        assert routed == [FAMILIES[family] is not None] * len(routed)
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("family", ["granitemoe", "phimoe", "deepseek_v2", "minimax", "flex_olmo", "olmoe"])
def test_layers_of_another_kind_are_left_alone(family: str, gpu, tmp_path: Path, moechat_home: Path) -> None:
    with loaded(tmp_path, gpu, tiny_config(family)) as model:
        assert recognise_steps(model).layers == {}


def test_a_layer_that_is_not_its_parts_does_not_agree(gpu, tmp_path: Path, moechat_home: Path) -> None:
    with loaded(tmp_path, gpu, config_of("qwen3_moe")) as model:
        found = recognise_steps(model)
        layer = model.model.layers[1]
        (angles,), fused = angle_counts(model), found.layers[layer]
        plain, rule = fused.known, fused.router.rule
        assert plain_layer.agrees(layer, plain, rule, angles)
        others = [
            replace(plain, scaling=plain.scaling * 1.5),
            replace(plain, head_norms=None),
            replace(plain, before=Norm(0.5, 0.0, True)),
            replace(plain, after=Norm(0.5, 0.0, True)),
            replace(plain, rotate=lambda q, k, cos, sin: (q, k)),
            replace(plain, kinds=frozenset()),
            replace(plain, index=0),
        ]
        assert [plain_layer.agrees(layer, other, rule, angles) for other in others] == [False] * len(others)
        assert not plain_layer.agrees(layer, plain, replace(rule, order=(1, 0, 2)), angles)


def test_a_layer_whose_code_does_more_is_left_alone(
    gpu, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No probe comes near this limit.
    own = Qwen3MoeDecoderLayer.forward

    def forward(self, hidden_states: torch.Tensor, *rest, **named):
        return own(self, hidden_states, *rest, **named).clamp(-1e6, 1e6)

    with loaded(tmp_path, gpu, config_of("qwen3_moe")) as model:
        assert recognise_steps(model).layers
        monkeypatch.setattr(Qwen3MoeDecoderLayer, "forward", forward)
        assert not recognise_steps(model).layers


def test_sums_of_layers_are_added_at_once_if_the_model_does_more_with_them(
    gpu, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(tmp_path, gpu, config_of("qwen3_moe")) as model:
        monkeypatch.setattr(fused_layers, "only_calls_layers", lambda _: False)
        layers = recognise_steps(model).layers
        assert [layer.follower for layer in layers.values()] == [None, None]


def test_a_sum_is_computed_by_the_next_norm_or_when_somebody_asks() -> None:
    sums, norm = Sums(), Norm(1e-6, 0.0, True)
    x, added, weight = torch.randn(3, 8).split(1)
    first, second = sums.later(x, added), sums.later(added, x)
    assert sums
    assert sums.settled(first) is first
    assert torch.equal(first, x + added)
    normed = sums.normed(second, weight[0].contiguous(), norm)
    assert torch.equal(second, x + added)
    torch.testing.assert_close(normed, norm.apply(second, weight[0]))
    assert not sums
    assert sums.settled(x) is x
    torch.testing.assert_close(sums.normed(x, weight[0].contiguous(), norm), norm.apply(x, weight[0]))


def fails(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("no such instruction")


def unrotated(states, *_: object, gated: bool) -> torch.Tensor:
    assert not gated
    q = states[0]
    return q.view(1, -1, 1, q.numel() // 4)


@pytest.mark.parametrize(
    ("name", "broken", "why"),
    [
        ("products", fails, "no such instruction"),
        ("place_heads", unrotated, "a replay differed from the model's own"),
    ],
)
def test_layers_that_fail_or_differ_are_computed_step_by_step(
    name: str,
    broken,
    why: str,
    gpu,
    tmp_path: Path,
    moechat_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    write_tiny_checkpoint(tmp_path / "tiny", config_of("qwen3_moe"))
    with load(tmp_path / "tiny", gpu) as engine:
        expected = feed(engine, PASSES)
    monkeypatch.setattr(layer_steps, name, broken)
    with load(tmp_path / "tiny", gpu) as engine:
        found = feed(engine, PASSES)
        decoder = engine.loaded.decoder
        assert decoder._recording is not None, "graphs are still there"
        assert decoder._steps.norms
        assert not decoder._steps.layers
        (note,) = engine.notices()
        assert note.startswith("layers are computed step by step, which is slower")
        assert why in note
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def test_an_output_that_the_next_layer_does_not_read_is_reported(
    gpu, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model whose last norm somebody has replaced."""
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    write_tiny_checkpoint(tmp_path / "tiny", config_of("qwen3_moe"))
    with load(tmp_path / "tiny", gpu) as engine:
        norm = engine.loaded.model.model.norm
        norm.forward = norm.forward
        expected = feed(engine, PASSES)
        (note,) = engine.notices()
        assert "the output of a layer was not read" in note
    with load(tmp_path / "tiny", gpu) as engine:
        found = feed(engine, PASSES)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def test_hooks_of_modules_that_are_bypassed_are_called(
    gpu, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    write_tiny_checkpoint(tmp_path / "tiny", config_of("qwen3_moe"))
    with load(tmp_path / "tiny", gpu) as engine:
        seen = []
        engine.loaded.model.model.layers[1].self_attn.register_forward_hook(
            lambda *_: seen.append(torch.is_inference_mode_enabled())
        )
        feed(engine, [PROMPT, *([token] for token in TOKENS)])
        assert len(seen) >= 4  # the prompt, the recording and two comparisons
        assert engine.notices() == []


def grow(hidden: torch.Tensor) -> None:
    hidden[..., 0].mul_(1.001)


@pytest.mark.parametrize("place", ["layer", "follower", "norm"])
def test_hooks_see_and_may_change_what_layers_return(
    place: str, gpu, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than what a comparison of replays would notice."""
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    write_tiny_checkpoint(tmp_path / "tiny", config_of("qwen3_moe"))
    found = []
    for graphs in ("1", "0"):
        monkeypatch.setenv("MOECHAT_CUDA_GRAPHS", graphs)
        with load(tmp_path / "tiny", gpu) as engine:
            base = engine.loaded.model.model
            if place == "layer":
                base.layers[0].register_forward_hook(lambda _, __, out: grow(out))
            else:
                reader = base.norm if place == "norm" else base.layers[1]
                reader.register_forward_pre_hook(lambda _, given: grow(given[0]))
            found.append(feed(engine, PASSES))
            assert engine.notices() == []
    assert float((found[0] - found[1]).abs().max() / found[1].abs().max()) < 3e-6


def builds(operations) -> set[tuple[object, ...]]:
    """What the compiler has to know of the kernels among some launches."""
    found = set()
    for operation in operations:
        if isinstance(operation, Launch):
            constants = {name: str(value) for name, value in operation.keywords.items() if name != "warmup"}
            types = [str(each.dtype) for each in operation.arguments if isinstance(each, torch.Tensor)]
            found.add((operation.executor.fn.__name__, tuple(sorted(constants.items())), tuple(types)))
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe", "qwen3_next"])
def test_loading_builds_what_a_token_of_two_graphs_launches(
    family: str, gpu, tmp_path: Path, moechat_home: Path
) -> None:
    write_tiny_checkpoint(tmp_path / family, family_config(family))
    given = []
    gpu.warm = given.extend
    with load(tmp_path / family, gpu) as engine:
        feed(engine, PASSES)
        token = builds(operation for graph in gpu.graphs_made[0].made for operation in graph.operations)
        # A decoded token is the first pass; prompts have other shapes here than the launches.
        with Recorder() as recorder, torch.inference_mode():
            for launch in given:
                launch()
        loading = builds(recorder.operations)
        layers = engine.describe().expert_layers
    names = {name for name, *_ in loading}
    assert {"blocks", "combine", "products", "heads", "attend", "merge", "rms_norm"} <= names
    # Built when a token is recorded: the request of graphs that wait for the host, with its inputs.
    left = {build for build in token - loading if build[0] not in ("look_up", "routed_request")}
    assert left == set()
    complete = builds(gpu.graphs_made[0].made[layers + 1].operations)
    assert {build[0] for build in complete - loading} == {"look_up"}
