"""The manual's page on which model is for which machine: it is what the script gives."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from places import ROOT, SCRIPTS

from moechat.hub.known_shapes import find_shape

PAGE = (ROOT / "moechat" / "manual" / "which-model.md").read_text("utf-8")
SECTION = re.compile(r"^## (?P<title>.+)\n\n(?P<machine>.+)\n\n(?P<table>(?:\|.*\n)+)", re.MULTILINE)
SECTIONS = {match["title"]: match["table"].splitlines()[2:] for match in SECTION.finditer(PAGE)}


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "which_model"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("models", "machines", "rows"),
    [("gpt-oss", "12+32,24+64,none+16", 3), ("glm-air", "8+64", 1), ("gpt-oss-120b", "24+32", 1)],
)
def test_rows_of_the_page_are_those_that_the_script_gives(models: str, machines: str, rows: int) -> None:
    done = script("--models", models, "--machines", machines)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == rows
    for line in lines:
        title, _, row = line.partition(": ")
        assert row in SECTIONS[title]


def test_the_page_has_every_machine_and_every_model_once_fastest_first() -> None:
    cards = [f"{card} GB card, {ram} GB of RAM" for card in (8, 12, 16, 24) for ram in (32, 64)]
    assert list(SECTIONS) == [*cards, *(f"no card, {ram} GB of RAM" for ram in (16, 32, 64))]
    names = {line.split("`")[1] for line in SECTIONS["24 GB card, 64 GB of RAM"]}
    assert len(names) == 13
    assert all(find_shape(name) for name in names)
    for table in SECTIONS.values():
        assert {line.split("`")[1] for line in table} == names
        cells = [line.split("|")[2].strip() for line in table]
        rates = [0.0 if cell.startswith("does not") else float(cell.split()[0]) for cell in cells]
        assert rates == sorted(rates, reverse=True)


def test_the_overview_names_models_that_reach_the_speed() -> None:
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:5]]
        for line in PAGE.splitlines()
        if line.startswith("| ") and " of RAM |" in line
    }
    assert list(rows) == list(SECTIONS)
    for title, (comfortable, reading, fastest) in rows.items():
        rates = {line.split("`")[1]: line.split("|")[2].strip() for line in SECTIONS[title]}
        for cell, least in ((comfortable, 10), (reading, 5), (fastest, 0)):
            if cell == "-":
                continue
            model, rate = re.fullmatch(r"`(.+)`, (.+)", cell).groups()  # type: ignore[union-attr]
            assert rates[model].split()[0] == rate
            assert float(rate) >= least
        assert fastest.split("`")[1] == SECTIONS[title][0].split("`")[1]


def test_wrong_names_are_refused() -> None:
    for arguments, words in (
        (("--models", "olmo"), "olmo is not on the page"),
        (("--write", "--models", "gpt-oss"), "--write writes the whole page"),
    ):
        done = script(*arguments)
        assert done.returncode == 2
        assert words in done.stderr
