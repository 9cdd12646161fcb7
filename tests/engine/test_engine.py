"""The Python API on a tiny real checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BYTE_VOCABULARY, write_byte_tokenizer, write_tiny_chat_model

import moechat
from moechat.engine import Engine, Progress
from moechat.errors import (
    DoesNotFitError,
    ModelNotFoundError,
    MoechatError,
    PromptTooLongError,
    StoreDamagedError,
    UsageError,
)
from moechat.models.prompt_cache import CachedTokens
from moechat.offload.settings import OffloadOptions

MESSAGES = [{"role": "user", "content": "Hello"}]


def collect(steps: Any) -> tuple[str, list[int], str | None]:
    seen = list(steps)
    assert all(step.finish_reason is None for step in seen[:-1])
    return "".join(step.text for step in seen), [step.token_id for step in seen], seen[-1].finish_reason


def test_greedy_answers_are_reproducible(engine: Engine) -> None:
    first = collect(engine.generate("Once upon a time", max_new_tokens=24, temperature=0.0))
    assert first == collect(engine.generate("Once upon a time", max_new_tokens=24, temperature=0.0))
    assert len(first[1]) == 24
    assert first[2] == "length"


def test_step_by_step_decoding_matches_one_teacher_forced_pass(chat_model: Path, home: Path) -> None:
    # In bfloat16, the default on some CPUs, the two best of 256 tokens may have equal logits.
    with moechat.load(chat_model, dtype="float32") as engine:
        tokens = engine.encode("Once upon a time")
        _, answer, _ = collect(engine.generate(tokens, max_new_tokens=20, temperature=0.0))
        logits = engine.logits(tokens + answer[:-1])
    assert logits.shape == (len(tokens) + 19, BYTE_VOCABULARY)
    assert logits.dtype == torch.float32
    assert logits[len(tokens) - 1 :].argmax(dim=-1).tolist() == answer


def test_streamed_text_is_the_decoded_answer(engine: Engine) -> None:
    text, answer, _ = collect(engine.generate("naïve 日本", max_new_tokens=40, temperature=1.5, seed=5))
    decoded = engine.prompts.tokenizer.decode(
        answer, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert text == decoded


def test_same_seed_samples_the_same_answer_and_is_reported(engine: Engine) -> None:
    first = collect(engine.generate("x", max_new_tokens=16, temperature=1.0))
    seed = engine.stats.seed
    assert collect(engine.generate("x", max_new_tokens=16, temperature=1.0, seed=seed)) == first
    assert collect(engine.generate("x", max_new_tokens=16, temperature=1.0, seed=seed + 1)) != first


def test_stop_token_ends_the_answer_and_is_not_shown(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    free = collect(engine.generate("Hello", max_new_tokens=12, temperature=0.0))
    stop = free[1][5]
    monkeypatch.setattr(engine.decoder, "stop_tokens", frozenset([stop]))
    text, answer, reason = collect(engine.generate("Hello", max_new_tokens=12, temperature=0.0))
    assert answer == free[1][: free[1].index(stop) + 1]
    assert reason == "stop"
    assert text == engine.prompts.tokenizer.decode(answer[:-1], skip_special_tokens=True)


def test_stop_tokens_come_from_generation_config_and_tokenizer(
    chat_model: Path, home: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(chat_model, source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "max_new_tokens": 3}))
    loaded = moechat.load(source)
    assert loaded.decoder.stop_tokens == {7, 9, loaded.prompts.tokenizer.eos_token_id}
    assert len(collect(loaded.generate("a", temperature=0.0))[1]) <= 3


def test_chat_messages_go_through_the_template(engine: Engine) -> None:
    assert engine.has_chat_template
    tokens = engine.encode([{"role": "system", "content": "Be kind"}, *MESSAGES])
    assert (
        engine.prompts.tokenizer.decode(tokens) == "<|system|>Be kind<|end|><|user|>Hello<|end|><|assistant|>"
    )
    assert collect(engine.generate(MESSAGES, max_new_tokens=4, temperature=0.0))[1]


def test_model_without_chat_template_rejects_messages(home: Path, tmp_path: Path) -> None:
    write_tiny_chat_model(tmp_path / "model")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
    write_byte_tokenizer(tmp_path / "model", chat_template=None)
    loaded = moechat.load(tmp_path / "model")
    with pytest.raises(UsageError, match="no chat template"):
        loaded.generate(MESSAGES)


def test_abandoned_and_interrupted_answers_leave_the_engine_usable(engine: Engine) -> None:
    expected = collect(engine.generate("Hello", max_new_tokens=8, temperature=0.0))
    steps = engine.generate("Something else entirely", max_new_tokens=50)
    next(steps)
    steps.close()  # type: ignore[attr-defined]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = engine.loaded.model.get_submodule("model.layers.1").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate("Hello", max_new_tokens=8))
    hook.remove()
    assert collect(engine.generate("Hello", max_new_tokens=8, temperature=0.0)) == expected


def test_prompt_longer_than_the_context_is_rejected_before_computing(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError, match=r"300 tokens; the context holds 256"):
        engine.generate([5] * 300)
    with pytest.raises(PromptTooLongError):
        engine.generate([5] * 256)
    assert engine.logits([5] * 256).shape[0] == 256


def test_answer_stops_at_the_end_of_the_context(engine: Engine) -> None:
    _, answer, reason = collect(engine.generate([5] * 250, temperature=1.0, seed=1))
    assert (len(answer) == 6 and reason == "length") or reason == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_p": 2.0}, "top-p is 2.0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"reserve": "3"}, "reserve is '3'"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
    ],
)
def test_invalid_settings_are_rejected(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.generate("x", **arguments)


def test_invalid_tokens_are_rejected(engine: Engine) -> None:
    for tokens in ([], [-1], [BYTE_VOCABULARY]):
        with pytest.raises(UsageError):
            engine.logits(tokens)
    with pytest.raises(UsageError, match="empty"):
        engine.generate("")


def test_statistics_count_tokens_and_time(engine: Engine) -> None:
    prompt = engine.encode("Once upon")
    list(engine.generate(prompt, max_new_tokens=10, temperature=0.0))
    stats = engine.stats
    layers, top_k = 2, 2
    assert stats.prompt_tokens == len(prompt)
    assert stats.output_tokens == 10
    assert stats.expert_activations == (len(prompt) + 9) * layers * top_k
    assert stats.ttft_s > 0
    assert stats.tpot_s > 0
    assert stats.expert_bytes % engine.loaded.store.geometry.expert_bytes == 0
    assert stats.peak_rss_bytes > 10_000_000
    assert json.loads(json.dumps(stats.to_json()))["output_tokens"] == 10


def test_logits_are_bitwise_equal_for_every_thread_count(engine: Engine, chat_model: Path) -> None:
    tokens = engine.encode("The fox and the crow, again and again")
    torch.set_num_threads(1)
    results = []
    for threads in (1, 2, 3):
        moechat._native.set_num_threads(threads)
        results.append(engine.logits(tokens))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_second_load_reuses_the_converted_store(chat_model: Path, home: Path, engine: Engine) -> None:
    stages: list[str] = []
    again = moechat.load(chat_model, progress=lambda event: stages.append(event.stage))
    assert set(stages) == {"load"}
    assert again.loaded.store.path.is_relative_to(home)


def test_first_load_reports_conversion_with_bytes(home: Path, tmp_path: Path) -> None:
    write_tiny_chat_model(tmp_path / "model")
    events: list[Progress] = []
    moechat.load(tmp_path / "model", progress=events.append)
    converted = [event for event in events if event.stage == "convert"]
    assert converted[-1].done == converted[-1].total
    assert converted[-1].total


def test_changed_checkpoint_is_converted_again(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_tiny_chat_model(source)
    before = moechat.load(source).logits([1, 2, 3])
    write_tiny_chat_model(source, "olmoe", num_key_value_heads=4)
    loaded = moechat.load(source)
    assert loaded.describe().model_type == "olmoe"
    assert not torch.equal(loaded.logits([1, 2, 3]), before)


def test_a_store_of_an_older_format_is_converted_again(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_tiny_chat_model(source)
    first = moechat.load(source)
    before = first.logits([1, 2, 3])
    manifest = first.loaded.store.path / "manifest.json"
    content = json.loads(manifest.read_text())
    content["format_version"] = 1
    manifest.write_text(json.dumps(content))
    stages: list[str] = []
    again = moechat.load(source, progress=lambda event: stages.append(event.stage))
    assert "convert" in stages
    assert json.loads(manifest.read_text())["format_version"] == 2
    assert torch.equal(again.logits([1, 2, 3]), before)


def test_a_store_directory_can_be_loaded(engine: Engine, home: Path) -> None:
    direct = moechat.load(engine.loaded.store.path)
    assert torch.equal(direct.logits([1, 2, 3]), engine.logits([1, 2, 3]))
    with pytest.raises(UsageError, match="stored with 4 bits"):
        moechat.load(engine.loaded.store.path, bits=8)


def test_damaged_store_is_rejected_with_the_name_of_the_file(
    home: Path, chat_model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(chat_model, source)
    path = moechat.load(source).loaded.store.path
    victim = sorted(path.glob("experts-*.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)
    with pytest.raises(StoreDamagedError, match=victim.name):
        moechat.load(source)


def test_unknown_names_are_rejected(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        moechat.load(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError):
        moechat.load("no-such-model")


@pytest.mark.parametrize(
    "arguments",
    [
        {"bits": "4"},
        {"device": "cuda"},
        {"vram": "12G"},
        {"ram": "two"},
        {"ram": -1},
        {"ram": True},
        {"ram": 2.5},
        {"system": "no-such-system"},
        {"dtype": "int4"},
        {"ram": 10**30},
        {"threads": 0},
        {"threads": 1.5},
        {"threads": "2"},
        {"threads": True},
        {"threads": 1025},
        {"ctx": "100"},
        {"ctx": 1},
        {"offload": OffloadOptions(pages=10**12)},
        {"offload": OffloadOptions(pages=10**30)},
        {"offload": OffloadOptions(pages=-1)},
        {"bits": 5},
        {"bits": 4.0},
    ],
)
def test_unsupported_options_are_rejected_with_a_reason(
    arguments: dict[str, Any], chat_model: Path, home: Path
) -> None:
    with pytest.raises(UsageError):
        moechat.load(chat_model, **arguments)


@pytest.mark.parametrize("model", [None, 7, b"demo"])
def test_model_must_be_a_name_or_a_path(model: Any) -> None:
    with pytest.raises(UsageError, match="the model is of type"):
        moechat.load(model)


def test_failed_page_allocation_is_reported_as_does_not_fit(chat_model: Path, home: Path) -> None:
    with pytest.raises(DoesNotFitError, match="1000000000 pages of experts cannot be made"):
        moechat.load(chat_model, offload=OffloadOptions(pages=10**9))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_does_not_hang(engine: Engine) -> None:
    steps = engine.generate("Once upon a time", max_new_tokens=4, temperature=0.0)
    next(steps)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        errors = 0
        for use in (lambda: next(steps), lambda: engine.logits([5, 6]), lambda: engine.generate([5])):
            try:
                use()
            except MoechatError as error:
                errors += "forked child" in str(error) and "spawn" in str(error.hint)
            except BaseException:
                break
        os._exit(3 - errors)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert len(list(steps)) == 3


def test_context_beyond_the_model_does_not_fit(chat_model: Path, home: Path) -> None:
    with pytest.raises(DoesNotFitError, match="made for 256"):
        moechat.load(chat_model, ctx=512)
    assert moechat.load(chat_model, ctx=64).context_length == 64


def conversation(engine: Engine, turns: int) -> tuple[list[list[int]], list[int]]:
    """Greedy answers to a growing prompt, in tokens, and how many prompt tokens each turn reused."""
    tokens, answers, reused = engine.encode("Once upon a time"), [], []
    for _ in range(turns):
        _, answer, _ = collect(engine.generate(tokens, max_new_tokens=12, temperature=0.0))
        reused.append(engine.stats.reused_tokens)
        answers.append(answer)
        tokens = tokens + answer + engine.encode(" and then")
    return answers, reused


def test_next_turn_computes_only_new_tokens(engine: Engine) -> None:
    engine.drop_prompt_cache()
    _, reused = conversation(engine, 3)
    first = len(engine.encode("Once upon a time"))
    turn = 12 + len(engine.encode(" and then"))
    # The last token of an answer was sampled but not computed.
    assert reused == [0, first + 11, first + turn + 11]


def test_progress_reports_computed_prompt_tokens_and_keeps_the_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.drop_prompt_cache()
    engine.passes.loaded = replace(engine.loaded, chunk=8)
    reports: list[tuple[int, int]] = []
    tokens = engine.encode("Once upon a time there")
    _, answer, _ = collect(
        engine.generate(
            tokens, max_new_tokens=9, temperature=0.0, progress=lambda *state: reports.append(state)
        )
    )
    assert reports == [(computed, 22) for computed in (0, 8, 16, 22)]
    assert engine.stats.prompt_tokens == len(tokens) == 22
    assert engine.stats.output_tokens == 9
    reports.clear()
    more = [*tokens, *answer, 5, 5]
    collect(engine.generate(more, max_new_tokens=2, progress=lambda *state: reports.append(state)))
    assert (engine.stats.reused_tokens, reports) == (30, [(30, 33), (33, 33)])
    engine.drop_prompt_cache()
    assert collect(engine.generate(tokens, max_new_tokens=9, temperature=0.0))[1] == answer


def test_reusing_the_cache_does_not_change_the_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, _ = conversation(engine, 3)
    monkeypatch.setattr(engine.decoder.prompt_cache, "take", lambda _tokens, _most: CachedTokens())
    assert conversation(engine, 3)[0] == kept


def test_identical_prompt_is_recomputed(engine: Engine) -> None:
    for _ in range(2):
        collect(engine.generate(MESSAGES, max_new_tokens=5, temperature=0.0))
        assert engine.stats.reused_tokens == 0


def test_interleaved_answers_are_independent(engine: Engine) -> None:
    expected = [
        collect(engine.generate(p, max_new_tokens=9, temperature=0.0)) for p in ("Hello", "Hello there")
    ]
    first = engine.generate("Hello", max_new_tokens=9, temperature=0.0)
    second = engine.generate("Hello there", max_new_tokens=9, temperature=0.0)
    pairs = list(zip(first, second, strict=True))
    assert [collect(side) for side in zip(*pairs, strict=True)] == expected


@pytest.mark.parametrize("family", ["gpt_oss", "lfm2_moe", "minimax"])
def test_caches_that_cannot_be_cut_are_reused_as_a_whole(family: str, home: Path, tmp_path: Path) -> None:
    """Sliding windows and convolutions overwrite; MiniMax's states do not carry across parts."""
    write_tiny_chat_model(tmp_path / "model", family)
    with moechat.load(tmp_path / "model") as loaded:
        _, reused = conversation(loaded, 2)
        first = len(loaded.encode("Once upon a time"))
        assert reused == [0, 0 if family == "minimax" else first + 11]


