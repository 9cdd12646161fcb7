"""The manual as a whole: its index, links, and the options, variables and systems that it names."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from manual_examples import DOCUMENTS, MANUAL
from places import ROOT

from moechat import errors
from moechat.cli.app import grammar
from moechat.cli.config.settings_file import OWN_VARIABLES, options_of, variable_of
from moechat.configurator.systems import SYSTEMS
from moechat.errors import UsageError
from moechat.manual import page, search, topics
from moechat.models.gguf_architectures import ARCHITECTURES

_CODE = re.compile(r"^```.*?^```$|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")


def spans(document: Path) -> list[str]:
    """Code within the text of a page."""
    return [match[1] for match in _CODE.finditer(document.read_text(encoding="utf-8")) if match[1]]


def test_the_index_lists_every_page_once() -> None:
    names = [topic.name for topic in topics()]
    assert sorted(names) == sorted(path.stem for path in MANUAL.glob("*.md") if path.stem != "index")
    assert all(topic.summary and topic.section for topic in topics())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_to_files(document: Path) -> None:
    for target in _LINK.findall(document.read_text(encoding="utf-8")):
        assert (document.parent / target).is_file(), target


def test_a_page_begins_with_its_title_and_a_summary() -> None:
    for topic in topics():
        lines = page(topic.name).splitlines()
        assert lines[0].startswith("# "), topic.name
        assert lines[2], topic.name
        assert not lines[1], topic.name


def test_links_between_pages_are_shown_as_commands() -> None:
    assert "](" not in page("chat").replace("](../", "")
    assert "moechat help models" in page("chat")


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_options_that_are_named_exist(document: Path) -> None:
    # The last four: any option, pip's, a native test's, and that of scripts/setup.
    known = {"--version", "--install-completion", "--show-completion"}
    known |= {"--some-name", "--all", "--bench", "--dev"}
    for command in grammar().built().values():
        for one in (command, *getattr(command, "commands", {}).values()):
            known |= {
                option for parameter in one.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
    files = [*(ROOT / "scripts").rglob("*"), ROOT / "tests" / "support" / "selection.py"]
    scripts = "".join(
        path.read_text(encoding="utf-8") for path in files if path.is_file() and path.suffix in ("", ".py")
    )
    for span in spans(document):
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span):
            assert option in known or f'"{option}"' in scripts, option


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_variables_that_are_named_exist(document: Path) -> None:
    known = OWN_VARIABLES | {
        variable_of(option) for command in grammar().built().values() for option in options_of(command)
    }
    setup = (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
    for variable in re.findall(r"\bMOECHAT_[A-Z_]+\b", document.read_text(encoding="utf-8")):
        assert variable in known or variable in setup or variable == "MOECHAT_SOME_NAME", variable


def test_files_that_are_named_exist() -> None:
    # A path from the clone, or one within the package or the native sources that names a file.
    named = re.compile(r"(?:moechat|native|scripts|tests|profiles|\.ci)/[\w./-]*\w|[\w/]+/\w+\.(?:py|cc|h)")
    bases = [ROOT, ROOT / "moechat", ROOT / "native" / "src", ROOT / "native" / "src" / "kernels"]
    for document in DOCUMENTS:
        for span in spans(document):
            match = named.fullmatch(span.rstrip("/"))
            if match and not re.search("NNN|NAME", span):
                assert any((base / match[0]).exists() for base in bases), f"{document.stem} names {span}"


def test_every_system_is_described() -> None:
    text = page("memory-and-plans")
    rows = re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)
    assert set(SYSTEMS) <= set(rows)


def test_every_exit_status_is_described() -> None:
    rows = {int(status) for status in re.findall(r"^\| (\d+) \|", page("exit-codes"), re.MULTILINE)}
    statuses = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert rows == statuses | {0, 129, 130, 143}


def test_the_help_and_the_errors_module_list_every_exit_status() -> None:
    rows = re.findall(r"^\| (\d+) \|", page("exit-codes"), re.MULTILINE)
    for text in (grammar().epilog or "", errors.__doc__ or ""):
        assert sorted(re.findall(r"\b(\d+) [A-Za-z]", text), key=int) == rows


def test_an_unknown_topic_names_similar_ones() -> None:
    with pytest.raises(UsageError, match="no topic 'chta'") as raised:
        page("chta")
    assert raised.value.hint == "similar topics: chat"
    with pytest.raises(UsageError) as raised:
        page("plans")
    assert "memory-and-plans" in (raised.value.hint or "")
    with pytest.raises(UsageError) as raised:
        page("../../pyproject")
    assert raised.value.hint == "moechat help lists the topics"


def test_a_search_ignores_case_and_finds_headings() -> None:
    found = [(match.topic, match.heading) for match in search("CUDA GRAPHS", ["gpu"])]
    assert ("gpu", "CUDA graphs") in found
    assert list(search("no such text anywhere", ["gpu"])) == []


def test_the_wheel_has_the_pages_and_the_types_marker(tmp_path: Path) -> None:
    # Without CMake: what is tested is the selection of files, and compiling takes minutes.
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run(
        [*build, "-w", str(tmp_path), "-Cwheel.cmake=false", f"-Cbuild-dir={tmp_path / 'build'}", str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"moechat/py.typed", "moechat/manual/index.md"} <= names
    assert {f"moechat/manual/{topic.name}.md" for topic in topics()} <= names


def test_the_page_of_models_lists_the_architectures_of_gguf_files_that_are_read() -> None:
    text = (MANUAL / "models.md").read_text("utf-8")
    listed = text.partition("of llama.cpp are read:")[2].partition("Any other is refused")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == set(ARCHITECTURES)
