"""Malformed models on the command line: the error names file, tensor and a next step; nothing is left."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import Cli
from gguf.constants import GGMLQuantizationType as Kind
from gguf_families import FAMILIES
from gguf_family import WORDS, gguf_tensors, random_model
from gguf_writing import all_as, write_family
from quantised_support import change_config, change_tensors
from tiny import write_tiny_chat_model

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
GLM = FAMILIES["glm4moe"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "temporary").mkdir()
    return Cli(tmp_path, tmp_path / "home", {"TMPDIR": str(tmp_path / "temporary")})


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bad") / "m"
    write_tiny_chat_model(directory)
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path, chat_model: Path) -> Path:
    return Path(shutil.copytree(chat_model, tmp_path / "m"))


@pytest.fixture(scope="module")
def glm() -> Callable[..., Path]:
    config = GLM.config(num_hidden_layers=2)
    tensors = gguf_tensors(GLM, random_model(config))

    def write(path: Path, kind: Kind, damaged: str = "") -> Path:
        changed = dict(tensors)
        if damaged:
            changed[damaged] = np.where(
                np.arange(changed[damaged].size) == 7, np.nan, changed[damaged].ravel()
            )
            changed[damaged] = changed[damaged].reshape(tensors[damaged].shape).astype(np.float32)
        write_family(GLM, config, changed, path, all_as(kind))
        return path

    return write


def left_by(cli: Cli) -> list[Path]:
    """Files that are not empty: locks are."""
    places = (cli.home, cli.directory / "temporary")
    return [file for place in places for file in place.rglob("*") if file.is_file() and file.stat().st_size]


def require_refused(cli: Cli, model: Path, *patterns: str, status: int = 3) -> None:
    result = cli.call("run", str(model), "--completion", "x", "--max-tokens", "1", "--quiet")
    assert result.status == status, result.err
    for pattern in patterns:
        assert re.search(pattern, result.err), result.err
    error, hint = result.err.strip().splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert not left_by(cli)


def put(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[5] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (EXPERT, put(torch.nan), "expert 3, up weight at row 0, column 5 is nan"),
        (QUERY, put(torch.inf), "values that are not finite"),
        ("model.norm.weight", put(torch.nan), "values that are not finite"),
        (EXPERT, lambda tensor: tensor[:-1].contiguous(), "127 rows, the configuration needs at least 128"),
        (EXPERT, lambda tensor: tensor.sum(), r"has shape \[\]; 2 dimensions are expected"),
        (EXPERT, lambda tensor: tensor.half(), "is F16"),
        (QUERY, lambda tensor: tensor[:-1].contiguous(), r"shape \[127, 64\]; .* says \[128, 64\]"),
    ],
)
def test_a_damaged_tensor_is_named_with_its_file(
    cli: Cli, checkpoint: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.update({key: change(tensors[key])}))
    require_refused(cli, checkpoint, rf"m/model\.safetensors: tensor '{re.escape(key)}'", message)


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{}"), ("generation_config.json", "[]"), ("config.json", '{"model_type": "x"}')],
)
def test_a_damaged_side_file_is_found_before_the_conversion(
    cli: Cli, checkpoint: Path, name: str, content: str
) -> None:
    (checkpoint / name).write_text(content)
    require_refused(cli, checkpoint, rf"{re.escape(str(checkpoint))}.* cannot be (used|read)")


def with_value(name: str, key: str, value: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, key: value}))

    return change


def with_content(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(content) and None


NESTED = b'{"a":' * 100_000 + b"1" + b"}" * 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            with_value("config.json", "num_labels", 10**9),
            r"config\.json: num_labels is 1000000000, more than",
        ),
        (with_value("config.json", "num_hidden_layers", 10**9), "num_hidden_layers is 1000000000, more than"),
        (with_value("config.json", "num_hidden_layers", 200), r"is 200; the checkpoint has \d+ tensors"),
        (with_value("config.json", "rms_norm_eps", float("nan")), "rms_norm_eps is NaN"),
        (with_value("config.json", "vision_config", {"num_hidden_layers": 10**9}), "num_hidden_layers is 10"),
        (with_value("config.json", "configuration_files", ["x.json"]), "has configuration_files"),
        (with_value("config.json", "get_text_config", "x"), "'get_text_config' is no setting"),
        (with_value("generation_config.json", "watermarking_config", "x"), "watermarking_config is 'x'"),
        (
            with_value("generation_config.json", "eos_token_id", "x"),
            "eos_token_id is 'x'; it must be a token",
        ),
        (with_value("tokenizer_config.json", "chat_template", 5), "chat_template is 5; it must be a text"),
        (with_value("tokenizer_config.json", "unk_token", ""), "the tokenizer in .* cannot be used"),
        (with_value("special_tokens_map.json", "eos_token", [1]), r"eos_token is \[1\]; it must be"),
        (with_content("config.json", NESTED), r"config\.json nests values more than 32 deep"),
        (with_content("generation_config.json", NESTED), r"generation_config\.json nests values more than"),
        (with_content("tokenizer_config.json", NESTED), r"tokenizer_config\.json nests values more than"),
        (with_content("added_tokens.json", NESTED), r"added_tokens\.json nests values more than"),
        (with_content("chat_template.jinja", b"caf\xe9"), r"chat_template\.jinja is not UTF-8"),
        (with_content("chat_template.jinja", bytes(5 << 20)), r"chat_template\.jinja has 5,242,880 bytes"),
        (with_content("special_tokens_map.json", b"[]"), "it is .*, not an object"),
    ],
)
def test_a_file_that_would_take_memory_or_crash_is_refused_with_its_key(
    cli: Cli, checkpoint: Path, change: Callable[[Path], None], message: str
) -> None:
    change(checkpoint)
    require_refused(cli, checkpoint, message)
    if "config\\.json: " in message:  # also where a model is only looked at
        planned = cli.call("plan", str(checkpoint))
        assert planned.status == 3, planned.err


@pytest.mark.parametrize(
    "shard", ["x" * 300 + ".safetensors", "\ud800.safetensors", "../m.safetensors", "m.bin", ".", 3]
)
def test_an_index_with_an_impossible_file_is_refused(cli: Cli, checkpoint: Path, shard: Any) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {QUERY: shard}}))
    require_refused(cli, checkpoint, rf"{re.escape(str(checkpoint))}")


def test_a_pointer_of_git_lfs_is_recognised(cli: Cli, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"
    )
    require_refused(cli, checkpoint, r"m/model\.safetensors is a pointer of Git LFS .*git lfs pull")


def test_nvfp4_that_the_configuration_calls_otherwise_is_refused(cli: Cli, checkpoint: Path) -> None:
    def pack(tensors: dict[str, torch.Tensor]) -> None:
        rows, columns = tensors.pop(EXPERT).shape
        tensors[EXPERT + "_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        tensors[EXPERT + "_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        tensors[EXPERT + "_global_scale"] = torch.ones(1)

    change_tensors(checkpoint, pack)
    for weights, found in (
        ({"num_bits": 4, "type": "float", "group_size": 32}, "MXFP4"),
        ({"num_bits": 8, "type": "int", "group_size": 16}, "8-bit integers in groups of 16"),
    ):
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        change_config(
            checkpoint, quantization_config={"quant_method": "compressed-tensors", "config_groups": groups}
        )
        require_refused(cli, checkpoint, rf"tensor '{EXPERT}_.*config\.json says {found}")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_K])
@pytest.mark.parametrize("tensor", ["blk.1.ffn_up_exps.weight", "blk.1.attn_q.weight", "output_norm.weight"])
def test_values_of_a_gguf_file_that_are_not_finite_are_named(
    cli: Cli, glm: Callable[..., Path], tensor: str, kind: Kind
) -> None:
    with np.errstate(invalid="ignore"):
        path = glm(cli.directory / "m.gguf", kind, tensor)
    require_refused(cli, path, rf"m\.gguf: tensor '{re.escape(tensor)}'.* not finite")


def replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # One tensor of another type, whose data would be read as other weights.
        (
            lambda data: replaced(
                data,
                b"blk.1.attn_q.weight"
                + (2).to_bytes(4, "little")
                + np.array([256, 256], "<u8").tobytes()
                + bytes(4),
                b"blk.1.attn_q.weight"
                + (2).to_bytes(4, "little")
                + np.array([256, 256], "<u8").tobytes()
                + bytes([2, 0, 0, 0]),
            ),
            "but the tensor 'blk.1.attn_q.weight' ends at",
        ),
        (
            lambda data: replaced(data, b"glm4moe.context_length", b"glm4moe.context_lengtX"),
            "lacks glm4moe.context_length",
        ),
        (
            lambda data: replaced(
                data,
                b"tokenizer.ggml.merges" + np.array([9, 8], "<u4").tobytes(),
                b"tokenizer.ggml.mergeX" + np.array([9, 8], "<u4").tobytes(),
            ),
            "has no list of merges: tokenizer.ggml.merges",
        ),
    ],
    ids=["another type", "missing value", "no merges"],
)
def test_a_damaged_gguf_header_is_refused(
    cli: Cli, glm: Callable[..., Path], change: Callable[[bytes], bytes], message: str
) -> None:
    path = glm(cli.directory / "m.gguf", Kind.F32)
    path.write_bytes(change(path.read_bytes()))
    require_refused(cli, path, r"m\.gguf", message)


def test_a_vocabulary_that_is_larger_than_the_embedding_is_refused(cli: Cli) -> None:
    config = GLM.config(num_hidden_layers=2)
    tensors = gguf_tensors(GLM, random_model(config))
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = tensors[name][:200]
    write_family(GLM, config, tensors, cli.directory / "m.gguf", all_as(Kind.F32))
    require_refused(
        cli, cli.directory / "m.gguf", rf"m\.gguf: token_embd.weight has 200 rows for {WORDS} words"
    )


def test_a_gpu_that_is_not_there_is_found_before_the_conversion(cli: Cli, checkpoint: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = cli.call("run", str(checkpoint), "--completion", "x", "--device", "cuda")
    assert result.status == 2
    assert "no CUDA GPU can be used" in result.err
    assert not left_by(cli)