def test_edited_answer_reuses_the_common_prefix(engine: Engine) -> None:
    prompt = engine.encode("Once upon a time")
    _, answer, _ = collect(engine.generate(prompt, max_new_tokens=12, temperature=0.0))
    edited = [*prompt, *answer[:5], *engine.encode(" something else")]
    assert edited[len(prompt) + 5] != answer[5]
    again = collect(engine.generate(edited, max_new_tokens=8, temperature=0.0))
    assert engine.stats.reused_tokens == len(prompt) + 5
    engine.drop_prompt_cache()
    assert collect(engine.generate(edited, max_new_tokens=8, temperature=0.0)) == again


def test_context_can_be_reserved_for_the_answer(engine: Engine) -> None:
    engine.generate([5] * 200, reserve=56)
    with pytest.raises(PromptTooLongError, match="of which 57 for the answer"):
        engine.generate([5] * 200, reserve=57)


def test_statistics_are_those_of_the_most_recently_advanced_answer(engine: Engine) -> None:
    first = engine.generate([5] * 7, max_new_tokens=4, temperature=0.0)
    second = engine.generate([6] * 9, max_new_tokens=2, temperature=0.0)
    next(first)
    list(second)
    list(first)
    stats = engine.stats
    assert (stats.prompt_tokens, stats.output_tokens) == (7, 4)
    assert stats.expert_activations == (7 + 3) * 2 * 2


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_tiny_temperature_is_greedy(engine: Engine, temperature: float) -> None:
    greedy = collect(engine.generate("Hello", max_new_tokens=6, temperature=0.0))
    assert collect(engine.generate("Hello", max_new_tokens=6, temperature=temperature)) == greedy


