"""``moechat help --man``: complete, and without complaints of the programs that show it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from cli_support import Cli
from hypothesis import given
from hypothesis import strategies as st

from moechat.cli.app import grammar
from moechat.cli.commands.man_page import _text, man_page

GROFF = shutil.which("groff")
needs_groff = pytest.mark.skipif(GROFF is None, reason="groff is not installed")


def shown(source: str) -> tuple[str, str]:
    """The page as plain text, and what groff complains about."""
    assert GROFF is not None
    command = [GROFF, "-man", "-ww", "-Tutf8", "-P-cbou", "-rLL=200n"]
    done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=60, check=True)
    return done.stdout.decode(), done.stderr.decode()


@needs_groff
def test_the_page_has_every_command_and_option_and_no_faults() -> None:
    group = grammar()
    text, complaints = shown(man_page(group))
    assert complaints == ""
    words = set(re.findall(r"[\w-]+", text))
    for name, command in group.built().items():
        if command.hidden:
            continue
        assert f"moechat {name}" in text
        assert {option for parameter in command.params for option in parameter.opts if "-" in option} <= words
        for inner in getattr(command, "commands", {}):
            assert f"moechat {name} {inner}" in text
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "ENVIRONMENT", "FILES", "EXAMPLES"):
        assert re.search(rf"^{heading}$", text, re.MULTILINE)
    assert "git diff | moechat run" in text
    assert "~/.config/moechat/config.toml" in text
    assert re.search(r"^ +143 +terminated \(SIGTERM\)", text, re.MULTILINE)


def test_the_command_prints_it(cli: Cli) -> None:
    done = cli.call("help", "--man")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(b".TH MOECHAT 1 ")
    assert cli.call("help", "chat", "--man").status == 2


@needs_groff
@given(
    st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1), min_size=1, max_size=5)
)
def test_no_text_is_taken_for_a_request(texts: list[str]) -> None:
    lines = [" ".join(text.replace("\\[", "[").split()) for text in texts]
    lines = [line for line in lines if line]
    source = "".join(f".PP\n{_text(line)}\n" for line in lines)
    found, complaints = shown(f'.TH X 1 "" "" ""\n.nh\n.ad l\n.SH Y\n{source}')
    assert complaints == ""
    # Straight quotes and accents become typographic ones in running text.
    plain = re.sub(r"[‘’´`']", "'", found)
    body = " ".join(plain.split())
    for line in lines:
        if len(line) < 150:
            assert " ".join(re.sub(r"[`']", "'", line).split()) in body
