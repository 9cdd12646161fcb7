from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import SUPPORT
from safetensors import safe_open
from store_support import beside, mixtral_plan, write_mixtral, write_safetensors

from moechat import _native
from moechat.errors import CheckpointError, UnsupportedModelError, UsageError
from moechat.geometry import ExpertGeometry, Gate, WeightType
from moechat.store import outline, quantizer
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.expert_refs import CheckpointPlan, ExpertLayerSource, ExpertRef, MatrixRef, VectorRef
from moechat.store.store import Store


def converted(
    source: Path, destination: Path, bits: int, **options: Any
) -> tuple[Checkpoint, CheckpointPlan, Store]:
    checkpoint = Checkpoint.open(source)
    plan = mixtral_plan(checkpoint)
    return checkpoint, plan, convert(checkpoint, plan, destination, bits=bits, source_name="tiny", **options)


def floats(array: np.ndarray) -> np.ndarray:
    """float32 values of a float32, float16 or bf16 (as uint16) array."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def expert_of(store: Store, layer: int, expert: int) -> tuple[Any, ...]:
    return tuple(_native.unpack_expert(store.geometry.layout, store.expert_layer(layer)[expert]))


def relative(ours: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(ours - reference) / np.linalg.norm(reference))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_with_16_bits_every_expert_reads_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    source = write_mixtral(
        tmp_path / "source", shards=2, layers=2, experts=3, hidden=80, intermediate=100, dtype=dtype
    )
    checkpoint, plan, store = converted(source, tmp_path / "m", 16)
    for layer in plan.layers:
        for number, expert in enumerate(layer.experts):
            parts = expert_of(store, layer.layer, number)
            for (_, ref), ours in zip(expert.matrices, parts[:3], strict=True):
                assert np.array_equal(ours, floats(checkpoint.matrix(ref)))
            assert parts[3] is None
    assert store.manifest.quantisation.method == "none"
    assert store.manifest.source.weight_type == {"BF16": WeightType.BF16, "F16": WeightType.FP16}[dtype]


def test_float32_experts_are_rounded_to_nearest_bf16_and_the_manifest_says_so(
    mixtral: Path, tmp_path: Path
) -> None:
    import torch

    checkpoint, plan, store = converted(mixtral, tmp_path / "m", 16)
    gate = expert_of(store, 1, 2)[0]
    source = np.array(checkpoint.matrix(plan.layers[1].experts[2].gate))
    assert np.array_equal(gate, torch.from_numpy(source).bfloat16().float().numpy())
    assert store.manifest.source.weight_type is WeightType.FP32
    assert store.geometry.weight_type is WeightType.BF16


@pytest.mark.parametrize(
    ("quantizer", "solver", "bits", "most"),
    [
        ("auto", "least-squares", 8, 0.01),
        ("auto", "least-squares", 4, 0.11),
        ("least-squares", "least-squares", 3, 0.23),
        ("least-squares", "least-squares", 2, 0.42),
        ("native", "half-quadratic", 4, 0.12),
        ("native", "half-quadratic", 2, 0.55),
    ],
)
def test_quantised_experts_hold_what_the_solver_makes_of_them(
    real_mixtral: Path, tmp_path: Path, quantizer: str, solver: str, bits: int, most: float
) -> None:
    checkpoint, plan, store = converted(real_mixtral, tmp_path / "m", bits, quantizer=quantizer)
    geometry = store.geometry
    record = np.empty((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
    for layer in plan.layers:
        for number, expert in enumerate(layer.experts):
            matrices = [checkpoint.matrix(ref) for _, ref in expert.matrices]
            _native.pack_expert(geometry.layout, *matrices, None, record, solver=solver)
            assert np.array_equal(store.expert_layer(layer.layer)[number], record)
            for ours, matrix in zip(expert_of(store, layer.layer, number)[:3], matrices, strict=True):
                assert relative(ours, floats(matrix)) < most
    assert store.manifest.quantisation.solver == ("least-squares" if quantizer == "auto" else quantizer)


def test_every_file_is_plain_safetensors_and_dense_tensors_are_unchanged(
    real_mixtral: Path, tmp_path: Path
) -> None:
    import torch

    checkpoint, plan, store = converted(real_mixtral, tmp_path / "m", 4)
    dense = {}
    for path in sorted((tmp_path / "m").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - no dictionary
                dense[key] = file.get_tensor(key)
    experts = dense.pop("experts")
    assert experts.dtype == torch.uint8
    assert experts.shape == (4, 2, store.geometry.record_bytes)
    assert set(dense) == set(plan.dense_keys) == set(store.dense.keys())
    for key, tensor in dense.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.view(torch.uint16).numpy().tobytes() == checkpoint.array(key).tobytes()
        assert store.dense.array(key).tobytes() == checkpoint.array(key).tobytes()
        assert store.dense.array(key).flags.aligned
    for layer in (0, 1, 2):
        assert store.expert_extent(layer).offset % 4096 == 0


def test_config_tokenizer_and_licence_are_copied_and_code_is_not(real_mixtral: Path, tmp_path: Path) -> None:
    (real_mixtral / "modeling_evil.py").write_text("print('run')")
    try:
        converted(real_mixtral, tmp_path / "m", 4)
    finally:
        (real_mixtral / "modeling_evil.py").unlink()
    names = {path.name for path in (tmp_path / "m").iterdir() if path.suffix != ".safetensors"}
    expected = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"}
    assert names == expected | {"README.md", "manifest.json"}
    for name in expected:
        assert (tmp_path / "m" / name).read_bytes() == (real_mixtral / name).read_bytes()


def test_a_hub_cache_of_links_becomes_a_store_of_real_files(real_mixtral: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in real_mixtral.iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob)
    _, _, store = converted(snapshot, tmp_path / "m", 4)
    assert not any(path.is_symlink() for path in store.path.iterdir())
    store.verify()


def test_dense_tensors_are_spread_over_shards_of_limited_size(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outline, "DENSE_SHARD_BYTES", 9000)
    checkpoint, plan, store = converted(mixtral, tmp_path / "m", 4)
    shards = sorted(store.path.glob("dense-*.safetensors"))
    assert [path.name for path in shards] == [f"dense-{n:05d}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) > 2
    for key in plan.dense_keys:
        assert store.dense.array(key).tobytes() == checkpoint.array(key).tobytes()


def test_dense_tensors_of_every_width_are_aligned_in_the_store(tmp_path: Path) -> None:
    source = write_mixtral(tmp_path / "source", layers=1, experts=2, hidden=64, intermediate=64)
    checkpoint = Checkpoint.open(source)
    plan = mixtral_plan(checkpoint)
    tensors = {key: (checkpoint.info(key)[0], np.array(checkpoint.array(key))) for key in checkpoint.tensors}
    odd = {"a": ("U8", np.ones(3, "u1")), "b": ("I64", np.arange(3)), "c": ("F16", np.ones(5, "f2"))}
    write_safetensors(source / "model.safetensors", {**tensors, **odd})
    plan = dataclasses.replace(plan, dense_keys=(*odd, *plan.dense_keys))
    store = convert(Checkpoint.open(source), plan, tmp_path / "m", bits=4, source_name="x")
    for key in plan.dense_keys:
        array = store.dense.array(key)
        assert array.flags.aligned
        assert array.tobytes() == {**tensors, **odd}[key][1].tobytes()


def test_padding_for_hqq_does_not_widen_the_last_group() -> None:
    geometry = ExpertGeometry(hidden_size=72, intermediate_size=72, num_experts=1, bits=8)
    generator = np.random.default_rng(0)
    spread = 0.01
    shape = (72, 72)
    matrices = tuple(np.float32(1) + spread * generator.standard_normal(shape, np.float32) for _ in range(3))
    record = np.empty((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
    quantizer.make_packer(geometry, "hqq")(matrices, None, record)  # type: ignore[arg-type]
    for ours, matrix in zip(_native.unpack_expert(geometry.layout, record)[:3], matrices, strict=True):
        assert np.abs(ours - matrix)[:, 64:].max() < spread / 10  # with zeros as padding: up to spread / 5


def fused_checkpoint(
    directory: Path, packing: str
) -> tuple[Checkpoint, CheckpointPlan, dict[str, np.ndarray]]:
    """A layer as in gpt-oss: 3-D tensors, gate and up interleaved, biases; layers 1 and 3 of 4."""
    generator = np.random.default_rng(3)
    hidden, intermediate, experts = 96, 64, 3
    tensors: dict[str, tuple[str, np.ndarray]] = {"norm": ("F32", np.ones(hidden, "f4"))}
    arrays: dict[str, np.ndarray] = {}
    layers = []
    for layer in (1, 3):
        prefix = f"layers.{layer}.experts."
        biases = {"gate_up_bias": 2 * intermediate, "down_bias": hidden}
        for name, size in biases.items():
            values = generator.standard_normal((experts, size)).astype("f4")
            arrays[prefix + name] = values
            tensors[prefix + name] = ("F32", values)
        for name, rows, cols in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
            key = prefix + name
            if packing == "mxfp4":
                blocks = generator.integers(0, 256, (experts, rows, cols // 32, 16), dtype=np.uint8)
                scales = generator.integers(118, 126, (experts, rows, cols // 32), dtype=np.uint8)
                tensors[key + "_blocks"], tensors[key + "_scales"] = ("U8", blocks), ("U8", scales)
            else:
                bits = generator.standard_normal((experts, cols, rows)).astype("f4").view(np.uint32) >> 16
                arrays[key] = floats(bits.astype(np.uint16)).transpose(0, 2, 1)
                tensors[key] = ("BF16", bits.astype(np.uint16))

        def matrix(
            name: str, expert: int, start: int, step: int, rows: int, prefix: str = prefix
        ) -> MatrixRef:
            return MatrixRef(prefix + name, expert, start, step, rows, transposed=packing == "plain")

        layers.append(
            ExpertLayerSource(
                layer,
                f"layers.{layer}.mlp.experts",
                tuple(
                    ExpertRef(
                        gate=matrix("gate_up", e, 0, 2, intermediate),
                        up=matrix("gate_up", e, 1, 2, intermediate),
                        down=matrix("down", e, 0, 1, hidden),
                        gate_bias=VectorRef(prefix + "gate_up_bias", e, 0, 2, intermediate),
                        up_bias=VectorRef(prefix + "gate_up_bias", e, 1, 2, intermediate),
                        down_bias=VectorRef(prefix + "down_bias", e, 0, 1, hidden),
                    )
                    for e in range(experts)
                ),
            )
        )
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    write_safetensors(directory / "model.safetensors", tensors)
    plan = CheckpointPlan(
        model_type="gpt_oss",
        experts=ExpertGeometry(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_experts=experts,
            bits=16,
            gate=Gate(alpha=1.702, limit=7.0, offset=1.0),
            has_bias=True,
        ),
        weight_type=WeightType.BF16,
        layers=tuple(layers),
        dense_keys=("norm",),
    )
    return Checkpoint.open(directory), plan, arrays


@pytest.mark.parametrize("packing", ["plain", "mxfp4"])
def test_fused_interleaved_experts_with_biases_read_back_exactly_at_16_bits(
    tmp_path: Path, packing: str
) -> None:
    checkpoint, plan, arrays = fused_checkpoint(tmp_path / "c", packing)
    store = convert(checkpoint, plan, tmp_path / "m", bits=16, source_name="oss")
    assert [item.layer for item in store.layers] == [1, 3]
    assert store.geometry.gate == Gate(alpha=1.702, limit=7.0, offset=1.0)
    for layer in plan.layers:
        prefix = f"layers.{layer.layer}.experts."
        for number, expert in enumerate(layer.experts):
            gate, up, down, biases = expert_of(store, layer.layer, number)
            if packing == "plain":
                assert np.array_equal(gate, arrays[prefix + "gate_up"][number][0::2])
                assert np.array_equal(up, arrays[prefix + "gate_up"][number][1::2])
                assert np.array_equal(down, arrays[prefix + "down"][number])
            else:
                for ours, (_, ref) in zip((gate, up, down), expert.matrices, strict=True):
                    assert np.array_equal(ours, floats(checkpoint.matrix(ref)))
            assert np.array_equal(biases[0], arrays[prefix + "gate_up_bias"][number][0::2])
            assert np.array_equal(biases[1], arrays[prefix + "gate_up_bias"][number][1::2])
            assert np.array_equal(biases[2], arrays[prefix + "down_bias"][number])


def test_an_fp8_checkpoint_is_refused_with_type_and_tensor_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_mixtral(tmp_path / "source", layers=1, experts=2, hidden=64, intermediate=64)
    checkpoint = Checkpoint.open(source)
    plan = mixtral_plan(checkpoint)
    tensors = {key: (checkpoint.info(key)[0], np.array(checkpoint.array(key))) for key in checkpoint.tensors}
    key = plan.layers[0].experts[1].up.key
    tensors[key] = ("F8_E4M3", np.zeros((64, 64), np.uint8))
    write_safetensors(source / "model.safetensors", tensors)
    (tmp_path / "library").mkdir()
    with pytest.raises(UnsupportedModelError, match=f"'{key}' is F8_E4M3"):
        convert(Checkpoint.open(source), plan, tmp_path / "library" / "m", bits=4, source_name="x")
    assert list((tmp_path / "library").iterdir()) == []


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3FNUZ", "F4", "F6_E2M3", "I64", "BOOL"])
def test_dense_tensors_of_other_types_are_copied_as_they_are(tmp_path: Path, dtype: str) -> None:
    source = write_mixtral(tmp_path / "source", layers=1, experts=2, hidden=64, intermediate=64)
    checkpoint = Checkpoint.open(source)
    plan = mixtral_plan(checkpoint)
    odd = outline.PlannedTensor("odd", dtype, (4, 8))
    raw = np.arange(odd.nbytes, dtype=np.uint8) & 1
    write_safetensors(source / "odd.safetensors", {"odd": (dtype, np.zeros((4, 8), np.uint8))})
    header = outline.build_header([odd])
    (source / "odd.safetensors").write_bytes(header + raw.tobytes())
    names = [*checkpoint.keys(), "odd"]
    weight_map = {name: "odd.safetensors" if name == "odd" else "plain.safetensors" for name in names}
    (source / "model.safetensors").rename(source / "plain.safetensors")
    (source / "model.safetensors.index.json").write_text(str({"weight_map": weight_map}).replace("'", '"'))
    plan = dataclasses.replace(plan, dense_keys=(*plan.dense_keys, "odd"))
    store = convert(Checkpoint.open(source), plan, tmp_path / "m", bits=4, source_name="x")
    assert store.dense.info("odd") == (dtype, (4, 8))
    assert store.dense.array("odd").tobytes() == raw.tobytes()


@pytest.mark.parametrize("solver", ["native", "hqq"])
def test_weights_that_are_not_finite_are_refused_by_expert_and_place(tmp_path: Path, solver: str) -> None:
    source = write_mixtral(tmp_path / "source", layers=2, experts=2, hidden=64, intermediate=64)
    checkpoint = Checkpoint.open(source)
    plan = mixtral_plan(checkpoint)
    tensors = {key: (checkpoint.info(key)[0], np.array(checkpoint.array(key))) for key in checkpoint.tensors}
    key = plan.layers[1].experts[1].up.key
    tensors[key][1][5, 7] = np.inf
    write_safetensors(source / "model.safetensors", tensors)
    (tmp_path / "library").mkdir()
    with pytest.raises(CheckpointError, match=rf"{key}' .*expert 1, up.* row 5, column 7") as caught:
        convert(
            Checkpoint.open(source),
            plan,
            tmp_path / "library" / "m",
            bits=4,
            source_name="x",
            quantizer=solver,
        )
    assert "finite" in str(caught.value)
    assert list((tmp_path / "library").iterdir()) == []


def test_a_store_quantised_by_hqq_has_its_result(real_mixtral: Path, tmp_path: Path) -> None:
    import torch
    from hqq.core.quantize import Quantizer

    checkpoint, plan, store = converted(real_mixtral, tmp_path / "m", 4, quantizer="hqq")
    assert store.manifest.quantisation.solver == "hqq"
    assert store.manifest.quantisation.method == "hqq"
    for number, expert in enumerate(plan.layers[0].experts):
        gate, up, down, _ = expert_of(store, 0, number)
        for ours, (_, ref) in zip((gate, up, down), expert.matrices, strict=True):
            weights = floats(checkpoint.matrix(ref))
            cols = weights.shape[1] // 64 * 64  # whole groups: there hqq's own result is comparable
            codes, meta = Quantizer.quantize(
                torch.from_numpy(np.ascontiguousarray(weights[:, :cols])),
                nbits=4,
                group_size=32,
                axis=1,
                bitpack=False,
                device="cpu",
            )
            theirs = Quantizer.dequantize(codes, {**meta, "compute_dtype": torch.float32}).numpy()
            assert relative(ours[:, :cols], theirs) < 0.06  # their scales have more digits than can be stored
            error, their_error = (relative(values, weights[:, :cols]) for values in (ours[:, :cols], theirs))
            assert error < 1.02 * their_error
            assert relative(ours, weights) < 0.12


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("narrow", [0.0, 0.02, 1e-5, -1e-5])
def test_columns_of_one_value_do_not_cost_their_neighbours_precision(bits: int, narrow: float) -> None:
    """Columns 32 to 63 hold one value, or two close ones; the 64 columns of a row share a step."""
    geometry = ExpertGeometry(hidden_size=64, intermediate_size=64, num_experts=1, bits=bits)
    weights = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32) * 0.03
    weights[:, 32:] = narrow * (1 + np.arange(32) % 2)  # ranges up to 0.02
    record = np.empty((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
    quantizer.make_packer(geometry, "hqq")((weights, weights, weights), None, record)
    ours = _native.unpack_expert(geometry.layout, record)[0]
    scale = np.ptp(np.c_[weights[:, :32], np.zeros(64)], axis=1)[:, None] / (2**bits - 1)
    errors = np.abs(ours - weights)
    assert (errors[:, :32] < 0.75 * scale).all()
    # The least scale of a half is a fifteenth of the other's.
    assert (errors[:, 32:] <= np.maximum(0.4 * np.abs(weights[:, 32:]), scale / 20)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_hqq_on_a_gpu_is_as_close_to_the_weights_as_the_native_solver(tmp_path: Path, bits: int) -> None:
    source = write_mixtral(
        tmp_path / "source", layers=1, experts=2, hidden=192, intermediate=200, dtype="BF16"
    )
    checkpoint, plan, ours = converted(source, tmp_path / "gpu", bits)
    assert ours.manifest.quantisation.solver == "hqq"  # what auto chooses there
    _, _, native = converted(source, tmp_path / "cpu", bits, quantizer="native")
    for number, expert in enumerate(plan.layers[0].experts):
        parts = zip(expert_of(ours, 0, number)[:3], expert_of(native, 0, number)[:3], strict=True)
        for (_, ref), (gpu, cpu) in zip(expert.matrices, parts, strict=True):
            weights = floats(checkpoint.matrix(ref))
            # hqq iterates in fp16 on a GPU
            assert relative(gpu, weights) < 1.05 * relative(cpu, weights)


def test_auto_takes_least_squares_and_every_solver_can_be_chosen() -> None:
    assert quantizer.choose_solver("auto", 4) == "least-squares"
    for name in quantizer.QUANTIZERS:
        assert quantizer.choose_solver(name, 16) == "none"
        if name != "auto":
            assert quantizer.choose_solver(name, 4) == name


def test_a_conversion_with_the_native_solver_never_imports_torch(mixtral: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from store_support import mixtral_plan\n"
        "from moechat.store.checkpoint import Checkpoint\n"
        "from moechat.store.convert import convert\n"
        "c = Checkpoint.open(sys.argv[1])\n"
        "convert(c, mixtral_plan(c), Path(sys.argv[2]), bits=4, source_name='x', quantizer='native')\n"
        "assert not {'torch', 'transformers', 'hqq'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-c", code, str(mixtral), str(tmp_path / "m")]
    subprocess.run(command, env=environment, check=True)


def with_first_expert(plan: CheckpointPlan, change: Callable[[ExpertRef], ExpertRef]) -> CheckpointPlan:
    layer = plan.layers[0]
    layer = dataclasses.replace(layer, experts=(change(layer.experts[0]), *layer.experts[1:]))
    return dataclasses.replace(plan, layers=(layer, *plan.layers[1:]))


def resized(ref: MatrixRef, rows: int) -> MatrixRef:
    return dataclasses.replace(ref, rows=rows)


def _with_experts(plan: CheckpointPlan, **changes: Any) -> CheckpointPlan:
    return dataclasses.replace(plan, experts=dataclasses.replace(plan.experts, **changes))


BAD_PLANS: dict[str, tuple[Callable[[CheckpointPlan], CheckpointPlan], str]] = {
    "no layers": (lambda p: dataclasses.replace(p, layers=()), "not ascending"),
    "layers descending": (lambda p: dataclasses.replace(p, layers=p.layers[::-1]), "not ascending"),
    "too few experts": (lambda p: _with_experts(p, num_experts=4), "has 3 experts"),
    "dense key twice": (lambda p: dataclasses.replace(p, dense_keys=p.dense_keys * 2), "twice"),
    "dense key missing": (lambda p: dataclasses.replace(p, dense_keys=("ghost",)), "no tensor 'ghost'"),
    "expert also dense": (
        lambda p: dataclasses.replace(p, dense_keys=(p.layers[0].experts[0].up.key,)),
        "dense and as an expert",
    ),
    "too few rows": (
        lambda p: with_first_expert(p, lambda e: dataclasses.replace(e, gate=resized(e.gate, 127))),
        r"w1\.weight' has a gate matrix \[127, 64\]",
    ),
    "up and down swapped": (
        lambda p: with_first_expert(p, lambda e: dataclasses.replace(e, up=e.down)),
        r"up matrix \[64, 128\]; the configuration says \[128, 64\]",
    ),
    "bias missing": (lambda p: _with_experts(p, has_bias=True), "lacks the gate bias"),
    "bias unexpected": (
        lambda p: with_first_expert(
            dataclasses.replace(p, dense_keys=()),
            lambda e: dataclasses.replace(
                e, down_bias=VectorRef("model.layers.0.input_layernorm.weight", None, 0, 1, 64)
            ),
        ),
        "has the down bias",
    ),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_plan_that_does_not_fit_the_tensors_is_refused_before_any_write(
    mixtral: Path, tmp_path: Path, case: str
) -> None:
    change, message = BAD_PLANS[case]
    checkpoint = Checkpoint.open(mixtral)
    with pytest.raises(CheckpointError, match=message):
        convert(
            checkpoint, change(mixtral_plan(checkpoint)), tmp_path / "library" / "m", bits=4, source_name="x"
        )
    assert not (tmp_path / "library").exists()


def test_mixed_types_are_refused_at_16_bits_and_quantised_otherwise(tmp_path: Path) -> None:
    source = write_mixtral(tmp_path / "source", layers=1, experts=2, hidden=64, intermediate=64)
    checkpoint = Checkpoint.open(source)
    plan = mixtral_plan(checkpoint)
    tensors = {key: (checkpoint.info(key)[0], np.array(checkpoint.array(key))) for key in checkpoint.tensors}
    key = plan.layers[0].experts[1].down.key
    tensors[key] = ("F16", tensors[key][1].astype(np.float16))
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(UnsupportedModelError, match=f"'{key}' is F16, other experts are F32"):
        convert(Checkpoint.open(source), plan, tmp_path / "m", bits=16, source_name="x")
    convert(Checkpoint.open(source), plan, tmp_path / "m", bits=8, source_name="x").verify()


@pytest.mark.parametrize("options", [{"bits": 5}, {"bits": 4, "quantizer": "gptq"}])
def test_values_out_of_range_are_usage_errors(mixtral: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    checkpoint = Checkpoint.open(mixtral)
    with pytest.raises(UsageError):
        convert(checkpoint, mixtral_plan(checkpoint), tmp_path / "m", source_name="x", **options)
    assert beside(tmp_path / "m") == ["source"]


def test_the_manifest_names_the_source(mixtral: Path, tmp_path: Path) -> None:
    _, _, store = converted(mixtral, tmp_path / "m", 4, revision="0a1b2c")
    assert store.manifest.source.name == "tiny"
    assert store.manifest.source.revision == "0a1b2c"
    assert store.manifest.source.fingerprint == Checkpoint.open(mixtral).fingerprint()
    assert store.manifest.created_by["isa"] == _native.active_isa()
    assert set(store.manifest.created_by) == {"moechat", "transformers", "torch", "isa"}
    assert [item.module for item in store.layers] == [f"model.layers.{n}.mlp.experts" for n in range(3)]
