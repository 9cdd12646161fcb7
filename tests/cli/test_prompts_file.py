"""Files of prompts: what is understood, and what is refused with its line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moechat.cli.commands.prompts_file import FilePrompt, read_prompts
from moechat.errors import UsageError


def write(directory: Path, text: str | bytes, name: str = "prompts") -> str:
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    file = read_prompts(write(tmp_path, "\ufeffFirst one. \r\n\n   \nSecond:\u2028still the second"))
    assert file.prompts == [
        FilePrompt(1, [], ["First one."]),
        FilePrompt(4, [], ["Second:\u2028still the second"]),
    ]
    assert file.understood == "text, one prompt a line"
    assert all(prompt.is_plain for prompt in file.prompts)


@pytest.mark.parametrize(
    ("entry", "turns"),
    [
        ({"prompt": "a"}, ["a"]),
        ({"question": "b", "answer": "42"}, ["b"]),
        ({"text": "c\nd"}, ["c\nd"]),
        ({"turns": ["a", "b"], "question_id": 81}, ["a", "b"]),
        ({"text": "what it is about", "question": "b"}, ["b"]),
        ({"prompt": None, "text": "c"}, ["c"]),
    ],
)
def test_json_lines_have_known_keys(tmp_path: Path, entry: dict[str, object], turns: list[str]) -> None:
    file = read_prompts(write(tmp_path, json.dumps(entry) + "\n"))
    assert file.prompts == [FilePrompt(1, [], turns)]
    assert file.prompts[0].is_plain == (len(turns) == 1)


@pytest.mark.parametrize("key", ["messages", "prompt"])
def test_conversations_end_with_the_user(tmp_path: Path, key: str) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Why?", "name": "me"},
        {"role": "assistant", "content": "Because."},
    ]
    (prompt,) = read_prompts(write(tmp_path, json.dumps({key: said}))).prompts
    assert prompt.turns == ["Why?"]
    assert prompt.opening == said[:3]
    assert not prompt.is_plain


def test_the_keys_found_are_reported(tmp_path: Path) -> None:
    text = '{"text": "a"}\n{"turns": ["b"]}\n{"text": "c"}\n'
    assert read_prompts(write(tmp_path, text)).understood == "JSON lines (turns, text)"


def test_the_file_name_decides_the_format_before_the_content(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, '{"x": 1}', "a.txt")).prompts[0].turns == ['{"x": 1}']
    with pytest.raises(UsageError, match="line 1: not JSON"):
        read_prompts(write(tmp_path, "Hello", "a.jsonl"))


def test_a_dash_reads_prompts_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert [prompt.turns for prompt in read_prompts("-").prompts] == [["one"], ["two"]]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    with pytest.raises(UsageError, match="stdin, line 1: it has none of messages, turns"):
        read_prompts("-")


@pytest.mark.parametrize("quiet", [False, True])
def test_reading_from_a_terminal_prints_a_hint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], quiet: bool
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"one\n"))
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)
    read_prompts("-", quiet=quiet)
    assert ("reading prompts from the terminal; Ctrl-D" in capfd.readouterr().err) == (not quiet)


def test_a_blank_prompt_is_refused_only_when_it_is_used(tmp_path: Path) -> None:
    file = read_prompts(
        write(tmp_path, '{"prompt": "   "}\n{"turns": ["a", "\\n"]}\n{"prompt": "b", "x": NaN}')
    )
    with pytest.raises(UsageError, match=r"^the prompt is blank$"):
        file.prompts[0].require_text(0)
    file.prompts[1].require_text(0)
    with pytest.raises(UsageError, match=r"^turn 2 of 2 is blank$"):
        file.prompts[1].require_text(1)
    assert file.prompts[2].turns == ["b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": ', "not JSON (Expecting value, column 12)"),
        (b"[" * 100_000, "not JSON"),
        (b'["a"]', "not an object"),
        (b'{"q": "a"}', "it has none of messages, turns, prompt, question, text"),
        (b'{"prompt": 5}', "prompt is not a text"),
        (b'{"prompt": []}', "prompt is not a text"),
        (b'{"turns": "a"}', "turns is not a list of texts"),
        (b'{"turns": []}', "turns is empty"),
        (b'{"turns": ["a", 1]}', "turns is not a list of texts"),
        (b'{"text": "\\ud800"}', "text is not Unicode text"),
        (b'{"messages": []}', "messages has no message with the role user"),
        (b'{"messages": ["a"]}', "messages is not a list of messages"),
        (b'{"messages": [{"role": "user"}]}', "messages is not a list of messages"),
        (b'{"messages": [{"role": "king", "content": "a"}]}', "messages is not a list of messages"),
        (b'{"prompt": "hi", "id": 1e999}', "id contains a number that JSON cannot represent"),
        (b'{"prompt": "hi", "id": {"a": [NaN]}}', "id contains a number that JSON cannot represent"),
        (b'{"text": "\xff"}', "not UTF-8 (byte 0xff)"),
    ],
)
def test_the_error_names_the_bad_line(tmp_path: Path, line: bytes, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_prompts(write(tmp_path, b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n'))
    assert "line 3: " in str(caught.value)
    assert reason in str(caught.value)
    assert caught.value.hint


def test_bad_lines_are_all_named_or_returned_beside_the_good_ones(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"text": "a"}\nnothing\n{"id": 9, "text": 5}\n\xff\n{"text": "b"}\n', "a.jsonl")
    with pytest.raises(
        UsageError, match=r"3 of 5 lines of .* are no prompts: line 2: .*; line 3: .*; line 4: "
    ):
        read_prompts(path)
    file = read_prompts(path, keep_bad=True)
    assert [prompt.line for prompt in file.prompts] == [1, 5]
    assert [(bad.line, bad.key) for bad in file.bad] == [(2, None), (3, 9), (4, None)]
    with pytest.raises(UsageError, match=r"2 of 2 lines .* are no prompts"):
        read_prompts(write(tmp_path, "{}\n{}", "b.jsonl"), keep_bad=True)
    many = "".join("{}\n" for _ in range(9)) + '{"text": "a"}'
    with pytest.raises(UsageError, match=r"9 of 10 lines .*line 5: [^;]*; and 4 more$"):
        read_prompts(write(tmp_path, many, "c.jsonl"))


def test_keys_without_a_meaning_are_counted(tmp_path: Path) -> None:
    text = '{"text": "a", "n": 2}\n{"text": "b", "n": 3, "id": 1, "seed": 4, "temp": 1}\n'
    assert read_prompts(write(tmp_path, text)).ignored == {"n": 2, "temp": 1}


def test_the_hint_belongs_to_the_fault(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_prompts(write(tmp_path, '{"text": "a", "seed": true}'))
    assert "one JSON object" not in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "\n \n\r\n", "\u2003\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="has no prompts"):
        read_prompts(write(tmp_path, text))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        read_prompts(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_prompts(str(tmp_path))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(
        st.binary(max_size=80), st.text(max_size=40).map(lambda text: json.dumps({"text": text}).encode())
    )
)
def test_any_bytes_are_prompts_or_a_usage_error(tmp_path: Path, data: bytes) -> None:
    try:
        file = read_prompts(write(tmp_path, data))
    except UsageError:
        return
    assert file.prompts
    assert all(prompt.turns for prompt in file.prompts)
    json.dumps([prompt.key for prompt in file.prompts], allow_nan=False)