def test_token_ids_may_be_a_tensor_and_must_be_integers(engine: Engine) -> None:
    assert torch.equal(engine.logits(torch.tensor([1, 2, 3])), engine.logits([1, 2, 3]))  # type: ignore[arg-type]
    for bad in ([1.5], ["a"], [2**70]):
        with pytest.raises(UsageError, match="token ids"):
            engine.logits(bad)  # type: ignore[arg-type]
    for prompt in (None, 5, iter([1, 2])):
        with pytest.raises(UsageError, match="the prompt is of type"):
            engine.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not Unicode"):
        engine.encode("\udc80")


def test_default_threads_do_not_depend_on_an_earlier_engine(chat_model: Path, home: Path) -> None:
    usual = moechat.load(chat_model).describe().threads
    assert moechat.load(chat_model, threads=usual + 1).describe().threads == usual + 1
    assert moechat.load(chat_model).describe().threads == usual


def test_a_path_is_never_resolved_as_a_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_chat_model(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert moechat.load(Path("demo")).describe().expert_layers == 2


def test_values_out_of_range_in_generation_config_are_ignored(
    chat_model: Path, home: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(chat_model, source)
    shipped = {"do_sample": True, "top_k": -1, "top_p": 7, "temperature": 0.5}
    (source / "generation_config.json").write_text(json.dumps(shipped))
    loaded = moechat.load(source)
    assert loaded.sampling.temperature == 0.5
    assert (loaded.sampling.top_k, loaded.sampling.top_p) == (0, 1.0)


def test_outdated_store_is_replaced_even_if_damaged(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_tiny_chat_model(source)
    path = moechat.load(source).loaded.store.path
    next(path.glob("experts-*")).unlink()
    with pytest.raises(StoreDamagedError):
        moechat.load(source)
    write_tiny_chat_model(source, "olmoe", num_key_value_heads=4)
    assert moechat.load(source).describe().model_type == "olmoe"


@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupted_answer_keeps_the_computed_tokens(engine: Engine, layer: int) -> None:
    """Ctrl-C in the middle of a pass: some layers hold the new token, others not."""
    prompt = engine.encode("Once upon a time")
    steps = engine.generate(prompt, max_new_tokens=12, temperature=0.0)
    answer = [next(steps).token_id for _ in range(5)]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    module = engine.loaded.model.get_submodule(f"model.layers.{layer}.mlp")
    hook = module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    hook.remove()
    longer = [*prompt, *answer, *engine.encode(" and then")]
    again = collect(engine.generate(longer, max_new_tokens=8, temperature=0.0))
    assert engine.stats.reused_tokens == len(prompt) + 4
    engine.drop_prompt_cache()
    assert collect(engine.generate(longer, max_new_tokens=8, temperature=0.0)) == again
