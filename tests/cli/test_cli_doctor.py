"""``moechat doctor``: one report, whatever is broken, and nothing in it that a stranger need not know."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import Cli
from hypothesis import given
from hypothesis import strategies as st

from moechat.cli.doctor.check_machine import MACHINE
from moechat.cli.doctor.findings import Report
from moechat.cli.doctor.redaction import Redaction

TOKEN = "hf_AbCdEfGhIjKlMn"


@pytest.fixture
def cli(cli: Cli, tmp_path: Path) -> Cli:
    """With a home of its own."""
    return replace(cli, home=tmp_path / "home")


def report_of(cli: Cli, **environment: str) -> dict:
    result = replace(cli, extra={**cli.extra, **environment}).run("doctor", "--json")
    assert result.status == 0
    assert TOKEN not in result.out.decode()
    return json.loads(result.out)


def test_the_report_has_every_section_and_hides_home_and_token(cli: Cli, tmp_path: Path) -> None:
    result = replace(cli, extra={"HF_TOKEN": TOKEN, "HOME": str(tmp_path)}).run("doctor")
    text = result.out.decode()
    assert result.status == 0
    for title in (
        "moechat",
        "processor",
        "memory",
        "GPU",
        "files",
        "library",
        "hub",
        "environment",
    ):
        assert f"\n{title}\n" in f"\n{text}"
    assert TOKEN not in text
    assert "(hidden)" in text
    assert str(tmp_path) not in text
    assert "\x1b" not in text, "plain under a pipe"


def test_a_broken_part_is_a_finding_and_the_report_continues(cli: Cli, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    found = report_of(
        cli, MOECHAT_HOME=str(in_the_way), MOECHAT_ISA="nothing", HF_HUB_OFFLINE="1", HF_TOKEN=TOKEN
    )
    facts = {finding["fact"]: finding for finding in found["findings"]}
    assert any(fact.startswith("files: ") and "not a directory" in fact for fact in facts)
    assert any(fact.startswith("processor: ") and "MOECHAT_ISA" in fact for fact in facts)
    assert any("HF_HUB_OFFLINE" in fact for fact in facts)
    assert all(finding["hint"] for finding in found["findings"])
    assert found["sections"]["moechat"]["python"]
    assert found["sections"]["memory"]["in all"]


def test_damaged_stores_and_leftovers_are_found(cli: Cli) -> None:
    models = Path(cli.environment["MOECHAT_HOME"]) / "data" / "models"
    (models / "org--name-4bit").mkdir(parents=True)
    (models / "org--name-4bit" / "manifest.json").write_text("{")
    (models / ".org--other-4bit.partial").mkdir()
    (models / ".org--other-4bit.partial" / "layer").write_bytes(bytes(3 << 20))
    found = report_of(cli)
    facts = [finding["fact"] for finding in found["findings"]]
    assert "the store org--name-4bit is damaged" in facts
    assert any("unfinished downloads and conversions take 3.0 MiB" in fact for fact in facts)


def test_a_slower_instruction_set_than_possible_is_reported(cli: Cli) -> None:
    found = report_of(cli, MOECHAT_ISA="portable")
    if found["sections"]["processor"]["kernels"] == "can run portable":
        pytest.skip("there is no other one")
    assert any("MOECHAT_ISA chooses portable" in finding["fact"] for finding in found["findings"])


def test_an_old_gpu_in_a_narrow_slot_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.hardware import gpu

    device = gpu.GpuDevice(
        0, "NVIDIA GeForce GTX 1080", "x", 8 << 30, 7 << 30, capability=(6, 1), lanes=8, lanes_most=16
    )
    monkeypatch.setattr(gpu, "find_gpus", lambda: gpu.GpuReport((device,), "550.1"))
    report = Report()
    rows: dict[str, str] = {}
    MACHINE["GPU"](report, rows)
    said = " ".join(finding.fact for finding in report.findings)
    assert "compute capability 6.1" in said
    assert "8 of 16 PCIe lanes" in said
    assert "7.0 GiB of 8.0 GiB free" in rows["GPU 0"]


def test_wsl2_is_named_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.hardware import gpu, wsl

    device = gpu.GpuDevice(0, "NVIDIA GeForce RTX 4060", "x", 8 << 30, 7 << 30, capability=(8, 9))
    monkeypatch.setattr(gpu, "find_gpus", lambda: gpu.GpuReport((device,), "550.1"))
    for here in (False, True):
        monkeypatch.setattr(wsl, "in_wsl2", lambda here=here: here)
        report = Report()
        MACHINE["GPU"](report, {})
        assert any(".wslconfig" in finding.hint for finding in report.findings) is here


def test_our_own_numbers_are_not_redacted_and_an_error_appears_once(cli: Cli, tmp_path: Path) -> None:
    found = report_of(cli, MOECHAT_MAX_TOKENS="77")
    assert found["sections"]["environment"]["MOECHAT_MAX_TOKENS"] == "77"
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    found = report_of(cli, MOECHAT_HOME=str(in_the_way))
    assert sum("not a directory" in finding["fact"] for finding in found["findings"]) == 1


def test_a_secret_that_json_escapes_is_hidden_too(cli: Cli) -> None:
    secret = 'quote" and back\\slash'
    result = replace(cli, extra={"OMP_KEY": secret, "HF_NAME": f"with {secret}"}).run("doctor", "--json")
    environment = json.loads(result.out)["sections"]["environment"]
    assert (environment["OMP_KEY"], environment["HF_NAME"]) == ("(hidden)", "with (hidden)")


@given(st.text(alphabet="abcdefgh0123", min_size=8, max_size=20), st.text(max_size=30), st.text(max_size=30))
def test_secrets_of_the_environment_are_redacted_in_any_text(secret: str, before: str, after: str) -> None:
    redact = Redaction({"SOME_TOKEN": secret})
    assert secret not in redact(f"{before}{secret}{after}")


def test_names_in_addresses_and_the_home_directory_are_hidden() -> None:
    redact = Redaction({})
    home = os.path.expanduser("~")
    assert redact("http://me:word@proxy.example:8080/x") == "http://(hidden)@proxy.example:8080/x"
    assert redact(f"{home}/models, {home}") == "~/models, ~"
    assert redact(f"{home}other/models") == f"{home}other/models"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("http://user:p@ss/w0rd@proxy:8080", "w0rd"),
        ("proxy is user:secretpw@proxy:8080", "secretpw"),
        ("https://h/x?a=1&token=hf_abc&b=2", "hf_abc"),
        ("https://h/x?X-Amz-Signature=0123456789", "0123456789"),
        (f"it said {TOKEN}.", TOKEN),
        ("ghp_0123456789abcdef", "0123456789abcdef"),
        ("sk-proj-0123456789abcdef", "0123456789abcdef"),
    ],
)
def test_text_that_looks_like_a_secret_is_hidden_everywhere(text: str, secret: str) -> None:
    shown = Redaction({})(text)
    assert secret not in shown
    assert "(hidden)" in shown


@pytest.mark.parametrize(
    "text",
    ["a", "a+", "%a:", "://", "/a:", "+://", "?token", "a@", "a:b@", "sk-", "http://"],
)
@pytest.mark.parametrize("end", ["", "@", "@x", "="])
def test_redacting_a_text_without_spaces_takes_linear_time(text: str, end: str) -> None:
    redact = Redaction({})
    start = time.process_time()
    redact("?" + text * (200_000 // len(text)) + end)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a/b%me:word@host", "a/b%(hidden)@host"),
        ("x=me:w@rd@[::1]:80,", "x=(hidden)@[::1]:80,"),
        ("+me:word@host http://me@host", "(hidden)@host http://(hidden)@host"),
        ("https://me:word@host/a@b c", "https://(hidden)@b c"),
        ("?a=1?my-token=abc", "?a=1?my-token=(hidden)"),
    ],
)
def test_credentials_in_addresses_are_hidden_everywhere(text: str, shown: str) -> None:
    assert Redaction({})(text) == shown


def test_names_of_models_and_paths_are_not_redacted() -> None:
    redact = Redaction({})
    for text in (
        "tiny/moe-chat@0123456789ab: 4 bits",
        "org/name@v1:Q4_K_M",
        "/mnt/models/org--name@v1-4bit",
        "https://huggingface.co",
    ):
        assert redact(text) == text


def test_the_home_directory_is_hidden_beside_punctuation_but_not_inside_words() -> None:
    redact = Redaction({})
    home = os.path.expanduser("~")
    assert redact(f"'{home}' ({home}) [{home}/x] {home}. file://{home}/x") == "'~' (~) [~/x] ~. file://~/x"
    for text in (f"/mnt{home}/x", f"x{home}", f"{home}.bak/x", f"{home}-other", f"{home}2"):
        assert redact(text) == text


def test_values_that_may_be_secrets_are_not_shown(cli: Cli) -> None:
    config = cli.home / "config" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'HF_TOKEN = "{TOKEN}"\n[run]\nsystem-prompt = "you are my hidden friend"\n')
    found = report_of(
        cli,
        MOECHAT_API_KEY="supersecretvalue",
        MOECHAT_ANYTHING="something of mine",
        MOECHAT_SYSTEM_PROMPT=f"say {TOKEN} and nothing of my life",
        HTTPS_PROXY="http://user:p@ss/w0rd@proxy:8080",
        HTTP_PROXY="user:secretpw@proxy:8080",
        HF_HOME="/x/secretpw@",
    )
    text = json.dumps(found)
    for secret in ("supersecret", "of mine", "my life", "w0rd", "secretpw", "hidden friend"):
        assert secret not in text
    assert found["sections"]["environment"]["HTTPS_PROXY"] == "http://(hidden)@proxy:8080"
    assert found["sections"]["environment"]["HTTP_PROXY"] == "(hidden)@proxy:8080"
    assert found["sections"]["settings"]["run: system-prompt"] == "(hidden)"


def test_invalid_settings_are_findings(cli: Cli) -> None:
    config = cli.home / "config" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('ctx = "many"\n[run]\ntemperature = 200\n')
    found = report_of(
        cli, MOECHAT_SEED="x", MOECHAT_MAX_TOKENZ="5", MOECHAT_LEFTOVERS="1", MOECHAT_THREADS="2"
    )
    facts = {finding["fact"]: finding["hint"] for finding in found["findings"]}
    assert sum(f"{config} says ctx = 'many'" in fact for fact in facts) == 1
    assert sum("MOECHAT_SEED is 'x'" in fact for fact in facts) == 1
    assert any("--temperature is 200" in fact for fact in facts)
    assert facts["MOECHAT_MAX_TOKENZ is set, but no option of moechat has this name"] == (
        "do you mean MOECHAT_MAX_TOKENS?"
    )
    assert "MOECHAT_LEFTOVERS is set, but no option of moechat has this name" in facts
    assert not any("MOECHAT_THREADS" in fact or "MOECHAT_HOME" in fact for fact in facts)


def test_a_directory_in_place_of_a_file_is_a_finding(cli: Cli) -> None:
    config, sessions = cli.home / "config" / "config.toml", cli.home / "state" / "sessions.db"
    config.mkdir(parents=True)
    sessions.mkdir(parents=True)
    hints = {finding["fact"]: finding["hint"] for finding in report_of(cli)["findings"]}
    assert hints[f"settings: the settings file {config} is a directory"].startswith("move it away")
    assert hints[f"{sessions} is a directory"].startswith("move it away")


def test_names_in_the_settings_file_cannot_forge_a_report_line(cli: Cli) -> None:
    config = cli.home / "config" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('"a\\u001b]0;pwn\\u0007\\nproblem: x" = "b\\nproblem: y"\n')
    shown = replace(cli).run("doctor").out.decode()
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "problem: x" in shown
    for forged in ("problem: x", "problem: y"):
        assert not any(line.lstrip().startswith(forged) for line in shown.splitlines())


def test_unreadable_conversations_are_findings_and_nothing_is_written(cli: Cli) -> None:
    from moechat.history.session_database import Sessions

    path = cli.home / "state" / "sessions.db"
    with Sessions(path):
        pass
    kept = path.read_bytes()
    found = report_of(cli)
    assert found["sections"]["conversations"]["conversations"].startswith("0, ")
    assert [item.name for item in path.parent.iterdir()] == [path.name]

    def facts() -> list[str]:
        facts = [finding["fact"] for finding in report_of(cli)["findings"]]
        return [fact for fact in facts if "sessions.db" in fact]

    for damaged in (os.urandom(8192), kept[:4096] + os.urandom(len(kept) - 4096)):
        path.write_bytes(damaged)
        assert any("cannot be read" in fact for fact in facts())
        assert path.read_bytes() == damaged
    newer = bytearray(kept)
    newer[60:64] = (99).to_bytes(4, "big")  # where SQLite keeps user_version
    path.write_bytes(newer)
    assert any("was written by a newer moechat" in fact for fact in facts())
    path.write_bytes(kept)
    with Sessions(path):  # in use: with its log beside it
        assert facts() == []
