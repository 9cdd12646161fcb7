"""Calibrated conversions: what they save, that they resume, and what happens where a model cannot run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from moechat import _native
from moechat.calibration.calibration import calibration_of
from moechat.calibration.duration import calibrated_seconds
from moechat.calibration.layer_packer import LayerPacker
from moechat.errors import CheckpointError
from moechat.geometry import Activation, Gate
from moechat.models import one_pass
from moechat.models.assets import load_tokenizer
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.store import Store


def converted(
    source: Path, destination: Path, *, bits: int = 4, notices: list[str] | None = None, **options: Any
) -> Store:
    checkpoint = Checkpoint.open(source)
    plan = plan_checkpoint(checkpoint)
    heard = [] if notices is None else notices
    calibration = calibration_of(checkpoint, plan, bits, heard.append)
    made = convert(
        checkpoint, plan, destination, bits=bits, source_name="x", calibration=calibration, **options
    )
    assert notices is not None or heard == []
    return made


def expert_hashes(store: Store) -> dict[str, str]:
    return {layer.file: store.manifest.files[layer.file].sha256 for layer in store.layers}


@pytest.fixture(scope="module")
def calibrated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return converted(checkpoint, tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return converted(checkpoint, tmp_path_factory.mktemp("plain") / "store", quantizer="least-squares")


def output_errors(source: Path, store: Store) -> list[float]:
    """Of each layer, the squared error of its experts' outputs relative to the outputs, on another text."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = load_tokenizer(source)(Path(__file__).read_text())["input_ids"]
    text = torch.tensor(ids[:1024]).reshape(4, 256)
    parts = [model.get_submodule(layer.module) for layer in store.layers]
    seen: list[tuple[Any, torch.Tensor]] = []
    hooks = [part.register_forward_hook(lambda _, given, out: seen.append((given, out))) for part in parts]
    found = []
    with torch.inference_mode():
        model(text)
        for hook in hooks:
            hook.remove()
        for layer, part, (given, wanted) in zip(store.layers, parts, seen, strict=True):
            for number, records in enumerate(store.expert_layer(layer.layer)):
                copied = np.ascontiguousarray(records)
                gate, up, down, _ = _native.unpack_expert(store.geometry.layout, copied)
                part.gate_up_proj[number] = torch.from_numpy(np.concatenate([gate, up]))
                part.down_proj[number] = torch.from_numpy(down)
            found.append(float((part(*given) - wanted).square().sum() / wanted.square().sum()))
    return found


def test_a_calibrated_store_comes_nearer_to_the_outputs_of_the_experts(
    checkpoint: Path, calibrated: Store, plain: Store
) -> None:
    assert calibrated.manifest.quantisation.method == "least-squares"
    assert calibrated.manifest.quantisation.solver == "calibrated"
    assert plain.manifest.quantisation.solver == "least-squares"
    pairs = zip(output_errors(checkpoint, calibrated), output_errors(checkpoint, plain), strict=True)
    assert all(measured < 0.8 * without for measured, without in pairs)
    names = set(calibrated.manifest.files) - set(expert_hashes(calibrated))
    assert all(calibrated.manifest.files[name] == plain.manifest.files[name] for name in names)


@pytest.mark.parametrize("stop", ["layer 0, expert 2", "layer 1, expert 1", "layer 2, expert 4"])
def test_an_interrupted_conversion_goes_on_to_the_same_bytes(
    checkpoint: Path, calibrated: Store, tmp_path: Path, stop: str
) -> None:
    packed: list[str] = []

    def interrupt(event: ConvertProgress) -> None:
        packed.append(event.detail)
        if event.detail.startswith(stop):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted(checkpoint, tmp_path / "store", progress=interrupt)
    packed.clear()
    made = converted(checkpoint, tmp_path / "store", progress=lambda event: packed.append(event.detail))
    assert expert_hashes(made) == expert_hashes(calibrated)
    layers = {detail.partition(",")[0] for detail in packed if ", expert" in detail}
    assert layers == {f"layer {layer}" for layer in range(int(stop[6]), 3)}


