"""Models from GGUF files: the same stores, words and logits as from the checkpoint that a file decodes to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_encoders import encode
from gguf_support import ARCHITECTURES, save_model, tensors_of, write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import moechat
from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.hub.gguf_parts import gguf_parts
from moechat.hub.names import resolve
from moechat.loading.stores import open_store
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.gguf import describe_gguf
from moechat.models.gguf_source import opened_gguf
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.gguf_file import GgufFile
from moechat.store.gguf_header import GgufTensor

DEMO = Path(moechat.__file__).parent / "hub" / "demo"
TOKENS = [5, 17, 30, 42, 77, 12, 9, 33]
FAMILIES = sorted(ARCHITECTURES)


def choose(kind: Kind, down: Kind | None = None) -> Any:
    """Types as llama.cpp gives them: vectors and routers stay float32."""

    def chosen(name: str, shape: tuple[int, ...]) -> Kind:
        if len(shape) == 1 or "ffn_gate_inp" in name:
            return Kind.F32
        return down if down is not None and "ffn_down" in name else kind

    return chosen


def decoded_checkpoint(
    source: Path, target: Path, kind: Kind, down: Kind | None, dense: torch.dtype, experts: torch.dtype
) -> Path:
    """The checkpoint that a GGUF file of these types decodes to, written as safetensors."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, target)
    for file in source.glob("*.safetensors"):
        changed = {}
        for name, tensor in load_file(file).items():
            values = tensor.float().numpy()
            is_expert = ".experts." in name
            if tensor.dim() == 1 or (name.endswith("gate.weight") and not is_expert):
                changed[name] = tensor
                continue
            used = down if down is not None and name.endswith(("w2.weight", "down_proj.weight")) else kind
            back = torch.from_numpy(np.array(gguf.dequantize(encode(values, used), used)))
            changed[name] = back.to(experts if is_expert else dense)
        save_file(changed, target / file.name, metadata={"format": "pt"})
    return target


def stored_tensors(store: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in store.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            found[f"{file.stem}/{name}" if file.name.startswith("experts") else name] = tensor
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("kind", "down"),
    [
        (Kind.Q4_0, None),
        (Kind.Q8_0, None),
        (Kind.Q4_K, Kind.Q6_K),  # as in Q4_K_M
        (Kind.Q6_K, None),
        (Kind.F16, None),
        (Kind.BF16, None),
        (Kind.F16, Kind.Q8_0),
    ],
    ids=lambda kind: kind.name if isinstance(kind, Kind) else "all",
)
def test_its_store_is_that_of_the_checkpoint_it_decodes_to(
    tmp_path: Path, family: str, kind: Kind, down: Kind | None
) -> None:
    source = tmp_path / "source"
    config = save_model(family, source)
    write_gguf(family, config, tensors_of(source), tmp_path / "m.gguf", choose(kind, down))
    floats = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    dense = floats.get(kind, torch.float16)
    experts = floats.get(kind, torch.float32) if down is None else torch.float32
    reference = decoded_checkpoint(source, tmp_path / "decoded", kind, down, dense, experts)
    checkpoint = Checkpoint.open(reference)
    expected = convert(checkpoint, plan_checkpoint(checkpoint), tmp_path / "a", bits=4, source_name="a")
    with opened_gguf(tmp_path / "m.gguf") as opened:
        made = convert(opened, plan_checkpoint(opened), tmp_path / "b", bits=4, source_name="b")
    assert made.geometry == expected.geometry
    theirs, ours = stored_tensors(expected.path), stored_tensors(made.path)
    experts_of = {name for name in theirs if name.startswith("experts")}
    assert experts_of == {name for name in ours if name.startswith("experts")}
    for name in experts_of:
        assert torch.equal(ours[name], theirs[name]), name
    assert made.dense.keys() == expected.dense.keys()
    for name in expected.dense:
        assert made.dense.info(name) == expected.dense.info(name), name
        np.testing.assert_array_equal(made.dense.array(name), expected.dense.array(name), name)
    # Attention keeps its type, whatever experts are, and an encoding its bits.
    encoding = {Kind.F16: None, Kind.BF16: None}.get(kind, kind.name.lower())
    assert made.dense.encoding("lm_head.weight") == encoding
    assert made.manifest.dense_format == (0 if encoding is None else 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, moechat_home: Path) -> None:
    source = tmp_path / "source"
    config = save_model(family, source)
    write_gguf(family, config, tensors_of(source), tmp_path / "m.gguf", choose(Kind.F16))
    reference = decoded_checkpoint(source, tmp_path / "decoded", Kind.F16, None, torch.float16, torch.float16)
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    with moechat.load(tmp_path / "m.gguf", bits=16, dense_bits=16, dtype="float32") as engine:
        ours = torch.as_tensor(np.asarray(engine.logits(TOKENS)))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(DEMO)
    return tokenizer


