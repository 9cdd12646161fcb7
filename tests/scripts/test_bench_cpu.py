"""moechat beside llama.cpp: the options, the files, the bytes that are counted, and a run on a tiny model.

What needs llama.cpp takes it from the directory that ``LLAMA_PEER`` names (the folder llama.cpp of a work
directory that scripts/bench/cpu --prepare has filled), and is skipped without it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, SCRIPTS
from safetensors import safe_open

COMMON = {
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}
CONFIGS = {
    "mixtral": {**COMMON, "model_type": "mixtral", "num_local_experts": 4},
    "olmoe": {**COMMON, "model_type": "olmoe", "num_experts": 4},
    "qwen3_moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "head_dim": 64,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}


def module(name: str) -> Any:
    return importlib.import_module(name)


def bench(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench" / "cpu"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, check=check)


def config_file(directory: Path, family: str) -> Path:
    path = directory / f"tiny-{family}.json"
    path.write_text(json.dumps(CONFIGS[family]))
    return path


# Bytes that a token reads


def test_gguf_bytes_are_those_of_the_published_model() -> None:
    shapes = module("gguf_shapes")
    config = json.loads((ROOT / "moechat/hub/shapes/mixtral-8x7b.json").read_text())
    plan = shapes.plan_gguf(config, "q4_0")
    # 46.7 billion weights with 4.5 bits, but for norms and routers.
    assert plan.nbytes == pytest.approx(46.7e9 * 4.5 / 8, rel=1e-3)
    # By hand: attention, two of eight experts, head, one row of the embedding, and the float32 tensors.
    attention = 4096 * 4096 * 2 + 2 * 1024 * 4096
    experts = 32 * 2 * 3 * 4096 * 14336
    packed = (32 * attention + experts + 32000 * 4096 + 4096) * 18 // 32
    assert plan.expert_active_bytes == experts * 18 // 32
    assert plan.active_bytes == packed + 4 * (4096 + 32 * (2 * 4096 + 8 * 4096))


def test_gguf_bytes_of_linear_attention_are_those_of_the_published_model() -> None:
    shapes = module("gguf_shapes")
    config = json.loads((ROOT / "moechat/hub/shapes/qwen3.6-35b-a3b.json").read_text())
    plan = shapes.plan_gguf(config, "q4_0")
    # 34.7 billion weights of its part for text with 4.5 bits, but for norms, routers and convolutions.
    assert plan.nbytes == pytest.approx(34.66e9 * 4.5 / 8, rel=5e-3)
    linear = 2048 * (8192 + 4096 + 64 + 4096)
    attention = 2048 * (2 * 4096 + 2 * 512 + 4096)
    matrices = 30 * linear + 10 * attention + 40 * 9 * 3 * 2048 * 512 + 248320 * 2048 + 2048
    odd = 30 * (8192 * 4 + 128 + 64) + 10 * 512 + 40 * (3 * 2048 + 256 * 2048) + 2048
    assert plan.active_bytes == matrices * 18 // 32 + 4 * odd
    with pytest.raises(ValueError, match="q4_k_m"):
        shapes.plan_gguf(config, "q4_k_m")


def test_gguf_bytes_of_latent_attention_are_those_of_the_published_model() -> None:
    shapes = module("gguf_shapes")
    config = json.loads((ROOT / "moechat/hub/shapes/glm-4.7-flash.json").read_text())
    plan = shapes.plan_gguf(config, "q4_k")
    # 29.9 billion weights with 4.5 bits, but for norms, routers and the matrices of keys.
    assert plan.nbytes == pytest.approx(29.9e9 * 4.5 / 8, rel=1e-2)
    heads, rank, plain, rotated, value = 20, 512, 192, 64, 256
    attention = 2048 * 768 + 768 * heads * (plain + rotated) + 2048 * (rank + rotated)
    attention += heads * value * rank + heads * value * 2048
    layers = 47 * attention + 3 * 2048 * 10240 + 46 * 5 * 3 * 2048 * 1536
    keys = 47 * heads * rank * plain
    odd = 47 * (768 + rank + 2 * 2048) + 46 * (64 * 2048 + 64) + 2048
    packed = (layers + 154880 * 2048 + 2048) * 18 // 32
    assert plan.active_bytes == packed + keys * 22 // 32 + 4 * odd
    assert plan.metadata["deepseek2.expert_weights_norm"] is True


def test_gguf_bytes_of_norms_around_all_parts_are_those_of_the_published_model() -> None:
    shapes = module("gguf_shapes")
    config = json.loads((ROOT / "moechat/hub/shapes/gemma-4-26b-a4b.json").read_text())
    plan = shapes.plan_gguf(config, "q4_k")
    # 25.2 billion weights, a third of them with 5.5 bits instead of 4.5: rows of 704 and 2,112.
    assert plan.nbytes == pytest.approx(25.2e9 * (4.5 * 2 + 5.5) / 3 / 8, rel=2e-2)
    kinds = config["layer_types"]
    assert plan.metadata["gemma4.attention.head_count_kv"] == [
        2 if kind == "full_attention" else 8 for kind in kinds
    ]
    names = {tensor.name for tensor in plan.tensors}
    assert "blk.0.attn_v.weight" in names
    assert f"blk.{kinds.index('full_attention')}.attn_v.weight" not in names
    down = next(tensor for tensor in plan.tensors if tensor.name == "blk.3.ffn_down_exps.weight")
    assert (down.shape, down.kind, down.parts, down.used) == ((128, 2816, 704), "q5_0", 128, 8)


def test_gguf_bytes_of_short_convolutions_are_those_of_the_published_model() -> None:
    shapes = module("gguf_shapes")
    config = {
        "model_type": "lfm2_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "vocab_size": 65536,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "layer_types": [
            "full_attention" if number in (2, 6, 10, 14, 18, 21) else "conv" for number in range(24)
        ],
    }
    plan = shapes.plan_gguf(config, "q4_k")
    assert plan.nbytes == pytest.approx(8.34e9 * 4.5 / 8, rel=1e-2)
    # 1.5 billion weights a token.
    assert plan.active_bytes == pytest.approx(1.56e9 * 4.5 / 8, rel=2e-2)
    assert plan.metadata["lfm2moe.attention.head_count_kv"][:4] == [0, 0, 8, 0]


def test_both_formats_have_the_same_bits_and_odd_rows_are_refused() -> None:
    shapes = module("gguf_shapes")
    config = CONFIGS["qwen3_moe"]
    assert shapes.plan_gguf(config, "q4_0").nbytes == shapes.plan_gguf(config, "q4_k").nbytes
    with pytest.raises(ValueError, match="rows of 384 weights cannot be q4_k"):
        shapes.plan_gguf({**config, "moe_intermediate_size": 384}, "q4_k")
    with pytest.raises(ValueError, match="no GGUF form for gpt_oss"):
        shapes.plan_gguf({**config, "model_type": "gpt_oss"}, "q4_k")


def test_file_names_depend_on_the_content() -> None:
    shapes = module("gguf_shapes")
    config = CONFIGS["olmoe"]
    plans = [
        shapes.plan_gguf(config, "q4_0"),
        shapes.plan_gguf(config, "q4_k"),
        shapes.plan_gguf(config, "q4_k", neurons=256),
        shapes.plan_gguf({**config, "rope_theta": 5000.0}, "q4_k"),
    ]
    assert len({plan.fingerprint for plan in plans}) == 4
    assert shapes.GgufPlan.from_json(json.loads(json.dumps(plans[1].to_json()))) == plans[1]


# The files


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("kind", ["q4_k", "q4_k_m", "q4_0"])
def test_a_written_file_reads_back_as_planned(tmp_path: Path, family: str, kind: str) -> None:
    plan = module("gguf_shapes").plan_gguf(CONFIGS[family], kind)
    described, file, found = tmp_path / "plan.json", tmp_path / "tiny.gguf", tmp_path / "found.json"
    described.write_text(json.dumps(plan.to_json()))
    subprocess.run(
        [sys.executable, SCRIPTS / "bench" / "gguf_files.py", described, file],
        check=True,
        capture_output=True,
    )
    assert [path.name for path in tmp_path.glob("tiny*")] == ["tiny.gguf"]
    subprocess.run([sys.executable, "-c", READ_BACK, file, found], check=True, capture_output=True)
    read = json.loads(found.read_text())
    assert read["fields"]["general.architecture"] == plan.architecture
    for key, value in plan.metadata.items():
        assert read["fields"][key] == (pytest.approx(value) if isinstance(value, float) else value)
    assert [entry["name"] for entry in read["tensors"]] == [tensor.name for tensor in plan.tensors]
    for entry, tensor in zip(read["tensors"], plan.tensors, strict=True):
        assert (entry["kind"], tuple(entry["shape"])) == (tensor.kind, tensor.shape)
        assert entry["nbytes"] == tensor.nbytes
        if tensor.kind != "f32":
            # Embeddings have variance 1, other weights 1 by the number of inputs.
            size = tensor.shape[-1] ** 0.5 if tensor.name == "token_embd.weight" else 1.0
            assert abs(entry["mean"]) < 0.1 * size
            assert entry["deviation"] == pytest.approx(size, rel=0.05)
            assert entry["deviation_of_rows"] > 0.4 * size
    assert 0 <= file.stat().st_size - plan.nbytes < 32 * len(plan.tensors) + 8192


READ_BACK = """
import json, sys
import gguf, numpy as np
reader = gguf.GGUFReader(sys.argv[1])
tensors = []
for tensor in reader.tensors:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    scaled = values * values.shape[-1] ** 0.5
    tensors.append({
        "name": tensor.name, "kind": tensor.tensor_type.name.lower(), "nbytes": int(tensor.n_bytes),
        "shape": [int(size) for size in reversed(tensor.shape)],
        "mean": float(scaled.mean()), "deviation": float(scaled.std()),
        "deviation_of_rows": float(scaled.reshape(-1, values.shape[-1]).std(axis=1).min()),
    })
