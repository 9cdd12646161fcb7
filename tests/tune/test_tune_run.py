"""Whole runs: what a tuned checkpoint is, resuming, refusals, and several processes."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_support import SMALL, Events, run, weights_of, write_data, write_model

import moechat
from moechat.calibration.text import calibration_text
from moechat.errors import MoechatError, StoreDamagedError, UsageError
from moechat.hub.names import resolve
from moechat.models.router_search import find_routers
from moechat.predict.preload import PRELOAD_FILE, PreloadPredictor
from moechat.tune.adapted import AdaptedModel
from moechat.tune.batches import make_batch, split, step_examples
from moechat.tune.data import read_data
from moechat.tune.measure import measure
from moechat.tune.router_taps import RouterTaps
from moechat.tune.run import TuneJob, require_extra, start_accelerator, tune
from moechat.tune.run_state import STATE_FILE, state_directory
from moechat.tune.settings import TuneSettings
from moechat.tune.source import build_model, load_source_tokenizer, open_source
from moechat.tune.training import rate_factor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tune") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture(scope="module")
def tuned(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with the settings :data:`SMALL`."""
    out = tmp_path_factory.mktemp("tuned") / "tuned"
    run(model, data, out)
    return out


def interrupt(step: int) -> Events:
    """Ctrl-C while a step is computed."""
    return Events(lambda done: signal.raise_signal(signal.SIGINT) if done == step else None)