@pytest.fixture(scope="module")
def with_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with the demo's tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("words")
    tokenizer = byte_tokenizer()
    config = save_model("olmoe", directory / "source", vocab_size=len(tokenizer))
    write_gguf(
        "olmoe",
        config,
        tensors_of(directory / "source"),
        directory / "m.gguf",
        choose(Kind.Q8_0),
        tokenizer=tokenizer,
        extra=lambda writer: (writer.add_float32("general.sampling.temp", 0.6), writer.add_eot_token_id(3)),
    )
    return directory / "m.gguf"


def test_words_and_chat_template_are_those_of_the_file(with_words: Path) -> None:
    theirs = byte_tokenizer()
    with opened_gguf(with_words) as opened:
        ours = AutoTokenizer.from_pretrained(opened.path)
        generation = json.loads((opened.path / "generation_config.json").read_text())
    for text in ("Once upon a time, there were 12 foxes.\n\n  Hello!", "héllo 日本 \t x", "<|endoftext|>a"):
        assert ours(text).input_ids == theirs(text).input_ids
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(
        messages, tokenize=False
    )
    assert generation["eos_token_id"] == [theirs.eos_token_id, 3]
    assert (generation["temperature"], generation["do_sample"]) == (0.6, True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", None),
        (
            "tokenizer_config.json",
            '{"bos_token": "<other>", "chat_template": "other", "model_max_length": 7}',
        ),
        ("special_tokens_map.json", '{"bos_token": "<other>"}'),
        ("added_tokens.json", '{"<other>": 99999}'),
        ("chat_template.jinja", "other"),
    ],
)
def test_its_vocabulary_is_its_own_whatever_lies_beside_it(
    with_words: Path, tmp_path: Path, name: str, content: str | None
) -> None:
    def words(path: Path) -> dict[str, bytes]:
        with opened_gguf(path) as opened:
            return {file.name: file.read_bytes() for file in opened.path.iterdir()}

    expected = words(with_words)
    shutil.copy(with_words, tmp_path)
    if content is None:  # a whole one, of another model
        other = json.loads(expected[name])
        other["added_tokens"][0]["content"] = "<other>"
        content = json.dumps(other)
    (tmp_path / name).write_text(content)
    assert words(tmp_path / with_words.name) == expected
    assert "moechat-" not in "".join(
        text.decode() for file, text in expected.items() if file.endswith(".json")
    )


