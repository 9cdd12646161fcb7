"""The manual's table of what quantising a quantised checkpoint again loses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from requantising import losses

import moechat

MANUAL = Path(moechat.__file__).parent / "manual" / "models.md"


def test_the_table_in_the_manual_is_what_is_measured() -> None:
    """`python tests/support/requantising.py` prints it."""
    text = MANUAL.read_text("utf-8").partition("| its own loss |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", text, re.MULTILINE)
    stated = {title: [float(cell.strip(" %")) for cell in cells.split("|")] for title, cells in rows}
    measured = dict(losses())
    assert list(stated) == list(measured)
    for title, values in measured.items():
        assert stated[title] == pytest.approx(values, rel=0.08), title
