"""Directories of the repository that tests refer to."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
SCRIPTS = ROOT / "scripts"