def test_a_sentencepiece_vocabulary_has_its_beginning_bytes_and_merges(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello"]
    config = save_model("mixtral", tmp_path / "source", vocab_size=len(pieces) + len(words))

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(pieces + words)
        writer.add_token_scores([0.0] * len(pieces) + [-float(number) for number in range(len(words))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    write_gguf(
        "mixtral",
        config,
        tensors_of(tmp_path / "source"),
        tmp_path / "m.gguf",
        choose(Kind.Q8_0),
        extra=vocabulary,
    )
    with opened_gguf(tmp_path / "m.gguf") as opened:
        tokenizer = AutoTokenizer.from_pretrained(opened.path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello hé").input_ids) == [
        "<s>", "▁hello", "▁h", "<0xC3>", "<0xA9>",
    ]  # fmt: skip


def test_a_model_in_parts_is_named_by_any_of_them(tmp_path: Path, moechat_home: Path) -> None:
    config = save_model("qwen3_moe", tmp_path / "source")
    tensors = tensors_of(tmp_path / "source")
    whole = write_gguf("qwen3_moe", config, tensors, tmp_path / "w.gguf", choose(Kind.Q8_0))
    (tmp_path / "split").mkdir()
    parts = write_gguf(
        "qwen3_moe", config, tensors, tmp_path / "split" / "p.gguf", choose(Kind.Q8_0), parts=3
    )
    assert [part.name for part in parts] == [f"p-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    stores = [
        open_store(resolve(str(name)), 4, lambda _: None)
        for name in (*whole, parts[2], parts[0], tmp_path / "split")
    ]
    assert len({store.path for store in stores}) == 2
    first, second = stored_tensors(stores[0].path), stored_tensors(stores[1].path)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks p-00002-of-00003.gguf \(1 of 3 parts"):
        open_store(resolve(str(parts[0])), 8, lambda _: None)
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match=r"file 2 of 3 says it is number 2"):
        open_store(resolve(str(parts[0])), 8, lambda _: None)


@pytest.mark.parametrize(
    "name",
    [
        "x-00001-of-00000.gguf",
        "x-00000-of-00002.gguf",
        "x-00003-of-00002.gguf",
        "x-00001-of-01001.gguf",
        "x-0000١-of-0000٢.gguf",
        "x-1-of-2.gguf",
    ],
)
def test_a_name_like_that_of_a_part_that_cannot_be_is_one_of_a_whole_file(tmp_path: Path, name: str) -> None:
    assert gguf_parts(name) == [name]
    (tmp_path / name).touch()
    assert resolve(str(tmp_path)).checkpoint == tmp_path / name


def test_files_with_a_tensor_an_expert_are_read(tmp_path: Path) -> None:
    config = save_model("mixtral", tmp_path / "source")
    tensors = tensors_of(tmp_path / "source")
    write_gguf("mixtral", config, tensors, tmp_path / "m.gguf", choose(Kind.F16), merged=False)
    with opened_gguf(tmp_path / "m.gguf") as opened:
        plan = plan_checkpoint(opened)
        for layer in plan.layers:
            for number, expert in enumerate(layer.experts):
                for part, ref in (("w1", expert.gate), ("w2", expert.down), ("w3", expert.up)):
                    name = f"model.layers.{layer.layer}.block_sparse_moe.experts.{number}.{part}.weight"
                    assert np.array_equal(opened.matrix(ref), tensors[name].astype(np.float16)), name


def test_a_file_that_is_cut_short_while_it_is_converted_is_an_error(with_words: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(with_words, path)
    with opened_gguf(path) as opened:
        os.truncate(path, 4096)
        with pytest.raises(CheckpointError, match=r"has changed|could not be read"):
            convert(opened, plan_checkpoint(opened), tmp_path / "m", bits=4, source_name="m")
        file = opened.tensors.files[0]
        assert not np.array(file.array(next(iter(file.tensors)))).any()  # lost, and read as 0
        with pytest.raises(CheckpointError, match=r"could not be read while it was in use: byte \d+"):
            opened.require_readable()
    assert not (tmp_path / "m").exists()


def test_it_is_converted_once_and_again_when_it_changes(
    with_words: Path, tmp_path: Path, moechat_home: Path
) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(with_words, path)
    ref = resolve(str(path))
    manifest = open_store(ref, 4, lambda _: None).path / "manifest.json"
    made = manifest.stat().st_mtime_ns
    assert open_store(ref, 4, lambda _: None).path / "manifest.json" == manifest
    assert manifest.stat().st_mtime_ns == made
    os.utime(path, (1, 1))
    open_store(ref, 4, lambda _: None)
    assert manifest.stat().st_mtime_ns != made


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_bool("olmoe.expert_weights_norm", True), "expert_weights_norm is True"),
        (lambda w: w.add_uint32("olmoe.expert_gating_func", 2), "expert_gating_func is 2"),
        (lambda w: w.add_string("olmoe.rope.scaling.type", "longrope"), "rotary scaling is 'longrope'"),
        (lambda w: w.add_uint32("olmoe.attention.value_length", 48), "value_length is 48, heads have 64"),
        (lambda w: w.add_string("general.type", "adapter"), "GGUF file of type 'adapter'"),
        (
            lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(256, np.float32)),
            r"1 tensors that a olmoe model does not have, first 'blk.0.attn_q.bias'",
        ),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(32, np.float32)),
            r"first 'rope_freqs\.weight'",
        ),
    ],
)  # fmt: skip
def test_what_it_states_and_we_do_not_compute_is_refused(tmp_path: Path, extra: Any, message: str) -> None:
    config = save_model("olmoe", tmp_path / "source")
    write_gguf(
        "olmoe", config, tensors_of(tmp_path / "source"), tmp_path / "m.gguf", choose(Kind.Q8_0), extra=extra
    )
    with pytest.raises(UnsupportedModelError, match=message), opened_gguf(tmp_path / "m.gguf"):
        pass


