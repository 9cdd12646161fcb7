"""Training data: formats, what is trained, limits, and errors that name lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import write_byte_tokenizer

from moechat.errors import UsageError
from moechat.models.assets import load_tokenizer
from moechat.tune.data import DataSet, read_data


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Without a chat template."""
    directory = tmp_path_factory.mktemp("plain")
    write_byte_tokenizer(directory, chat_template=None)
    return load_tokenizer(directory)


def read(path: Path, tokenizer: Any, *entries: object, most: int = 512) -> DataSet:
    file = path / "data.jsonl"
    file.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n")
    return read_data(file, tokenizer, most)


def texts(data: DataSet, tokenizer: Any) -> list[tuple[str, str]]:
    """The whole sequence, and what is trained of it."""
    return [
        (
            tokenizer.decode(e.ids),
            tokenizer.decode([token for token, trained in zip(e.ids, e.trained, strict=True) if trained]),
        )
        for e in data.examples
    ]


@pytest.mark.parametrize("prompt", ["prompt", "instruction", "question"])
@pytest.mark.parametrize("answer", ["answer", "response", "completion", "output"])
def test_only_the_answer_to_a_prompt_is_trained(
    tmp_path: Path, tokenizer: Any, prompt: str, answer: str
) -> None:
    data = read(tmp_path, tokenizer, {prompt: "hi?", answer: "yes"})
    assert texts(data, tokenizer) == [("<|user|>hi?<|end|><|assistant|>yes<|end|>", "yes<|end|>")]
    assert tokenizer.decode(data.examples[0].ids[: data.examples[0].prompt]).endswith("<|assistant|>")


def test_a_context_belongs_to_the_prompt(tmp_path: Path, tokenizer: Any) -> None:
    data = read(tmp_path, tokenizer, {"instruction": "sum up", "context": "long", "response": "short"})
    assert texts(data, tokenizer)[0][0].startswith("<|user|>sum up\n\nlong<|end|>")


def test_all_answers_of_a_chat_are_trained_and_nothing_else(tmp_path: Path, tokenizer: Any) -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    chat = [{"role": role, "content": f"{role}{at}"} for at, role in enumerate(roles)]
    data = read(tmp_path, tokenizer, {"messages": chat})
    ((_, trained),) = texts(data, tokenizer)
    assert trained == "assistant2<|end|>assistant4<|end|>"
    (example,) = data.examples
    assert tokenizer.decode(example.ids[: example.prompt]).endswith("user1<|end|><|assistant|>")


def test_texts_are_trained_as_a_whole_and_long_ones_become_several(tmp_path: Path, tokenizer: Any) -> None:
    data = read(tmp_path, tokenizer, {"text": "abcdefghijk"}, most=5)
    assert texts(data, tokenizer) == [("abcde", "bcde"), ("fghij", "ghij"), ("k<|end|>", "<|end|>")]
    assert [example.prompt for example in data.examples] == [0, 0, 0]
    assert {example.line for example in data.examples} == {1}


def test_without_a_template_prompt_and_answer_follow_each_other(tmp_path: Path, plain_tokenizer: Any) -> None:
    data = read(tmp_path, plain_tokenizer, {"prompt": "2+2=", "answer": "4"})
    assert texts(data, plain_tokenizer) == [("2+2=4<|end|>", "4<|end|>")]


def test_long_answers_are_cut_and_long_prompts_left_out(tmp_path: Path, tokenizer: Any) -> None:
    long = {"prompt": "p" * 50, "answer": "a"}
    data = read(tmp_path, tokenizer, {"prompt": "p", "answer": "a" * 50}, long, most=10)
    assert (len(data.examples), data.cut, data.dropped) == (1, 2, 1)
    assert len(data.examples[0].ids) == 10
    with pytest.raises(UsageError, match="no sequence whose answer begins within 10 tokens"):
        read(tmp_path, tokenizer, long, most=10)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not an object"),
        (b'{"id": 1}', "it has none of messages, prompt, instruction, question, text"),
        (b'{"prompt": "x"}', "it has prompt but none of answer"),
        (b'{"prompt": 3, "answer": "x"}', "prompt is no text"),
        (b'{"prompt": "x", "answer": "  "}', "answer is blank"),
        (b'{"text": "\\ud800"}', "text is not Unicode text"),
        (b'{"text": "\xff"}', "not UTF-8 (byte 0xff)"),
        (b'{"messages": []}', "messages is not a list"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "nothing to train"),
        (b'{"messages": [{"role": "pope", "content": "x"}]}', "message 1 has no role"),
        (b'{"messages": [{"role": "assistant"}]}', "message 1 has no content"),
    ],
)
def test_a_bad_line_is_named_with_its_fault(tmp_path: Path, tokenizer: Any, line: bytes, said: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(UsageError) as caught:
        read_data(file, tokenizer, 64)
    assert f"{file}, line 3: " in str(caught.value)
    assert said in str(caught.value)
    assert '{"prompt": "…", "answer": "…"}' in str(caught.value.hint)


def test_many_bad_lines_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"7 of 8 lines of .* are bad: line 2: .*; and 2 more"):
        read(tmp_path, tokenizer, {"text": "good"}, *[[]] * 7)


def test_messages_without_a_template_are_refused(tmp_path: Path, plain_tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="line 1: the model has no chat template"):
        read(tmp_path, plain_tokenizer, {"messages": [{"role": "assistant", "content": "x"}]})


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_data(tmp_path / "none", tokenizer, 64)
    with pytest.raises(UsageError, match="has no lines"):
        read(tmp_path, tokenizer, *[])


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.recursive(
                st.none() | st.text(max_size=6) | st.integers(),
                lambda inner: (
                    st.dictionaries(
                        st.sampled_from(["messages", "prompt", "answer", "text", "role", "content", "x"]),
                        inner,
                    )
                    | st.lists(inner, max_size=3)
                ),
                max_leaves=8,
            ).map(lambda value: json.dumps(value).encode()),
        ),
        max_size=4,
    )
)
def test_any_file_is_read_or_refused(tmp_path: Path, tokenizer: Any, lines: list[bytes]) -> None:
    file = tmp_path / "any.jsonl"
    file.write_bytes(b"\n".join(lines))
    try:
        data = read_data(file, tokenizer, 16)
    except UsageError:
        return
    for example in data.examples:
        assert 2 <= len(example.ids) == len(example.trained) <= 16
        assert any(example.trained)
        assert not example.trained[0]
