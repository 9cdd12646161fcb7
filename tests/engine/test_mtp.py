"""The head for multi-token prediction: from checkpoint to store, and as transformers computes it."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from gguf.constants import GGMLQuantizationType as Kind
from gguf_families import FAMILIES as GGUF_FAMILIES
from gguf_family import gguf_tensors, random_model
from gguf_writing import all_as, write_family
from mtp_support import DEEPSEEK, FAMILIES, NATIVE_HEADS, NO_MTP, write_with_head
from safetensors.torch import load_file, save_file
from transformers import modeling_layers

import moechat
from moechat import MoechatError, StoreDamagedError
from moechat.engine.mtp_entries import MtpEntries
from moechat.loading.stores import repair_store
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.offload.settings import OffloadOptions
from moechat.store.checkpoint import Checkpoint
from moechat.store.conversion import Conversion
from moechat.store.convert import convert
from moechat.store.manifest import mtp_file
from moechat.store.quantizer import make_packer
from moechat.store.store import Store

pytestmark = NO_MTP
TEXT = torch.randint(3, 100, (60,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Any]:
    directory = tmp_path_factory.mktemp("mtp") / request.param
    return (directory, *write_with_head(directory, request.param, eos_token_id=None))


def test_guesses_are_those_of_transformers(written: tuple[Path, Any, Any], home: Path) -> None:
    directory, model, reference = written
    with torch.inference_mode():
        hidden = model.model(torch.tensor([TEXT])).last_hidden_state
    with moechat.load(directory, bits=16, dense_bits=8) as engine, torch.inference_mode():
        head = engine.loaded.mtp
        assert head is not None
        rows = hidden.to(engine.loaded.dtype)
        for fed, end in ((0, 2), (1, 9), (20, 30), (40, 60), (0, 60), (58, 60)):
            cache = head.new_cache(64)
            if fed:
                head.feed(cache, TEXT[1 : 1 + fed], rows[:, :fed])
            (found,) = head.guess(cache, TEXT[1 + fed : end], rows[:, fed : end - 1], 1)
            assert cache.get_seq_length() == end - 1
            positions = torch.arange(1, end)[None]
            ids = torch.tensor([TEXT[1:end]])
            _, (logits,), _ = reference(ids, hidden[:, : end - 1], None, positions, None)
            # Any token as likely as the likeliest, within rounding.
            assert logits[0, found] > logits.max() - 0.02 * logits.std()


def test_later_guesses_follow_from_earlier_ones(written: tuple[Path, Any, Any], home: Path) -> None:
    directory, model, reference = written
    with torch.inference_mode():
        hidden = model.model(torch.tensor([TEXT])).last_hidden_state
    # As exact as heads can be, since rounding can choose another expert.
    with moechat.load(directory, bits=16, dense_bits=8, dtype="float32") as engine, torch.inference_mode():
        head = engine.loaded.mtp
        assert head is not None
        cache = head.new_cache(64)
        found = head.guess(cache, TEXT[1:], hidden.to(engine.loaded.dtype)[:, :-1], 3)
        assert len(found) == 3
        assert cache.get_seq_length() == len(TEXT) - 1
        tokens, states = TEXT[1:], hidden[:, :-1]
        for token in found:
            positions = torch.arange(1, 1 + len(tokens))[None]
            out = reference.forward_layer(0, states, positions, None, input_ids=torch.tensor([tokens]))
            logits = reference._project_to_logits(out[:, -1])
            assert logits[0, token] > logits.max() - 0.1 * logits.std()
            tokens, states = [*tokens, token], torch.cat([states, out[:, -1:]], dim=1)


def test_entries_of_parts_are_those_of_a_whole(written: tuple[Path, Any, Any], home: Path) -> None:
    with moechat.load(written[0], bits=8) as engine, torch.inference_mode():
        head = engine.loaded.mtp
        assert head is not None
        width = engine.loaded.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, 100, (700,), generator=generator).tolist()
        rows = torch.randn((1, len(tokens) - 1, width), generator=generator).to(engine.loaded.dtype)

        def guesses(ends: list[int]) -> list[int]:
            entries = MtpEntries(head, head.new_cache(1024), 0, {})
            for begin, end in zip([0, *ends], [*ends, len(tokens) - 1], strict=True):
                entries.computed(begin, rows[:, begin:end], tokens)
            return entries.guess(tokens, 3)

        wanted = guesses([])
        assert guesses([300, 301, 600]) == guesses([690]) == wanted
        # Rejected tokens leave nothing.
        entries = MtpEntries(head, head.new_cache(1024), 0, {})
        entries.computed(0, rows[:, :-2], tokens)
        entries.computed(len(tokens) - 3, -rows[:, -3:], tokens)
        entries.forget(len(tokens) - 3)
        assert entries.guess(tokens, 3) == []
        entries.computed(len(tokens) - 3, rows[:, -2:], tokens)
        assert entries.guess(tokens, 3) == wanted


# ---- checkpoints and stores


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        found = [key for key in tensors if key.endswith(name) and (".4." in key or key.startswith("mtp"))]
        assert found
        for key in found:
            del tensors[key]

    return change


def wider(tensors: dict[str, torch.Tensor]) -> None:
    key = next(key for key in tensors if key.endswith("layers.4.eh_proj.weight"))
    tensors[key] = torch.zeros((64, 130))


def half(tensors: dict[str, torch.Tensor]) -> None:
    for key in tensors:
        if key.startswith("model.layers.4.mlp.experts."):
            tensors[key] = tensors[key].half()


@pytest.mark.parametrize(
    "change",
    [
        without("eh_proj.weight"),
        without("experts.3.down_proj.weight"),
        without("q_a_proj.weight"),
        wider,
        half,
    ],
)
def test_a_head_that_is_not_whole_is_left_out(
    change: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path, home: Path
) -> None:
    source = tmp_path / "model"
    write_with_head(source, "glm4_moe_lite", eos_token_id=None)
    whole = plan_checkpoint(Checkpoint.open(source))
    assert whole.mtp is not None
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    plan = plan_checkpoint(Checkpoint.open(source))
    assert plan.mtp is None
    assert plan.layers == whole.layers
    assert set(plan.dense_keys) == {key for key in whole.dense_keys if "layers.4." not in key}
    with moechat.load(source, bits=8) as engine:
        assert engine.loaded.mtp is None
        assert len(list(engine.generate(TEXT, max_new_tokens=5))) == 5


def test_a_model_that_also_takes_pictures_has_a_head(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "model"
    write_with_head(source, "qwen3_5_moe_text", eos_token_id=None)
    whole = tiny_family("qwen3_5_moe").to_dict()
    whole["text_config"] = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(whole))
    tensors = {
        key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: each
        for key, each in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with moechat.load(source, bits=8) as engine:
        assert engine.loaded.config.model_type == "qwen3_5_moe"
        assert engine.loaded.mtp is not None


def test_a_store_has_the_head_and_checks_it(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "model"
    write_with_head(source, DEEPSEEK[0], eos_token_id=None)
    checkpoint = Checkpoint.open(source)
    store = convert(checkpoint, plan_checkpoint(checkpoint), tmp_path / "store", bits=4, source_name="x")
    assert store.manifest.mtp is not None
    assert [record.layer for record in store.layers] == [1, 2, 3]
    assert store.expert_layer(store.manifest.mtp.layer).shape == store.geometry.layer_shape
    # Earlier versions read the same manifest: they list all files, and know nothing of this one.
    content = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert mtp_file(0) in content["files"]
    assert mtp_file(0) not in json.dumps(content["layers"])
    path = tmp_path / "store" / mtp_file(0)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreDamagedError, match=mtp_file(0)):
        Store.open(tmp_path / "store").verify()


def test_a_head_takes_only_memory_that_is_left(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model"
    write_with_head(source, "glm4_moe", eos_token_id=None)
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.0}
    with moechat.load(source, bits=8) as engine:
        plan = engine.loaded.plan
        assert plan.mtp > engine.loaded.store.geometry.layer_bytes
        assert ("multi-token prediction", plan.mtp) in [(part.name, part.nbytes) for part in plan.parts]
        assert plan.total <= plan.budget
        wanted = [step.token_id for step in engine.generate(TEXT, **options)]
    monkeypatch.setattr("moechat.loading.mtp._MARGIN", 2 * plan.budget / plan.mtp)
    with moechat.load(source, bits=8) as engine:
        assert engine.loaded.mtp is None
        assert engine.loaded.plan.mtp == 0
        assert [step.token_id for step in engine.generate(TEXT, **options)] == wanted


def test_experts_in_pages_have_no_head(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "model"
    write_with_head(source, "glm4_moe", eos_token_id=None)
    with moechat.load(source, bits=8, offload=OffloadOptions(pages=8)) as engine:
        assert engine.loaded.near is not None
        assert engine.loaded.mtp is None


# ---- GGUF files


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, Kind.F32) for name in ("qwen35moe", "glm4moe", "deepseek2 (V3)")),
        *((name, Kind.Q8_0) for name in ("glm4moe", "deepseek2 (V3)")),
    ],
)
def test_heads_of_gguf_files_are_those_of_transformers(
    name: str, kind: Kind, tmp_path: Path, home: Path
) -> None:
    family = GGUF_FAMILIES[name]
    types = {"layer_types": ["linear_attention"] + 2 * ["full_attention"]} if name == "qwen35moe" else {}
    heads = NATIVE_HEADS if types else {}
    # The last layer becomes that of the head.
    config = family.config(num_hidden_layers=3, **types, **heads)
    model = random_model(config)
    tensors = gguf_tensors(family, model)
    config = family.config(num_hidden_layers=2, **{key: each[:2] for key, each in types.items()}, **heads)
    config.num_mtp_layers = 1
    if types:
        config.mtp_layer_types = ["full_attention"]
    block = model.model.layers[2]
    model.model.layers = model.model.layers[:2]
    model.config = config
    head = modeling_layers.MtpModel(model, 1).eval()
    head.layers[0].mtp_block.load_state_dict(block.state_dict())
    one = 1.0 if types else 0.0  # Qwen's norms add one to their weights, but not those of GGUF files
    with torch.no_grad():
        head.layers[0].eh_proj.weight.normal_(0, 0.1)
    more = head.layers[0].state_dict()
    for own, theirs in (("enorm", "enorm"), ("hnorm", "hnorm"), ("post_norm", "shared_head_norm")):
        more[f"{own}.weight"].add_(0.2 * torch.randn(config.hidden_size))
        tensors[f"blk.2.nextn.{theirs}.weight"] = (more[f"{own}.weight"] + one).numpy()
    tensors["blk.2.nextn.eh_proj.weight"] = more["eh_proj.weight"].numpy()
    # A repetition that is left out.
    tensors["blk.2.nextn.embed_tokens.weight"] = tensors["token_embd.weight"]
    path = tmp_path / "m.gguf"
    changes = {"block_count": 3, "nextn_predict_layers": 1}
    write_family(family, config, tensors, path, all_as(kind), changes=changes)
    text = [token % config.vocab_size for token in TEXT]
    with torch.inference_mode():
        hidden = model.model(torch.tensor([text])).last_hidden_state
    options: dict[str, Any] = {"bits": 16, "dense_bits": 8} if kind is Kind.F32 else {}
    with moechat.load(path, **options) as engine, torch.inference_mode():
        ours = engine.loaded.mtp
        assert ours is not None
        for end in (5, 30, 60):
            cache = ours.new_cache(64)
            (found,) = ours.guess(cache, text[1:end], hidden[:, : end - 1].to(engine.loaded.dtype), 1)
            positions = torch.arange(1, end)[None]
            ids = torch.tensor([text[1:end]])
            _, (logits,), _ = head(ids, hidden[:, : end - 1], None, positions, None)
            assert logits[0, found] > logits.max() - 0.3 * logits.std()


@pytest.mark.parametrize(
    "missing", ["nextn.eh_proj.weight", "nextn.enorm.weight", "ffn_up_exps.weight", "experts"]
)
def test_a_gguf_file_whose_head_is_not_whole_is_read_without_it(
    missing: str, tmp_path: Path, home: Path
) -> None:
    family = GGUF_FAMILIES["glm4moe"]
    config = family.config(num_hidden_layers=3)
    tensors = gguf_tensors(family, random_model(config))
    size = config.hidden_size
    tensors["blk.2.nextn.eh_proj.weight"] = torch.ones((size, 2 * size)).numpy()
    for name in ("enorm", "hnorm", "shared_head_norm"):
        tensors[f"blk.2.nextn.{name}.weight"] = torch.ones(size).numpy()
    if missing == "experts":
        for name in [name for name in tensors if name.startswith("blk.2.") and "_exps" in name]:
            tensors[name] = tensors[name][:-1]
    else:
        del tensors[f"blk.2.{missing}"]
    path = tmp_path / "m.gguf"
    changes = {"block_count": 3, "nextn_predict_layers": 1}
    write_family(family, config, tensors, path, all_as(Kind.F32), changes=changes)
    with moechat.load(path, bits=8) as engine:
        assert engine.loaded.mtp is None
        assert len(list(engine.generate([5, 6, 7], max_new_tokens=4))) == 4


# ---- what goes wrong


def test_a_head_that_cannot_be_read_is_not_used(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model"
    write_with_head(source, "glm4_moe", eos_token_id=None)

    def refused(*_: Any, **__: Any) -> None:
        raise MoechatError("no memory")

    monkeypatch.setattr("moechat.loading.mtp.load_weights", refused)
    seen: list[str] = []
    with moechat.load(source, bits=8, progress=lambda step: seen.append(step.detail)) as engine:
        assert engine.loaded.mtp is None
        assert engine.loaded.plan.mtp == 0
        assert len(list(engine.generate(TEXT, max_new_tokens=4))) == 4
    assert "the head for multi-token prediction is not used: no memory" in seen


def test_a_calibrated_conversion_that_lacks_only_the_head_goes_on(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model"
    write_with_head(source, "glm4_moe", eos_token_id=None)
    checkpoint = Checkpoint.open(source)
    plan = plan_checkpoint(checkpoint)

    class Calibration:
        runs = 0

        def run(self, convert_layer: Any, last: int) -> bool:
            Calibration.runs += 1
            packer = make_packer(plan.geometry(4), "calibrated")
            for ordinal in range(last + 1):
                convert_layer(ordinal, lambda: lambda _, *arguments: packer(*arguments))
            return True

    def converted() -> Store:
        return convert(
            checkpoint, plan, tmp_path / "store", bits=4, source_name="x", calibration=Calibration()
        )

    own = Conversion._write

    def interrupted(self: Any, planned: Any, *arguments: Any, **named: Any) -> None:
        if planned.name == mtp_file(0):
            raise KeyboardInterrupt
        own(self, planned, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            converted()
    assert Calibration.runs == 1
    assert converted().manifest.mtp is not None
    assert Calibration.runs == 1


def test_stores_without_a_head_are_repaired_without_one(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "model"
    write_with_head(source, "glm4_moe", eos_token_id=None)
    checkpoint = Checkpoint.open(source)
    plan = plan_checkpoint(checkpoint, heads=False)
    store = convert(checkpoint, plan, tmp_path / "store", bits=8, source_name="x")
    assert store.manifest.mtp is None
    damaged = tmp_path / "store" / store.layers[0].file
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    touched = source / "model.safetensors"
    os.utime(touched, ns=(1, 1))  # the same content, as copied
    repaired = repair_store(tmp_path / "store", [store.layers[0].file], source, lambda _: None)
    assert repaired.manifest.files == store.manifest.files
    assert damaged.read_bytes() == data


def test_an_interrupted_answer_leaves_no_more_entries_than_tokens(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "model"
    write_with_head(source, "qwen3_next", max_position_embeddings=4096, eos_token_id=None)
    prompt = (TEXT * 40)[:2300]
    with moechat.load(source, bits=8) as engine:
        for _ in range(3):
            steps = engine.generate_in_turns(prompt, max_new_tokens=60)
            for _ in range(20):
                next(steps)
            assert steps._held is not None
            steps._held.whole = False  # as if a pass was interrupted
            del steps
            held = engine.decoder.prompt_cache.latest
            assert held is not None
            assert held.mtp.get_seq_length() <= max(0, len(held.tokens) - 1)


def test_a_closed_engine_and_an_ended_answer_keep_no_head(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "model"
    write_with_head(source, "glm4_moe", eos_token_id=None)
    engine = moechat.load(source, bits=8)
    answer = engine.generate_in_turns(TEXT, max_new_tokens=10)
    list(answer)
    head = weakref.ref(engine.loaded.mtp)
    assert head() is not None
    engine.close()
    gc.collect()
    assert head() is None
    assert answer.ended
