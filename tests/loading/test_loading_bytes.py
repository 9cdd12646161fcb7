"""What loading dense weights takes besides them: the estimate, and that the loading keeps it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from tiny import tiny_config, write_tiny_checkpoint

from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.dense import loading_bytes
from moechat.models.skeleton import build_skeleton, load_config
from moechat.offload.experts import IMPLEMENTATION, register
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.store import Store

MEBI = 1 << 20
CHILD = """
import json, sys
from pathlib import Path
import moechat
import torch
from moechat.hardware.memory import peak_resident_bytes, resident_bytes
from moechat.models.dense import load_dense, loading_bytes
from moechat.models.skeleton import build_skeleton, load_config
from moechat.offload.experts import IMPLEMENTATION, register
from moechat.store.store import Store

register()
torch.set_num_threads(2)
path = Path(sys.argv[1])
skeleton = build_skeleton(load_config(path), torch.float32, IMPLEMENTATION)
source = Store.open(path).dense
torch.ones(1 << 22, dtype=torch.bfloat16).to(torch.float32)  # the conversion's code and threads are there
dense = sum(tensor.nbytes for tensor in skeleton.model.parameters())
before, loading = resident_bytes(), loading_bytes(skeleton, source)
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
load_dense(skeleton, source)
print(json.dumps([peak_resident_bytes() - before, dense, loading]))
"""


def estimate(directory: Path, dtype: torch.dtype) -> int:
    register()
    skeleton = build_skeleton(load_config(directory), dtype, IMPLEMENTATION)
    return loading_bytes(skeleton, store(directory).dense)


def store(directory: Path) -> Store:
    checkpoint = Checkpoint.open(directory)
    plan = plan_checkpoint(checkpoint)
    return convert(checkpoint, plan, directory / "store", bits=4, source_name="tiny")


def test_only_weights_of_another_type_take_their_source_besides(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe", vocab_size=5000)
    write_tiny_checkpoint(tmp_path, config)
    assert estimate(tmp_path, torch.float32) == 2 * 5000 * config.hidden_size
    assert estimate(tmp_path, torch.bfloat16) == 0


def test_the_peak_of_loading_is_as_estimated(tmp_path: Path) -> None:
    vocabulary = 60_000
    write_tiny_checkpoint(tmp_path, tiny_config("qwen3_moe", vocab_size=vocabulary, hidden_size=512))
    path = str(store(tmp_path).path)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, path], capture_output=True, text=True, check=True, timeout=120
    )
    peak, dense, loading = json.loads(done.stdout)
    assert loading == 2 * vocabulary * 512
    # Besides: what the model's own code takes the first time that it is used.
    assert dense <= peak <= dense + loading + 24 * MEBI