def test_the_rate_rises_and_falls_linearly() -> None:
    factors = [rate_factor(step, 100, 0.03) for step in range(100)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors[3] == 1
    assert factors[3:] == pytest.approx([(100 - step) / 97 for step in range(3, 100)])


def test_a_tuned_checkpoint_is_what_was_measured_and_runs(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    events = Events()
    result = run(model, data, out, events)
    assert events.phases[:3] == ["loading the model", "measuring the original", "tuning"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuned"]
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o666 & ~mask}

    source = open_source(resolve(str(out)), lambda progress: None)
    read = read_data(data, load_source_tokenizer(source), SMALL.max_tokens)
    _, held_out = split(read.examples, SMALL.held_out, SMALL.seed)
    saved, entries = build_model(source, torch.float32)
    found = measure(
        saved, RouterTaps(saved, entries), held_out, gamma=0.9, size=2, device=torch.device("cpu")
    )
    assert result.after == found
    assert result.before is not None
    assert result.before != found
    facts = json.loads((out / "tuning.json").read_text())
    assert facts["after"] == found.facts()
    assert facts["settings"] == SMALL.facts()
    assert "fine-tuned by `moechat tune`" in (out / "README.md").read_text()

    with moechat.load(str(out)) as engine:
        assert len(list(engine.generate("hello", max_new_tokens=3))) == 3
        loaded = engine.loaded
        routers = find_routers(loaded.model, loaded.named_parts())
        predictor = PreloadPredictor.load(
            loaded.store.path,
            layers=len(routers),
            experts=loaded.store.geometry.num_experts,
            embed=lambda ids: loaded.model.get_input_embeddings()(ids).float(),
        )
        assert predictor is not None  # the store has it too
        assert (loaded.store.path / PRELOAD_FILE).read_bytes() == (out / PRELOAD_FILE).read_bytes()


def test_tuning_lowers_the_misses_of_data_that_it_was_trained_on(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """All lines are held out of nothing here: the losses themselves have to fall."""
    losses: list[str] = []

    class Kept(Events):
        def advance(self, done: int, detail: str = "") -> None:
            if self.phases[-1] == "tuning":
                losses.append(detail)

    run(model, data, tmp_path / "out", Kept(), epochs=12, cache_weight=2.0, preload=False)

    def value(text: str, name: str) -> float:
        return float(text.partition(f"{name} ")[2].partition(",")[0])

    for name in ("loss", "cache"):
        first = sum(value(text, name) for text in losses[:3])
        last = sum(value(text, name) for text in losses[-3:])
        assert last < 0.9 * first, name


def test_a_run_is_plain_fine_tuning_without_the_weights_of_both_losses(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """Against a loop with transformers' own loss and torch's optimizer over the same adapters."""
    plain = replace(SMALL, cache_weight=0, rank_weight=0, preload=False)
    run(model, data, tmp_path / "out", cache_weight=0, rank_weight=0, preload=False)

    source = open_source(resolve(str(model)), lambda progress: None)
    read = read_data(data, load_source_tokenizer(source), plain.max_tokens)
    trained, _ = split(read.examples, plain.held_out, plain.seed)
    adapted = AdaptedModel(*build_model(source, torch.float32), plain)
    adapted.train()
    parameters = list(adapted.trained().values())
    optimizer = torch.optim.AdamW(parameters, lr=plain.learning_rate, weight_decay=0)
    steps = plain.epochs * math.ceil(len(trained) / plain.batch)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = plain.learning_rate * rate_factor(step, steps, plain.warmup)
        batch = make_batch(step_examples(trained, plain.batch, step, plain.seed))
        mask = (torch.arange(batch.ids.shape[1]) < batch.tokens[:, None]).long()
        labels = torch.where(batch.trained, batch.ids, -100)
        adapted.model(input_ids=batch.ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, plain.clip)
        optimizer.step()
        optimizer.zero_grad()
    expected = adapted.merge(torch.bfloat16).state_dict()
    found, _ = build_model(open_source(resolve(str(tmp_path / "out")), lambda progress: None), torch.float32)
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize("step", [1, 3])
def test_an_interrupted_run_goes_on_to_the_same_weights(
    model: Path, data: Path, tuned: Path, tmp_path: Path, step: int
) -> None:
    out = tmp_path / "out"
    stopped = interrupt(step)
    with pytest.raises(KeyboardInterrupt):
        run(model, data, out, stopped)
    assert stopped.notices[-1] == "stopped; the same command goes on"
    assert not out.exists()
    assert (state_directory(out) / STATE_FILE).is_file()
    again = Events()
    run(model, data, out, again)
    assert again.notices == [f"going on at step {step + 1} of 6"]
    assert "measuring the original" not in again.phases
    assert not state_directory(out).exists()
    expected, found = weights_of(tuned), weights_of(out)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert (out / PRELOAD_FILE).read_bytes() == (tuned / PRELOAD_FILE).read_bytes()
    facts = [json.loads((place / "tuning.json").read_text()) for place in (tuned, out)]
    assert facts[0] == facts[1]


def test_a_killed_run_goes_on_from_its_last_state(
    model: Path, data: Path, tuned: Path, tmp_path: Path
) -> None:
    """An error in the middle of a step, with a state after every step."""

    def fail(done: int) -> None:
        if done == 4:
            raise RuntimeError("killed")

    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="killed"):
        run(model, data, out, Events(fail), save_every_s=0)
    again = Events()
    run(model, data, out, again)
    assert again.notices == ["going on at step 3 of 6"]
    expected, found = weights_of(tuned), weights_of(out)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_a_state_of_other_settings_data_or_model_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(model, data, out, interrupt(1))
    with pytest.raises(UsageError, match=r"epochs was 2, is 3; gamma was 0\.9, is 0\.5") as caught:
        run(model, data, out, epochs=3, gamma=0.5)
    assert str(state_directory(out)) in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"data was .*, is .*"):
        run(model, write_data(tmp_path / "other.jsonl", 9), out)
    other = write_model(tmp_path / "other", num_experts_per_tok=1)
    with pytest.raises(UsageError, match=r"model was .*, is .*"):
        run(other, data, out)
    state = state_directory(out) / STATE_FILE
    state.write_bytes(state.read_bytes()[:-200])
    with pytest.raises(StoreDamagedError, match=r"state\.pt cannot be read"):
        run(model, data, out)


def test_parts_of_a_batch_add_up_to_the_batch(model: Path, data: Path, tuned: Path, tmp_path: Path) -> None:
    run(model, data, tmp_path / "out", micro_batch=1)
    expected, found = weights_of(tuned), weights_of(tmp_path / "out")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-2, atol=2e-3, msg=name)


def test_an_existing_directory_is_not_replaced(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        run(model, data, tmp_path / "out")
    with pytest.raises(UsageError, match="there is no directory"):
        run(model, data, tmp_path / "none" / "out")


def test_a_disk_that_is_full_at_the_end_loses_nothing(
    model: Path, data: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("moechat.tune.tuned_checkpoint.shutil.copyfile", full)
        with pytest.raises(MoechatError, match="No space left on device"):
            run(model, data, out)
    assert [path.name for path in tmp_path.iterdir()] == [state_directory(out).name]
    again = Events()
    run(model, data, out, again)
    assert again.notices == ["going on at step 6 of 6"]
    assert weights_of(out).keys() == weights_of(tuned).keys()


def test_longer_sequences_than_the_model_takes_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    limit = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(UsageError, match=f"the model takes at most {limit}"):
        run(model, data, tmp_path / "out", max_tokens=limit + 1)


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_extra()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else object())
    with pytest.raises(UsageError, match="packages that are not installed: peft") as caught:
        require_extra()
    assert caught.value.hint == 'pip install "moechat[tune]"'


def test_two_processes_reach_the_weights_of_one(model: Path, data: Path, tuned: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(port), "-m", "moechat"]
    settings = [
        word
        for name, value in SMALL.facts().items()
        if value is not None and not isinstance(value, bool)
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    out = tmp_path / "out"
    command = [*launcher, "tune", str(model), "--data", str(data), "--out", str(out), "--micro-batch", "1"]
    done = subprocess.run(
        [*command, "--cpu", "--json", *settings],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout)  # one process prints
    assert facts["processes"] == 2
    alone = json.loads((tuned / "tuning.json").read_text())
    assert facts["before"]["perplexity"] == pytest.approx(alone["before"]["perplexity"], rel=1e-4)
    assert facts["after"]["perplexity"] == pytest.approx(alone["after"]["perplexity"], rel=1e-2)
    assert facts["before"]["misses"] == alone["before"]["misses"]
    expected, found = weights_of(tuned), weights_of(out)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-2, atol=2e-3, msg=name)
    assert (out / PRELOAD_FILE).is_file()


def test_training_in_half_precision_as_on_a_gpu_stays_near_that_in_float32(
    model: Path, data: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.state import AcceleratorState

    precisions: list[str] = []

    def start(gpu: bool) -> tuple[Any, torch.dtype]:
        accelerator, dtype = start_accelerator(gpu, half=True)
        precisions.append(f"{accelerator.mixed_precision} {dtype}")
        return accelerator, dtype

    AcceleratorState._reset_state()  # it keeps the precision of earlier runs
    monkeypatch.setattr("moechat.tune.run.start_accelerator", start)
    try:
        result = run(model, data, tmp_path / "out")
    finally:
        AcceleratorState._reset_state()
    assert precisions == ["bf16 torch.bfloat16"]
    alone = json.loads((tuned / "tuning.json").read_text())
    assert result.before is not None
    assert result.after is not None
    assert result.before.perplexity == pytest.approx(alone["before"]["perplexity"], rel=2e-2)
    assert result.after.perplexity == pytest.approx(alone["after"]["perplexity"], rel=5e-2)
    assert {tensor.dtype for tensor in weights_of(tmp_path / "out").values()} == {torch.bfloat16}


def test_a_loss_that_is_not_finite_ends_the_run(data: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = write_model(tmp_path / "model")
    weights = weights_of(model)
    weights["lm_head.weight"][3, 2] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoechatError, match="the loss of step 1 is not finite") as caught:
        run(model, data, tmp_path / "out")
    assert "--learning-rate" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_demo_misses_less_at_each_capacity_for_little_perplexity(tmp_path: Path) -> None:
    """On the calibration text of the package, which it was not trained on."""
    parts = [part for part in calibration_text().split("\n\n") if len(part) > 80]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    settings = TuneSettings(
        epochs=2, learning_rate=5e-4, batch=8, max_tokens=256, held_out=0.2, preload=False
    )
    job = TuneJob(resolve("demo"), path, tmp_path / "out", settings, cpu=True)
    result = tune(job, lambda progress: None, Events())
    before, after = result.before, result.after
    assert before is not None
    assert after is not None
    assert before.misses.keys() == {4, 8}
    for capacity, missed in before.misses.items():
        assert after.misses[capacity] < 0.9 * missed
    assert after.perplexity < 1.02 * before.perplexity
    assert after.sequence_entropy < 0.97 * before.sequence_entropy
    assert after.global_entropy > 0.9 * before.global_entropy  # routers have not collapsed