fields = {key: field.contents() for key, field in reader.fields.items()}
json.dump({"tensors": tensors, "fields": fields}, open(sys.argv[2], "w"))
"""


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "moechat", "--models", "mixtral"], "there is no shape 'mixtral'; choose one of"),
        (["--only", "moechat", "--models", "olmoe-1b-7b:17"], "olmoe-1b-7b has 1 to 16 layers"),
        (["--only", "moechat", "--models", "nowhere.json"], "cannot be read as a configuration"),
        (["--only", "moechat", "--models", ","], "no model is named"),
        (["--only", "moechat", "--isas", "sse9"], "instruction set 'sse9' is not available here"),
        (["--only", "moechat", "--threads", "0"], "--threads is '0'; the numbers must be 1 to"),
        (["--only", "moechat", "--contexts", "some"], "--contexts is 'some'; write whole numbers"),
        (["--only", "moechat", "--prompts", "128,513"], "the numbers must be 1 to 512"),
        (["--only", "moechat", "--rounds", "0"], "--rounds is 0; it must be 1 to 1000"),
        (["--formats", "q5_k"], "--formats is 'q5_k'; choose from q4_k, q4_k_m, q4_0"),
        ([], "has no llama.cpp; run the same with --prepare first"),
    ],
)
def test_cases_that_cannot_be_measured_are_refused_with_a_reason(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = bench("--work", str(tmp_path), *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_family_without_a_gguf_form_is_refused_with_a_hint(tmp_path: Path) -> None:
    files = module("cpu_files")
    (model,) = files.parse_models("gpt-oss-20b:2")
    with pytest.raises(files.BenchError, match="use --only moechat"):
        files.Files(tmp_path).gguf(model, "q4_k")


@pytest.mark.timeout(600)  # it starts three processes, each of which imports torch
def test_a_tiny_model_is_measured_from_end_to_end(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out.json"
    arguments = ["--work", str(work), "--only", "moechat", "--models", str(config_file(tmp_path, "olmoe"))]
    arguments += ["--rounds", "2", "--tokens", "4", "--contexts", "8,40", "--prompts", "16", "--threads", "1"]
    done = bench(*arguments, "--json", str(out))
    assert done.returncode == 0, done.stderr
    store = next(path for path in (work / "stores").iterdir() if path.is_dir())
    result = json.loads(out.read_text())
    assert result["llama"] is None
    (model,) = result["models"]
    ((name, system),) = model["systems"].items()
    assert name == f"moechat {system['isa']}"

    # Bytes of a token, against the files: the experts' share, and the dense file without the embedding.
    experts = sum(
        safe_open(file, "np").get_slice("experts").get_shape()[0] and file.stat().st_size // 4096 * 4096
        for file in store.glob("experts-*.safetensors")
    )
    assert system["expert_active_bytes"] == pytest.approx(experts * 2 / 4, rel=0.02)
    dense = system["active_bytes"] - system["expert_active_bytes"]
    narrow = 3 * (2 * 256 * 256 + 128 * 256)  # query, key and output projections
    wide = 3 * 128 * 256 + 64 * 256  # value projections, an eighth of the head
    narrow += 448 * 256
    assert (system["dense_bits"], system["activation_bits"]) == ("auto", 8)
    assert dense == pytest.approx(narrow * 4.5 / 8 + wide * 8.5 / 8 + 3 * 4 * 256 * 4, rel=0.08)

    turns = model["turns"]
    counts: dict[tuple[str, int], int] = {}
    for turn in turns:
        key = turn["what"], turn["size"]
        counts[key] = counts.get(key, 0) + 1
        assert turn["rate"] > 0
        assert turn["before"] > 0
        assert turn["after"] > 0
    assert counts == {("decode", 8): 2, ("decode", 40): 1, ("experts", 0): 2, ("prompt", 16): 2}
    decode = [turn for turn in turns if turn["what"] == "decode"]
    assert all(len(turn["details"]["ms"]) == 4 for turn in decode)
    (row,) = model["summary"]
    rates = sorted(turn["rate"] for turn in decode if turn["size"] == 8)
    assert row["decode_8"] == pytest.approx([sum(rates) / 2, *rates])
    assert "tiny-olmoe, 3 of 3 layers" in done.stdout
    again = bench("--work", str(work), "--show", str(out), check=True)
    assert again.stdout == done.stdout


@pytest.mark.timeout(600)
def test_both_sides_are_measured_where_llama_cpp_is_installed(tmp_path: Path) -> None:
    peer = os.environ.get("LLAMA_PEER")
    if peer is None:
        pytest.skip("LLAMA_PEER names no directory with llama.cpp")
    out, work = tmp_path / "out.json", tmp_path / "work"
    work.mkdir()
    (work / "llama.cpp").symlink_to(peer)
    arguments = ["--work", str(work), "--threads", "1", "--quick"]
    arguments += ["--models", str(config_file(tmp_path, "qwen3_moe")), "--llama-defaults"]
    done = bench(*arguments, "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["llama"]["variant"] in done.stdout
    model = json.loads(out.read_text())["models"][0]
    assert sorted(name.split()[0] for name in model["systems"]) == [
        "moechat",
        "q4_0",
        "q4_k",
        "q4_k",
        "q4_k_m",
    ]
    for kind in ("q4_k", "q4_k_m", "q4_0"):
        way = {"repack": True, "attention": "auto"}
        assert model["systems"][kind]["ways"] == {"decode": way, "prompt": way}
    row = next(row for row in model["summary"] if row["system"].startswith("moechat"))
    ours = next(row["decode_32"][0] for row in model["summary"] if row["system"].startswith("moechat"))
    theirs = next(row["decode_32"][0] for row in model["summary"] if row["system"] == "q4_k")
    assert row["decode_32_to_q4_k"][0] == pytest.approx(ours / theirs)


# The figures


def turn(system: str, what: str, size: int, number: int, rate: float, stream: float) -> dict[str, Any]:
    return {
        "system": system,
        "what": what,
        "size": size,
        "threads": 2,
        "session": 0,
        "round": number,
        "rate": rate,
        "before": 0.9 * stream,
        "after": 1.1 * stream,
    }


def test_llama_cpp_runs_with_its_fastest_options_and_repacks_only_where_that_is_faster() -> None:
    llama = module("cpu_llama")
    mine, flash = llama.Way(True, "plain"), llama.Way(True, "flash")
    plain, other = llama.Way(False, "plain"), llama.Way(False, "flash")
    decode = {mine: 20.0, flash: 19.0, plain: 15.0, other: 15.0}
    prompt = {mine: 90.0, flash: 98.0, plain: 100.0, other: 60.0}
    assert llama.fastest({"decode": decode, "prompt": prompt}) == {"decode": mine, "prompt": flash}
    prompt[plain] = 110.0
    assert llama.fastest({"decode": decode, "prompt": prompt}) == {"decode": mine, "prompt": plain}


def test_shares_and_ratios_are_taken_turn_by_turn() -> None:
    figures = module("cpu_table").Figures(
        {
            "systems": {
                "moechat avx2": {"active_bytes": 100},
                "q4_k": {"active_bytes": 120},
                "q4_k thin": {"active_bytes": 60},
            },
            "turns": [
                # The machine is twice as fast in the second round, and so are all.
                turn("moechat avx2", "decode", 32, 0, 8.0, 1000.0),
                turn("q4_k", "decode", 32, 0, 4.0, 1000.0),
                turn("q4_k thin", "decode", 32, 0, 6.0, 1000.0),
                turn("q4_k thin", "decode", 32, 1, 12.0, 2000.0),
                turn("q4_k", "decode", 32, 1, 8.0, 2000.0),
                turn("moechat avx2", "decode", 32, 1, 16.0, 2000.0),
                turn("moechat avx2", "experts", 0, 0, 700.0, 1000.0),
            ],
        }
    )
    assert figures.systems == ["moechat avx2", "q4_k"]
    assert figures.rates("moechat avx2", "decode", 32, 2) == (12.0, 8.0, 16.0)
    assert figures.shares("moechat avx2", 32, 2) == pytest.approx((0.8, 0.8, 0.8))
    assert figures.ratios("moechat avx2", "q4_k", "decode", 32, 2) == pytest.approx((2.0, 2.0, 2.0))
    assert figures.expert_shares("moechat avx2", 2) == pytest.approx((0.7, 0.7, 0.7))
    # 60 bytes in 1/4 - 1/6 of a second, where streaming takes 0.06 seconds.
    assert figures.expert_shares("q4_k", 2) == pytest.approx((0.72, 0.72, 0.72))
    assert figures.rates("q4_k", "prompt", 128, 2) is None


def test_a_worker_starts_with_its_variables_and_without_those_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "variables.py"
    script.write_text(
        "import os\nfrom worker import serve\n"
        "serve({'look': lambda names: {name: os.environ.get(name) for name in names}})\n"
    )
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("KEPT", "yes")
    variables = {"OMP_WAIT_POLICY": None, "ADDED": "1", "PYTHONPATH": str(SCRIPTS / "bench")}
    with module("worker").Worker("variables", [sys.executable, str(script)], variables) as worker:
        found = worker.ask("look", names=["OMP_WAIT_POLICY", "KEPT", "ADDED"])
    assert found == {"OMP_WAIT_POLICY": None, "KEPT": "yes", "ADDED": "1"}
