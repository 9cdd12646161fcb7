"""Checkpoints and plans for the store tests, made without torch so that child processes start fast."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np

from moechat.geometry import ExpertGeometry, WeightType
from moechat.store.checkpoint import Checkpoint
from moechat.store.expert_refs import CheckpointPlan, ExpertLayerSource, ExpertRef, MatrixRef
from moechat.store.safetensors_file import PlannedTensor, SafetensorsFile, build_header

_EXPERT_KEY = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.w([123])\.weight")
_WEIGHT_TYPES = {"BF16": WeightType.BF16, "F16": WeightType.FP16, "F32": WeightType.FP32}


def mixtral_plan(checkpoint: Checkpoint) -> CheckpointPlan:
    """Plan of a Mixtral checkpoint, read off its keys."""
    layers: dict[int, dict[int, dict[str, str]]] = {}
    dense = []
    for key in sorted(checkpoint.keys()):
        match = _EXPERT_KEY.fullmatch(key)
        if match:
            layer, expert, part = int(match[1]), int(match[2]), match[3]
            layers.setdefault(layer, {}).setdefault(expert, {})[part] = key
        else:
            dense.append(key)
    first = next(iter(next(iter(layers.values())).values()))
    dtype, (intermediate, hidden) = checkpoint.info(first["1"])

    def matrix(key: str, rows: int) -> MatrixRef:
        return MatrixRef(key, None, 0, 1, rows)

    return CheckpointPlan(
        model_type="mixtral",
        experts=ExpertGeometry(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_experts=len(next(iter(layers.values()))),
            bits=16,
            weight_type=WeightType.FP16 if dtype == "F16" else WeightType.BF16,
        ),
        weight_type=_WEIGHT_TYPES[dtype],
        layers=tuple(
            ExpertLayerSource(
                layer=layer,
                module=f"model.layers.{layer}.mlp.experts",
                experts=tuple(
                    ExpertRef(
                        gate=matrix(experts[number]["1"], intermediate),
                        up=matrix(experts[number]["3"], intermediate),
                        down=matrix(experts[number]["2"], hidden),
                    )
                    for number in sorted(experts)
                ),
            )
            for layer, experts in sorted(layers.items())
        ),
        dense_keys=tuple(dense),
    )


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file of (element type, array) pairs; the array holds the raw bits."""
    planned = [PlannedTensor(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    with open(path, "wb") as file:
        file.write(build_header(planned))
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def mixtral_tensors(
    *, layers: int, experts: int, hidden: int, intermediate: int, dtype: str = "F32", seed: int = 0
) -> dict[str, tuple[str, np.ndarray]]:
    """Random weights under Mixtral's names."""
    generator = np.random.default_rng(seed)

    def weight(*shape: int) -> tuple[str, np.ndarray]:
        values = generator.standard_normal(shape, dtype=np.float32) * np.float32(0.05)
        if dtype == "BF16":
            return dtype, (values.view(np.uint32) >> 16).astype(np.uint16)
        return dtype, values.astype({"F32": np.float32, "F16": np.float16}[dtype])

    tensors = {"model.embed_tokens.weight": weight(32, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = weight(hidden)
        tensors[prefix + "block_sparse_moe.gate.weight"] = weight(experts, hidden)
        for expert in range(experts):
            name = f"{prefix}block_sparse_moe.experts.{expert}."
            tensors[name + "w1.weight"] = weight(intermediate, hidden)
            tensors[name + "w2.weight"] = weight(hidden, intermediate)
            tensors[name + "w3.weight"] = weight(intermediate, hidden)
    tensors["lm_head.weight"] = weight(32, hidden)
    return tensors


def write_mixtral(directory: Path, *, shards: int = 1, **shape: object) -> Path:
    """A Mixtral checkpoint directory with side files and, above one shard, an index."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = mixtral_tensors(**shape)  # type: ignore[arg-type]
    (directory / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    (directory / "generation_config.json").write_text("{}")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        write_safetensors(directory / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def tree(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def beside(destination: Path) -> list[str]:
    """Everything in the library except the store itself: work directories, locks, removed stores."""
    return sorted(path.name for path in destination.parent.iterdir() if path != destination)


def sign_again(store: Path) -> None:
    """Make the manifest of a store that was altered fit its files, as someone who gives stores away can."""
    path = store / "manifest.json"
    content = json.loads(path.read_text())
    for name, record in content["files"].items():
        data = (store / name).read_bytes()
        record.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    rest = {name: value for name, value in content.items() if name != "checksum"}
    signed = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**rest, "checksum": hashlib.sha256(signed).hexdigest()}))


def overwrite(path: Path, tensor: str, value: bytes) -> None:
    """Fill a tensor of a safetensors file with a pattern."""
    entry = SafetensorsFile.open(path).tensors[tensor]
    with open(path, "r+b") as file:
        file.seek(entry.start)
        file.write((value * entry.nbytes)[: entry.nbytes])