DEFAULT = {"rope_type": "default"}
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}


def rotary_of(path: Path, **scaling: Any) -> dict[str, Any]:
    """Rotary parameters of a file with these values; ``old`` is the key of 2023."""
    header = GgufFile.open(path).header
    keys = {
        "olmoe.rope.scale_linear" if key == "old" else f"olmoe.rope.scaling.{key}": value
        for key, value in scaling.items()
    }
    found: dict[str, Any] = describe_gguf(replace(header, metadata=header.metadata | keys), "m.gguf").config[
        "rope_parameters"
    ]
    assert found.pop("rope_theta") == 10000
    return found


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, DEFAULT),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"old": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 2.0, "old": 4.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"factor": 1.0}, DEFAULT),
        ({"factor": 0.0}, DEFAULT),
        ({"type": "linear"}, DEFAULT),
        ({"type": "none", "factor": 4.0}, DEFAULT),
        ({"factor": 4.0, "attn_factor": 1.0, "finetuned": True}, {"rope_type": "linear", "factor": 4.0}),
        (
            YARN | {"yarn_ext_factor": 1.0, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
    ],
)
def test_rotary_scaling_is_that_of_llama_cpp(
    with_words: Path, scaling: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert rotary_of(with_words, **scaling) == expected


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"attn_factor": 0.5}, r"attn_factor is 0\.5"),
        ({"type": "none", "attn_factor": 0.5}, r"attn_factor is 0\.5"),
        (YARN | {"attn_factor": 0.5}, r"attn_factor is 0\.5"),
        (YARN | {"yarn_attn_factor": 0.5}, r"yarn_attn_factor is 0\.5"),
        (YARN | {"yarn_ext_factor": 0.0}, r"yarn_ext_factor is 0\.0"),
        (YARN | {"yarn_log_multiplier": 0.1}, r"yarn_log_multiplier is 0\.1"),
        ({"factor": 4.0, "yarn_ext_factor": 1.0}, r"yarn_ext_factor is 1\.0"),
        ({"alpha": 1000.0}, r"alpha is 1000\.0"),
        ({"of_tomorrow": "text"}, "of_tomorrow is 'text'"),
        ({"type": ""}, "rotary scaling is ''"),
        ({"old": -2.0}, r"rope\.scale_linear is -2\.0; a positive number"),
    ],
)
def test_rotary_scaling_that_we_do_not_compute_is_refused(
    with_words: Path, scaling: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        rotary_of(with_words, **scaling)


GATES = "blk.0.ffn_gate_exps.weight"


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({}, {GATES: (400_000, 1, 1)}, r"gate_exps\.weight has shape \[400000, 1, 1\], the model has 6 exp"),
        ({"olmoe.expert_count": 400_000}, {GATES: (400_000, 1, 1)}, "claims 400000 experts in each of 2 lay"),
        ({"olmoe.expert_count": 2.5}, {}, r"expert_count is 2\.5; a whole number"),
        (
            {"olmoe.block_count": 9000, "olmoe.expert_count": 60_000},
            {f"blk.{number}.ffn_gate_exps.weight": (60_000, 1, 1) for number in range(9000)},
            "claims 60000 experts in each of 9000 layers; moechat reads up to 65536 in a layer and 262144 in",
        ),
        ({"olmoe.block_count": 9000}, {}, r"claims 9000 layers, with 2\d tensors"),
        ({"olmoe.block_count": 1}, {}, r"'blk\.1\.[a-z_.]+' belongs to layer 1 \(from 0\) of 1"),
        ({}, {"blk.1.ffn_gate.6.weight": (1, 1)}, r"gate\.6\.weight belongs to expert 6 \(from 0\) of 6"),
        ({}, {"blk.007.ffn_gate_exps.weight": (6, 1, 1)}, "1 tensors that a olmoe model does not have"),
    ],
)  # fmt: skip
def test_what_it_claims_of_layers_and_experts_has_to_fit_its_tensors(
    with_words: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    header = GgufFile.open(with_words).header
    changed = replace(
        header,
        metadata=header.metadata | metadata,
        tensors=header.tensors | {name: GgufTensor(1, shape, 0, 0) for name, shape in tensors.items()},
    )
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        describe_gguf(changed, "m.gguf")


def test_what_is_wrong_in_its_metadata_is_not_said_of_another_file(tmp_path: Path) -> None:
    config = save_model("qwen3_moe", tmp_path / "source")
    config.num_experts_per_tok = 99
    path = tmp_path / "m.gguf"
    write_gguf("qwen3_moe", config, tensors_of(tmp_path / "source"), path, choose(Kind.F32))
    with pytest.raises(UnsupportedModelError) as caught:
        open_store(resolve(str(path)), None, lambda _: None)
    assert f"the metadata of {path}: 99 experts per token" in str(caught.value)
    assert "config.json" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("llama", "has no experts: moechat is for mixture-of-experts models"),
        ("gemma3", "architecture 'gemma3'; from GGUF files moechat reads .*glm4moe, gpt-oss"),
    ],
)
def test_other_models_are_refused_with_what_is_read(tmp_path: Path, architecture: str, message: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=message), opened_gguf(tmp_path / "m.gguf"):
        pass


