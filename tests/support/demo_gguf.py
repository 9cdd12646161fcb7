"""Writes the demo model as a GGUF file, for other programs that read such files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf_support import write_gguf
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer

import moechat
from moechat import _native
from moechat.store.store import Store

DEMO = Path(moechat.__file__).parent / "hub" / "demo"


def demo_tensors() -> dict[str, NDArray[np.float32]]:
    """All weights of the demo by their names in a checkpoint."""
    store = Store.open(DEMO)
    found: dict[str, NDArray[np.float32]] = {}
    for key in store.dense.keys():  # noqa: SIM118 - not a mapping
        values = store.dense.array(key)
        is_bf16 = store.dense.info(key)[0] == "BF16"
        found[key] = (values.astype(np.uint32) << 16).view(np.float32) if is_bf16 else np.float32(values)
    for record in store.layers:
        for number, records in enumerate(store.expert_layer(record.layer)):
            gate, up, down, _ = _native.unpack_expert(store.geometry.layout, records)
            for name, matrix in (("gate", gate), ("up", up), ("down", down)):
                found[f"{record.module}.{number}.{name}_proj.weight"] = matrix
    return found


def write_demo(kind: Kind, tensors: dict[str, NDArray[np.float32]], path: Path, *, whole: bool) -> None:
    """The demo with experts of one type, and all else in F16, or with all matrices in that type.

    Args:
        kind: The type.
        tensors: By their names in a checkpoint, as from :func:`demo_tensors`.
        path: The file.
        whole: All matrices but routers have the type.
    """

    def choose(name: str, shape: tuple[int, ...]) -> Kind:
        if len(shape) == 1 or "ffn_gate_inp" in name:
            return Kind.F32
        return kind if whole or "_exps" in name else Kind.F16

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    write_gguf("qwen3_moe", AutoConfig.from_pretrained(DEMO), tensors, path, choose, tokenizer=tokenizer)
