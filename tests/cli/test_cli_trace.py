"""``moechat trace`` through the real program: what it records, and what it keeps when it is stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from cli_support import PATIENCE_S, Cli

from moechat.routing import Trace

ARGUMENTS = ("--temperature", "0", "--max-tokens", "6")


@pytest.fixture
def at(cli: Cli, tmp_path: Path) -> Cli:
    """The program in a directory of its own."""
    return Cli(directory=tmp_path, home=cli.home)


def write(at: Cli, text: str, name: str = "prompts.txt") -> str:
    (at.directory / name).write_text(text, encoding="utf-8")
    return name


def test_text_prompts_are_recorded_in_full(at: Cli) -> None:
    name = write(at, "Tell me a story about a fox.\n\nWho are you?\n")
    result = at.run("trace", "demo", "--prompts", name, *ARGUMENTS, forked=True)
    assert result.status == 0, result.err
    assert "prompts.txt: 2 prompts, text, one prompt a line" in result.err
    text = result.out.decode()
    trace = Trace.read(at.directory / "demo.trace.npz")
    assert (trace.layers, trace.num_experts, trace.top_k, trace.sequences) == (8, 16, 2, 2)
    assert f"demo.trace.npz: {trace.tokens:,} tokens" in text
    assert "8 layers of 16 experts, 2 a token" in text
    assert f"locality {trace.locality():.3f}" in text
    assert f"entropy {trace.entropy():.2f} of 4.00 bits" in text
    # Its tokens are those of the prompt and of the greedy answer, but for the last one.
    import moechat

    with moechat.load("demo") as engine:
        for number, prompt in enumerate(["Tell me a story about a fox.", "Who are you?"]):
            asked = engine.encode([{"role": "user", "content": prompt}])
            answer = [step.token_id for step in engine.generate(asked, max_new_tokens=6, temperature=0)]
            rows = slice(*trace.offsets[number : number + 2])
            assert trace.token_ids is not None
            assert trace.token_ids[rows].tolist() == [*asked, *answer[:-1]]
            assert trace.prompt_lengths is not None
            assert trace.prompt_lengths[number] == len(asked)
    assert trace.weights is not None
    np.testing.assert_allclose(trace.weights.astype(float).sum(axis=-1), 1, atol=2e-3)
    assert (trace.weights[..., 0] >= trace.weights[..., 1]).all()


def test_json_has_the_whole_result(at: Cli) -> None:
    name = write(
        at,
        '{"question": "Who are you?"}\n{"turns": ["Hi.", "Tell me more."]}\n{"question": "Why?"}\n',
        "prompts.jsonl",
    )
    result = at.call(
        "trace", "demo", "--prompts", name, "--json", "--limit", "2", "--out", "out.npz", *ARGUMENTS
    )
    assert result.status == 0, result.err
    assert "3 prompts, JSON lines (turns, question), the first 2 of them" in result.err
    report = json.loads(result.out)
    trace = Trace.read(at.directory / "out.npz")
    assert report["tokens"] == trace.tokens
    assert report["prompts"] == trace.sequences == report["prompts_asked"] == 2
    assert trace.prompt_lengths is not None
    assert report["prompt_tokens"] == trace.prompt_lengths.sum()
    assert (report["layers"], report["experts"], report["top_k"]) == (8, 16, 2)
    assert report["locality"] == pytest.approx(trace.locality())
    assert report["locality_by_chance"] == 0.125
    assert report["entropy_bits"] == pytest.approx(trace.entropy())
    assert report["most_entropy_bits"] == 4
    assert (report["out"], report["model"], report["mode"], report["interrupted"]) == (
        "out.npz",
        "demo",
        "chat",
        False,
    )


def test_the_turns_of_a_conversation_form_one_sequence(at: Cli) -> None:
    # In bfloat16, rounding chooses another expert here and there.
    arguments = (*ARGUMENTS, "--dtype", "float32")
    name = write(at, '{"turns": ["Hi.", "Tell me a story."]}\n', "prompts.jsonl")
    assert at.call("trace", "demo", "--prompts", name, "--out", "out.npz", *arguments).status == 0
    trace = Trace.read(at.directory / "out.npz")
    import moechat

    with moechat.load("demo", dtype="float32") as engine:
        messages = [{"role": "user", "content": "Hi."}]
        steps = list(engine.generate(messages, max_new_tokens=6, temperature=0))
        first = engine.encode(messages)
        messages += [
            {"role": "assistant", "content": "".join(step.text for step in steps)},
            {"role": "user", "content": "Tell me a story."},
        ]
        second = engine.encode(messages)
        answer = [step.token_id for step in engine.generate(messages, max_new_tokens=6, temperature=0)]
    assert trace.token_ids is not None
    assert trace.token_ids.tolist() == [*second, *answer[:-1]]
    assert trace.prompt_lengths is not None
    assert trace.prompt_lengths.tolist() == [len(first)]
    # Each row belongs to its token: the same conversation in one pass is routed alike.
    (at.directory / "whole.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert at.call("trace", "demo", "--prompts", "whole.jsonl", "--out", "whole.npz", *arguments).status == 0
    whole = Trace.read(at.directory / "whole.npz")
    np.testing.assert_array_equal(whole.token_ids, trace.token_ids)
    assert (np.sort(whole.experts) == np.sort(trace.experts)).mean() > 0.99


def test_paged_experts_give_the_same_trace(at: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import moechat
    from moechat.offload.settings import OffloadOptions

    name = write(at, "Tell me a story about a dog.\nGo on.\n")
    assert at.call("trace", "demo", "--prompts", name, "--out", "mapped.npz", *ARGUMENTS).status == 0
    # All of the demo fits into the smallest budget that works, so the pages are given by their number.
    real, pages = moechat.load, OffloadOptions(pages=40)
    monkeypatch.setattr(moechat, "load", lambda model, **options: real(model, offload=pages))
    assert at.call("trace", "demo", "--prompts", name, "--out", "paged.npz", *ARGUMENTS).status == 0
    mapped, paged = (Trace.read(at.directory / out) for out in ("mapped.npz", "paged.npz"))
    np.testing.assert_array_equal(mapped.experts, paged.experts)
    np.testing.assert_array_equal(mapped.weights, paged.weights)


@pytest.mark.parametrize("pages", [(), ("--ram", "550M")])
def test_the_recorded_distributions_choose_the_recorded_experts(at: Cli, pages: tuple[str, ...]) -> None:
    name = write(at, "Tell me a story about a fox.\nWho are you?\n")
    exact = ("--dtype", "float32", "--dense-bits", "16", "--activation-bits", "32")
    result = at.run("trace", "demo", "--prompts", name, *ARGUMENTS, *exact, *pages, "--gates", "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out)["gates"] is True
    trace = Trace.read(at.directory / "demo.trace.npz", gates=True)
    assert trace.gates is not None
    # Rounded to float16, another expert may be as likely as the last chosen one.
    last = np.sort(trace.gates.gates, axis=-1)[..., -trace.top_k]
    chosen = np.take_along_axis(trace.gates.gates, trace.experts, axis=-1)
    assert (chosen >= last[..., None]).mean() > 0.999
    # Weights are the chosen experts' shares of their sum.
    assert trace.weights is not None
    shares = chosen.astype(float) / chosen.sum(axis=-1, keepdims=True, dtype=float)
    np.testing.assert_allclose(trace.weights.astype(float), shares, atol=3e-3)
    assert trace.token_ids is not None
    assert trace.gates.embedding_ids.tolist() == sorted(set(trace.token_ids.tolist()))
    assert trace.gates.embeddings.shape[1] == 192


def test_completion_records_continued_texts(at: Cli) -> None:
    name = write(at, "Once upon a time\n")
    assert (
        at.call("trace", "demo", "--prompts", name, "--completion", "--out", "out.npz", *ARGUMENTS).status
        == 0
    )
    trace = Trace.read(at.directory / "out.npz")
    import moechat

    with moechat.load("demo") as engine:
        assert trace.prompt_lengths is not None
        assert trace.prompt_lengths.tolist() == [len(engine.encode("Once upon a time"))]


def test_bench_replays_a_recorded_trace(at: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moechat.bench.speeds._COMPUTE_SECONDS", 0.01)
    monkeypatch.setattr("moechat.bench.speeds._LINK_SECONDS", 0.01)
    name = write(at, "Tell me a story about a cat and a tree.\n")
    assert at.call("trace", "demo", "--prompts", name, "--max-tokens", "30", "--out", "out.npz").status == 0
    small = (
        "--prompt-tokens",
        "8",
        "--warmup-tokens",
        "4",
        "--tokens",
        "4",
        "--runs",
        "1",
        "--fractions",
        "1/4",
    )
    result = at.call("bench", "demo", *small, "--systems", "auto", "--routing", "out.npz", "--json", "-q")
    assert result.status == 0, result.err
    assert json.loads(result.out)["cases"]


def test_an_interrupt_keeps_the_finished_sequences(at: Cli) -> None:
    name = write(at, "Tell me a long story about a dragon.\n" * 500)
    arguments = ("--prompts", name, "--max-tokens", "20", "--out", "out.npz")
    process = at.start("trace", "demo", *arguments, forked=True)
    (at.directory / "out.npz").write_bytes(b"older")
    assert process.stderr is not None
    while not process.stderr.readline().startswith(b"recorded "):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    trace = Trace.read(at.directory / "out.npz")
    assert f"interrupted: {trace.sequences} of 500 prompts were recorded".encode() in err
    assert f"{trace.tokens:,} tokens".encode() in out
    assert 1 <= trace.sequences < 500
    assert sorted(path.name for path in at.directory.iterdir()) == ["out.npz", name]


def test_an_interrupt_during_an_answer_keeps_its_beginning(at: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import moechat

    real = moechat.load

    def load(*arguments: object, **options: object) -> moechat.Engine:
        engine = real(*arguments, **options)  # type: ignore[arg-type]
        generate, calls = engine.generate, []

        def interrupted(*args: object, **named: object) -> object:
            calls.append(1)
            for number, step in enumerate(generate(*args, **named)):  # type: ignore[arg-type]
                yield step
                if len(calls) == 2 and number == 3:
                    raise KeyboardInterrupt

        monkeypatch.setattr(engine, "generate", interrupted)
        return engine

    monkeypatch.setattr(moechat, "load", load)
    name = write(at, "Tell me a story.\nTell me another one.\nAnd one more.\n")
    result = at.call("trace", "demo", "--prompts", name, "--out", "out.npz", "--json", "--max-tokens", "8")
    assert result.status == 130
    report = json.loads(result.out)
    trace = Trace.read(at.directory / "out.npz")
    assert report["interrupted"] is True
    assert (report["prompts"], report["prompts_asked"]) == (2, 3)
    assert trace.prompt_lengths is not None
    answers = np.diff(trace.offsets) - trace.prompt_lengths
    assert answers.tolist() == [7, 3]


def test_an_error_keeps_the_sequences_before_it(at: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import moechat

    real = moechat.Engine.generate
    calls: list[int] = []

    def generate(self: moechat.Engine, *arguments: object, **named: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise moechat.errors.MoechatError("the disk is gone")  # type: ignore[attr-defined]
        return real(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(moechat.Engine, "generate", generate)
    name = write(at, "Tell me a story.\nTell me another one.\n")
    result = at.call("trace", "demo", "--prompts", name, "--out", "out.npz", *ARGUMENTS)
    assert result.status == 1
    assert "recorded before the error, in out.npz: 1 prompt" in result.err
    assert "the disk is gone" in result.err
    assert Trace.read(at.directory / "out.npz").sequences == 1


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("demo",), 2, "--prompts"),
        (("demo", "--prompts", "nothing.txt"), 2, "there is no file nothing.txt"),
        (("demo", "--prompts", "good.txt", "--max-tokens", "0"), 2, "--max-tokens is 0"),
        (("demo", "--prompts", "good.txt", "--limit", "0"), 2, "--limit is 0"),
        (("demo", "--prompts", "good.txt", "--ram", "lots"), 2, "is not a size"),
        (("demo", "--prompts", "good.txt", "--ram", "1M"), 4, "memory"),
        (("demo", "--prompts", "good.txt", "--out", "no/such/file.npz"), 2, "there is no directory no/such"),
        (("demo", "--prompts", "good.txt", "--out", "."), 2, ". is a directory"),
        (("no-such-model", "--prompts", "good.txt"), 3, "there is no model"),
        (("demo", "--prompts", "bad.jsonl"), 2, "bad.jsonl, line 2: not JSON"),
        (("demo", "--prompts", "long.txt"), 2, "long.txt, line 2: the prompt has"),
        (("demo", "--prompts", "turns.jsonl", "--completion"), 2, "turns.jsonl, line 1: a conversation"),
    ],
)
def test_invalid_arguments_are_refused(at: Cli, arguments: tuple[str, ...], status: int, reason: str) -> None:
    write(at, "Hello.\n", "good.txt")
    write(at, '{"text": "a"}\n{"text": \n', "bad.jsonl")
    write(at, "Hello.\n" + "word " * 3000 + "\n", "long.txt")
    write(at, '{"turns": ["a", "b"]}\n', "turns.jsonl")
    result = at.call("trace", *arguments)
    assert result.status == status, result.err
    assert reason in result.err
    assert result.out == b""
    assert not list(at.directory.glob("*.npz"))


def test_an_existing_default_file_is_not_replaced(at: Cli) -> None:
    write(at, "Hello.\n")
    (at.directory / "demo.trace.npz").write_bytes(b"precious")
    result = at.call("trace", "demo", "--prompts", "prompts.txt")
    assert result.status == 2
    assert "demo.trace.npz already exists" in result.err
    assert (at.directory / "demo.trace.npz").read_bytes() == b"precious"


def test_prompts_are_read_from_a_pipe(at: Cli) -> None:
    result = at.call(
        "trace", "demo", "--prompts", "-", "-q", "--out", "out.npz", *ARGUMENTS, stdin=b"Hello.\n"
    )
    assert result.status == 0, result.err
    assert result.err == ""
    assert Trace.read(at.directory / "out.npz").sequences == 1