def test_scales_too_large_for_what_is_kept_are_an_error_and_no_infinity(tmp_path: Path) -> None:
    config = save_model("olmoe", tmp_path / "source")
    path = tmp_path / "m.gguf"
    write_gguf("olmoe", config, tensors_of(tmp_path / "source"), path, choose(Kind.Q8_0))
    content = bytearray(path.read_bytes())
    place = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "output.weight")
    content[place.data_offset : place.data_offset + 2] = np.float16(60000).tobytes()
    path.write_bytes(content)
    with opened_gguf(path) as opened:
        with pytest.raises(CheckpointError, match=r"output\.weight has values that are not finite or above"):
            opened.array("lm_head.weight")
        with pytest.raises(CheckpointError, match=r"output\.weight has values"):
            list(opened.tensors.chunks("lm_head.weight"))


def test_the_program_runs_a_file_and_lists_it(with_words: Path, moechat_home: Path) -> None:
    def moechat_command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moechat", *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
        )

    answer = moechat_command("run", str(with_words), "--completion", "Once", "--max-tokens", "4", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["statistics"]["output_tokens"] == 4
    assert [model["name"] for model in json.loads(moechat_command("list", "--json").stdout)] == ["m"]
    planned = moechat_command("plan", str(with_words))
    assert planned.returncode == 0, planned.stderr
    cut = with_words.with_name("cut.gguf")
    cut.write_bytes(with_words.read_bytes()[:-100])
    refused = moechat_command("run", str(cut), "hi")
    assert refused.returncode == 3
    assert "cut.gguf is damaged: the tensor" in refused.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_llama_cpp(tmp_path: Path, family: str, moechat_home: Path) -> None:
    """What a file does not say (norms of routed weights, order of rotary halves) is as in llama.cpp."""
    python = os.environ.get("LLAMA_PYTHON")
    if python is None:
        pytest.skip("LLAMA_PYTHON names no interpreter with llama-cpp-python")
    tokenizer = byte_tokenizer()
    config = save_model(family, tmp_path / "source", vocab_size=len(tokenizer))
    write_gguf(
        family,
        config,
        tensors_of(tmp_path / "source"),
        tmp_path / "m.gguf",
        choose(Kind.F16),
        tokenizer=tokenizer,
    )
    script = (
        "import sys, json, llama_cpp\n"
        "m = llama_cpp.Llama(sys.argv[1], n_ctx=64, logits_all=True, verbose=False, n_threads=1)\n"
        f"m.eval({TOKENS})\n"
        f"print(json.dumps(m.scores[:{len(TOKENS)}].tolist()))\n"
    )
    theirs = subprocess.run(
        [python, "-c", script, str(tmp_path / "m.gguf")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    expected = np.array(json.loads(theirs.stdout.splitlines()[-1]))
    with moechat.load(tmp_path / "m.gguf", bits=16) as engine:
        ours = np.asarray(engine.logits(TOKENS))
    # It rounds activations to float16; exchanged halves or norms give errors as large as the logits.
    assert np.abs(ours - expected).max() < 0.05 * np.abs(expected).max()
    assert (ours.argmax(axis=1) == expected.argmax(axis=1)).all()
