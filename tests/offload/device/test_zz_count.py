import os
import pytest, torch
pytest.importorskip("triton")
from interpreted_graph import Launch
from test_fused_steps import PROMPT, TOKENS, feed, load
from tiny import write_tiny_checkpoint
from families import tiny_family
PASSES = [PROMPT, *([token] for token in [*TOKENS, *TOKENS])]
FAM = os.environ.get("FAM", "qwen3_5_moe_text,qwen3_next").split(",")
def launched(graph):
    names = []
    for operation in graph.operations:
        if isinstance(operation, Launch):
            names.append("*"+operation.executor.fn.__name__)
        elif any(operation.fresh) or operation.function._schema.is_mutable:
            names.append(operation.function.overloadpacket.__name__)
    return [name for name in names if not name.startswith("empty") and name not in ("full",)]
@pytest.mark.parametrize("family", FAM)
def test_count(family, gpu, tmp_path, moechat_home, monkeypatch):
    config = tiny_family(family)
    write_tiny_checkpoint(tmp_path / family, config)
    with monkeypatch.context() as patch:
        patch.setenv("MOECHAT_CUDA_GRAPHS", "0")
        with load(tmp_path / family, gpu) as engine:
            expected = feed(engine, PASSES)
    with load(tmp_path / family, gpu) as engine:
        found = feed(engine, PASSES)
        off = float((found - expected).abs().max() / expected.abs().max())
        with open(f"/tmp/moe/n/{family}.txt", "w") as f:
            print(off, engine.notices(), file=f)
            for i, g in enumerate(gpu.graphs_made[0].made if gpu.graphs_made else []):
                names = launched(g)
                print(i, len(names), names, file=f)
        assert off < 1e-4