def test_the_tokenizer_of_a_calibration_is_the_one_that_was_compared(
    checkpoint: Path, calibrated: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that is read wrongly once would give other weights for good."""
    whole, wrong = Path.read_bytes, [True]

    def wrong_once(path: Path) -> bytes:
        content = whole(path)
        if path == checkpoint / "tokenizer.json" and wrong and wrong.pop():
            return content.replace(b"a", b"e", 1)
        return content

    monkeypatch.setattr(Path, "read_bytes", wrong_once)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json was read twice with different bytes"):
        converted(checkpoint, tmp_path / "store")
    assert expert_hashes(converted(checkpoint, tmp_path / "store")) == expert_hashes(calibrated)


def test_six_bits_or_more_and_models_without_a_tokenizer_are_not_calibrated(
    checkpoint: Path, tmp_path: Path
) -> None:
    for bits in (6, 8, 16):
        made = converted(checkpoint, tmp_path / f"{bits}", bits=bits)
        assert made.manifest.quantisation.solver in ("least-squares", "none")
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    (bare / "tokenizer.json").unlink()
    assert converted(bare, tmp_path / "store").manifest.quantisation.solver == "least-squares"


def test_a_model_that_cannot_run_over_the_text_is_quantised_without_it(
    checkpoint: Path, plain: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers before the failure keep what they have."""

    def fails(self: LayerPacker, _geometry: Any, hidden: torch.Tensor, *_: Any) -> None:
        raise RuntimeError("not enough of something")

    notices: list[str] = []
    monkeypatch.setattr(one_pass.OnePass, "run", fails)
    made = converted(checkpoint, tmp_path / "store", notices=notices)
    assert notices == ["experts are quantised without calibration: RuntimeError: not enough of something"]
    assert made.manifest.quantisation.solver == "least-squares"
    assert expert_hashes(made) == expert_hashes(plain)


def test_a_failure_in_the_middle_keeps_the_layers_before(
    checkpoint: Path, calibrated: Store, plain: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = LayerPacker.__call__
    experts = iter(range(100))

    def fails(*arguments: Any) -> None:
        if next(experts) == 6:  # of layer 1, which has four
            raise RuntimeError("not enough memory")
        pack(*arguments)

    notices: list[str] = []
    monkeypatch.setattr(LayerPacker, "__call__", fails)
    made = converted(checkpoint, tmp_path / "store", notices=notices)
    assert notices == ["experts are quantised without calibration: RuntimeError: not enough memory"]
    assert made.manifest.quantisation.solver == "least-squares"
    first, *others = made.layers
    assert expert_hashes(made)[first.file] == expert_hashes(calibrated)[first.file]
    assert all(expert_hashes(made)[layer.file] == expert_hashes(plain)[layer.file] for layer in others)
    made.verify()


def test_experts_that_no_token_chooses_are_quantised_by_the_inputs_of_the_layer(
    checkpoint: Path, tmp_path: Path
) -> None:
    geometry = plan_checkpoint(Checkpoint.open(checkpoint)).geometry(4)
    hidden = torch.randn(50, geometry.hidden_size) * torch.linspace(0.1, 3, geometry.hidden_size)
    index, weights = torch.zeros((50, 1), dtype=torch.int64), torch.ones(50, 1)
    pack = LayerPacker(geometry, 0, hidden, index, weights)
    rng = np.random.default_rng(0)
    size = (geometry.intermediate_size, geometry.hidden_size)
    gate, up, down = (rng.standard_normal(shape, np.float32) for shape in (size, size, size[::-1]))
    errors = []
    for number in (3, None):
        out = np.empty((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
        if number is None:
            _native.pack_expert(geometry.layout, gate, up, down, None, out)
        else:
            pack(number, (gate, up, down), None, out)
        restored = _native.unpack_expert(geometry.layout, out)[0]
        errors.append(float(np.square((restored - gate) @ hidden.numpy().T).sum()))
    assert errors[0] < 0.9 * errors[1]


def test_experts_without_a_gate_projection_are_calibrated(checkpoint: Path) -> None:
    shape = plan_checkpoint(Checkpoint.open(checkpoint)).geometry(4)
    geometry = replace(shape, gate=Gate(Activation.RELU2, gated=False))
    hidden = torch.randn(200, geometry.hidden_size) * torch.linspace(0.1, 3, geometry.hidden_size)
    index, weights = torch.zeros((200, 1), dtype=torch.int64), torch.ones(200, 1)
    rng = np.random.default_rng(0)
    size = (geometry.intermediate_size, geometry.hidden_size)
    first, down = (rng.standard_normal(shape, np.float32) for shape in (size, size[::-1]))

    def output(first: np.ndarray, down: np.ndarray) -> np.ndarray:
        return np.square(np.maximum(hidden.numpy() @ first.T, 0)) @ down.T

    errors = []
    for pack in (LayerPacker(geometry, 0, hidden, index, weights), None):
        out = np.empty((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
        if pack is None:
            _native.pack_expert(geometry.layout, first, None, down, None, out)
        else:
            pack(0, (first, None, down), None, out)
        stored, up, stored_down, _ = _native.unpack_expert(geometry.layout, out)
        assert up is None
        errors.append(float(np.square(output(stored, stored_down) - output(first, down)).sum()))
    assert errors[0] < 0.9 * errors[1]


def test_a_tokenizer_of_another_model_leads_to_a_notice(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny.write_tiny_checkpoint(source, tiny.tiny_config("mixtral", 0))
    tiny.write_byte_tokenizer(source)
    notices: list[str] = []
    made = converted(source, tmp_path / "store", notices=notices)
    assert len(notices) == 1
    assert "the tokenizer does not fit the model's 101 embeddings" in notices[0]
    assert made.manifest.quantisation.solver == "least-squares"


def test_the_notice_reaches_the_user(tmp_path: Path) -> None:
    """Loading a checkpoint converts it; the line is not lost behind the progress."""
    source = tmp_path / "source"
    tiny.write_tiny_checkpoint(source, tiny.tiny_config("mixtral", 0))
    tiny.write_byte_tokenizer(source)  # of more words than the model has embeddings
    command = [sys.executable, "-m", "moechat", "run", str(source), "hi", "--max-tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "experts are quantised without calibration: the tokenizer does not fit the model's" in done.stderr


def test_weights_that_are_not_finite_are_named(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2, 5, 7] = float("nan")
    model.save_pretrained(source)
    tiny.write_byte_tokenizer(source)
    with pytest.raises(CheckpointError, match=r"layers\.1\..*expert 2, gate .* row 5, column 7"):
        converted(source, tmp_path / "store")


def test_the_estimate_of_the_time_grows_with_the_experts(checkpoint: Path) -> None:
    from dataclasses import replace

    plan = plan_checkpoint(Checkpoint.open(checkpoint))
    few = calibrated_seconds(plan, 4, 2)
    more = replace(plan, experts=replace(plan.experts, num_experts=400))
    assert 0 < few < calibrated_seconds(more, 4, 200)
