"""The Python API on a tiny real checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
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
from moechat.offload.settings import OffloadOptions

MESSAGES = [{"role": "user", "content": "Hello"}]


def collect(steps: Any) -> tuple[str, list[int], str | None]:
    seen = list(steps)
    assert all(step.finish_reason is None for step in seen[:-1])
    return "".join(step.text for step in seen), [step.token_id for step in seen], seen[-1].finish_reason


def test_greedy_answers_repeat(engine: Engine) -> None:
    first = collect(engine.generate("Once upon a time", max_new_tokens=24, temperature=0.0))
    assert first == collect(engine.generate("Once upon a time", max_new_tokens=24, temperature=0.0))
    assert len(first[1]) == 24
    assert first[2] == "length"


def test_decoding_step_by_step_agrees_with_one_teacher_forced_pass(chat_model: Path, home: Path) -> None:
    # In bfloat16, which some CPUs take by themselves, the two best of 256 tokens may be equal.
    with moechat.load(chat_model, dtype="float32") as engine:
        tokens = engine.encode("Once upon a time")
        _, answer, _ = collect(engine.generate(tokens, max_new_tokens=20, temperature=0.0))
        logits = engine.logits(tokens + answer[:-1])
    assert logits.shape == (len(tokens) + 19, BYTE_VOCABULARY)
    assert logits.dtype == torch.float32
    assert logits[len(tokens) - 1 :].argmax(dim=-1).tolist() == answer


def test_streamed_text_is_the_decoded_answer(engine: Engine) -> None:
    text, answer, _ = collect(engine.generate("naïve 日本", max_new_tokens=40, temperature=1.5, seed=5))
    decoded = engine._tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert text == decoded


def test_seed_repeats_a_draw_and_is_reported(engine: Engine) -> None:
    first = collect(engine.generate("x", max_new_tokens=16, temperature=1.0))
    seed = engine.stats.seed
    assert collect(engine.generate("x", max_new_tokens=16, temperature=1.0, seed=seed)) == first
    assert collect(engine.generate("x", max_new_tokens=16, temperature=1.0, seed=seed + 1)) != first


def test_stop_token_ends_the_answer_and_is_not_shown(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    free = collect(engine.generate("Hello", max_new_tokens=12, temperature=0.0))
    stop = free[1][5]
    monkeypatch.setattr(engine, "_stop_tokens", frozenset([stop]))
    text, answer, reason = collect(engine.generate("Hello", max_new_tokens=12, temperature=0.0))
    assert answer == free[1][: free[1].index(stop) + 1]
    assert reason == "stop"
    assert text == engine._tokenizer.decode(answer[:-1], skip_special_tokens=True)


def test_stop_tokens_come_from_generation_config_and_tokenizer(
    chat_model: Path, home: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(chat_model, source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "max_new_tokens": 3}))
    loaded = moechat.load(source)
    assert loaded._stop_tokens == {7, 9, loaded._tokenizer.eos_token_id}
    assert len(collect(loaded.generate("a", temperature=0.0))[1]) <= 3


def test_chat_messages_go_through_the_template(engine: Engine) -> None:
    assert engine.has_chat_template
    tokens = engine.encode([{"role": "system", "content": "Be kind"}, *MESSAGES])
    assert engine._tokenizer.decode(tokens) == "<|system|>Be kind<|end|><|user|>Hello<|end|><|assistant|>"
    assert collect(engine.generate(MESSAGES, max_new_tokens=4, temperature=0.0))[1]


def test_model_without_chat_template_refuses_messages(home: Path, tmp_path: Path) -> None:
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

    hook = engine._model.get_submodule("model.layers.1").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate("Hello", max_new_tokens=8))
    hook.remove()
    assert collect(engine.generate("Hello", max_new_tokens=8, temperature=0.0)) == expected


def test_prompt_longer_than_the_context_is_refused_before_any_work(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError, match=r"300 tokens; the context holds 256"):
        engine.generate([5] * 300)
    with pytest.raises(PromptTooLongError):
        engine.generate([5] * 256)
    assert engine.logits([5] * 256).shape[0] == 256


def test_answer_stops_where_the_context_ends(engine: Engine) -> None:
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
def test_bad_settings_are_refused(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.generate("x", **arguments)


def test_bad_tokens_are_refused(engine: Engine) -> None:
    for tokens in ([], [-1], [BYTE_VOCABULARY]):
        with pytest.raises(UsageError):
            engine.logits(tokens)
    with pytest.raises(UsageError, match="empty"):
        engine.generate("")


def test_statistics_count_what_happened(engine: Engine) -> None:
    prompt = engine.encode("Once upon")
    list(engine.generate(prompt, max_new_tokens=10, temperature=0.0))
    stats = engine.stats
    layers, top_k = 2, 2
    assert stats.prompt_tokens == len(prompt)
    assert stats.output_tokens == 10
    assert stats.expert_activations == (len(prompt) + 9) * layers * top_k
    assert stats.ttft_s > 0
    assert stats.tpot_s > 0
    assert stats.expert_bytes % engine._store.geometry.expert_bytes == 0
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


def test_second_load_uses_the_kept_store(chat_model: Path, home: Path, engine: Engine) -> None:
    stages: list[str] = []
    again = moechat.load(chat_model, progress=lambda event: stages.append(event.stage))
    assert set(stages) == {"load"}
    assert again._store.path.is_relative_to(home)


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
    assert loaded.describe()["model_type"] == "olmoe"
    assert not torch.equal(loaded.logits([1, 2, 3]), before)


def test_a_store_directory_is_a_model_too(engine: Engine, home: Path) -> None:
    direct = moechat.load(engine._store.path)
    assert torch.equal(direct.logits([1, 2, 3]), engine.logits([1, 2, 3]))
    with pytest.raises(UsageError, match="stored with 4 bits"):
        moechat.load(engine._store.path, bits=8)


def test_damaged_store_is_refused_by_name(home: Path, chat_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(chat_model, source)
    path = moechat.load(source)._store.path
    victim = sorted(path.glob("experts-*.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)
    with pytest.raises(StoreDamagedError, match=victim.name):
        moechat.load(source)


def test_unknown_names_are_refused(home: Path, tmp_path: Path) -> None:
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
def test_what_this_version_cannot_do_is_said(arguments: dict[str, Any], chat_model: Path, home: Path) -> None:
    with pytest.raises(UsageError):
        moechat.load(chat_model, **arguments)


@pytest.mark.parametrize("model", [None, 7, b"demo"])
def test_a_model_is_a_name_or_a_path(model: Any) -> None:
    with pytest.raises(UsageError, match="the model is of type"):
        moechat.load(model)


def test_pages_that_the_system_refuses_do_not_fit(chat_model: Path, home: Path) -> None:
    with pytest.raises(DoesNotFitError, match="1000000000 pages of experts cannot be made"):
        moechat.load(chat_model, offload=OffloadOptions(pages=10**9))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_and_does_not_hang(engine: Engine) -> None:
    steps = engine.generate("Once upon a time", max_new_tokens=4, temperature=0.0)
    next(steps)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        told = 0
        for use in (lambda: next(steps), lambda: engine.logits([5, 6]), lambda: engine.generate([5])):
            try:
                use()
            except MoechatError as error:
                told += "forked child" in str(error) and "spawn" in str(error.hint)
            except BaseException:
                break
        os._exit(3 - told)
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


def test_next_turn_computes_only_what_is_new(engine: Engine) -> None:
    engine._prompt_cache.drop()
    _, reused = conversation(engine, 3)
    first = len(engine.encode("Once upon a time"))
    turn = 12 + len(engine.encode(" and then"))
    # The last token of an answer was drawn but never fed.
    assert reused == [0, first + 11, first + turn + 11]


def test_progress_tells_how_much_of_the_prompt_is_computed_and_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._prompt_cache.drop()
    monkeypatch.setattr(engine._loaded, "chunk", 8)
    told: list[tuple[int, int]] = []
    tokens = engine.encode("Once upon a time there")
    _, answer, _ = collect(
        engine.generate(tokens, max_new_tokens=9, temperature=0.0, progress=lambda *state: told.append(state))
    )
    assert told == [(computed, 22) for computed in (0, 8, 16, 22)]
    assert engine.stats.prompt_tokens == len(tokens) == 22
    assert engine.stats.output_tokens == 9
    told.clear()
    more = [*tokens, *answer, 5, 5]
    collect(engine.generate(more, max_new_tokens=2, progress=lambda *state: told.append(state)))
    assert (engine.stats.reused_tokens, told) == (30, [(30, 33), (33, 33)])
    engine._prompt_cache.drop()
    assert collect(engine.generate(tokens, max_new_tokens=9, temperature=0.0))[1] == answer


def test_reusing_the_cache_does_not_change_the_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, _ = conversation(engine, 3)
    monkeypatch.setattr(engine._prompt_cache, "take", lambda tokens: (None, 0))
    assert conversation(engine, 3)[0] == kept


def test_same_prompt_is_computed_afresh(engine: Engine) -> None:
    for _ in range(2):
        collect(engine.generate(MESSAGES, max_new_tokens=5, temperature=0.0))
        assert engine.stats.reused_tokens == 0


def test_answers_under_way_side_by_side_do_not_disturb_each_other(engine: Engine) -> None:
    expected = [
        collect(engine.generate(p, max_new_tokens=9, temperature=0.0)) for p in ("Hello", "Hello there")
    ]
    first = engine.generate("Hello", max_new_tokens=9, temperature=0.0)
    second = engine.generate("Hello there", max_new_tokens=9, temperature=0.0)
    pairs = list(zip(first, second, strict=True))
    assert [collect(side) for side in zip(*pairs, strict=True)] == expected


@pytest.mark.parametrize("family", ["gpt_oss", "lfm2_moe", "minimax"])
def test_caches_that_cannot_be_cut_are_not_reused(family: str, home: Path, tmp_path: Path) -> None:
    """Sliding windows, convolutions and linear attention keep a state, not a list of keys."""
    write_tiny_chat_model(tmp_path / "model", family)
    loaded = moechat.load(tmp_path / "model")
    _, reused = conversation(loaded, 2)
    assert reused == [0, 0]


def test_answer_that_was_edited_reuses_what_is_still_the_same(engine: Engine) -> None:
    prompt = engine.encode("Once upon a time")
    _, answer, _ = collect(engine.generate(prompt, max_new_tokens=12, temperature=0.0))
    edited = [*prompt, *answer[:5], *engine.encode(" something else")]
    assert edited[len(prompt) + 5] != answer[5]
    again = collect(engine.generate(edited, max_new_tokens=8, temperature=0.0))
    assert engine.stats.reused_tokens == len(prompt) + 5
    engine._prompt_cache.drop()
    assert collect(engine.generate(edited, max_new_tokens=8, temperature=0.0)) == again


def test_room_for_the_answer_can_be_reserved(engine: Engine) -> None:
    engine.generate([5] * 200, reserve=56)
    with pytest.raises(PromptTooLongError, match="of which 57 for the answer"):
        engine.generate([5] * 200, reserve=57)


def test_statistics_belong_to_the_answer_that_moved_last(engine: Engine) -> None:
    first = engine.generate([5] * 7, max_new_tokens=4, temperature=0.0)
    second = engine.generate([6] * 9, max_new_tokens=2, temperature=0.0)
    next(first)
    list(second)
    list(first)
    stats = engine.stats
    assert (stats.prompt_tokens, stats.output_tokens) == (7, 4)
    assert stats.expert_activations == (7 + 3) * 2 * 2


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_almost_no_temperature_is_greedy(engine: Engine, temperature: float) -> None:
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


def test_threads_default_does_not_depend_on_the_engine_before(chat_model: Path, home: Path) -> None:
    usual = moechat.load(chat_model).describe()["threads"]
    assert moechat.load(chat_model, threads=usual + 1).describe()["threads"] == usual + 1
    assert moechat.load(chat_model).describe()["threads"] == usual


def test_a_path_is_never_taken_for_a_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_chat_model(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert moechat.load(Path("demo")).describe()["expert_layers"] == 2


def test_values_out_of_range_in_generation_config_are_as_if_not_there(
    chat_model: Path, home: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(chat_model, source)
    shipped = {"do_sample": True, "top_k": -1, "top_p": 7, "temperature": 0.5, "eos_token_id": {"a": 1}}
    (source / "generation_config.json").write_text(json.dumps(shipped))
    loaded = moechat.load(source)
    assert loaded.sampling.temperature == 0.5
    assert (loaded.sampling.top_k, loaded.sampling.top_p) == (0, 1.0)


def test_store_of_an_older_checkpoint_is_replaced_even_when_it_is_damaged(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_tiny_chat_model(source)
    path = moechat.load(source)._store.path
    next(path.glob("experts-*")).unlink()
    with pytest.raises(StoreDamagedError):
        moechat.load(source)
    write_tiny_chat_model(source, "olmoe", num_key_value_heads=4)
    assert moechat.load(source).describe()["model_type"] == "olmoe"


@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupted_answer_keeps_what_was_computed(engine: Engine, layer: int) -> None:
    """Ctrl-C in the middle of a pass: some layers hold the new token, others not."""
    prompt = engine.encode("Once upon a time")
    steps = engine.generate(prompt, max_new_tokens=12, temperature=0.0)
    answer = [next(steps).token_id for _ in range(5)]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    module = engine._model.get_submodule(f"model.layers.{layer}.mlp")
    hook = module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    hook.remove()
    longer = [*prompt, *answer, *engine.encode(" and then")]
    again = collect(engine.generate(longer, max_new_tokens=8, temperature=0.0))
    assert engine.stats.reused_tokens == len(prompt) + 4
    engine._prompt_cache.drop()
    assert collect(engine.generate(longer, max_new_tokens=8, temperature=0.0)) == again
