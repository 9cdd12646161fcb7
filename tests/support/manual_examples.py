"""The examples of README and manual, and the comparison of their text with real output.

``…`` stands for any text within a line; a line of only ``…`` for any number of lines. Times, sizes and paths
are compared by form. After ``<!-- numbers vary -->`` all numbers are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from places import ROOT

MANUAL = ROOT / "moechat" / "manual"
DOCUMENTS = [ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md", *sorted(MANUAL.glob("*.md"))]
ANY = "…"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARYING = "<!-- numbers vary -->"
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_FORMS = [
    (re.compile(rf"\b{_NUMBER} (?:[KMGT]i?B|[kMG]B|bytes)\b"), "<size>"),
    (re.compile(rf"\b{_NUMBER} (?:ms|s|µs|min)\b"), "<time>"),
    (re.compile(r"(?<!\S)(?:/|~/)[^\s,]+"), "<path>"),
]
_ANY_NUMBER = re.compile(rf"{_NUMBER}|[█▉▊▋▌▍▎▏░]+")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        document: Its file.
        line: Line of its first content.
        language: Word after the fence.
        text: Content.
        varying: All numbers in it vary.
        after: The block right after it, with nothing in between, or ``None``.
    """

    document: Path
    line: int
    language: str
    text: str
    varying: bool
    after: Block | None = None

    @property
    def name(self) -> str:
        return f"{self.document.stem}:{self.line}"


def blocks(document: Path) -> list[Block]:
    source = document.read_text(encoding="utf-8")
    found: list[Block] = []
    following: tuple[int, Block] | None = None
    for match in reversed(list(_BLOCK.finditer(source))):
        end = match.end()
        after = following[1] if following and not source[end : following[0]].strip() else None
        block = Block(
            document,
            source.count("\n", 0, match.start(2)) + 1,
            match[1],
            match[2],
            source[: match.start()].rstrip().endswith(_VARYING),
            after,
        )
        found.append(block)
        following = (match.start(), block)
    return found[::-1]


def all_blocks(language: str) -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks(document) if block.language == language]


def steps(block: Block) -> Iterator[tuple[str, str]]:
    """Commands of a ``console`` block, each with the output that follows it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def commands(script: str) -> Iterator[list[str]]:
    """Words of every command of a script: pipes and lists cut, variables in front left out."""
    variables: dict[str, str] = {}
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, ";"]:
            if token in ("|", "&&", ";", "||", "<", ">"):
                if words:
                    yield words
                words = []
            elif not words and re.match(r"\w+=", token):
                name, _, value = token.partition("=")
                variables[f"${name}"] = value
            elif not words and token in variables:
                words = shlex.split(variables[token])
            else:
                words.append(token)


def matches(expected: str, printed: str, *, varying: bool = False) -> bool:
    """Whether an example describes an output."""
    lines = [_form(line, varying=varying) for line in expected.rstrip("\n").split("\n")]
    pattern = "".join(
        r"(?:[^\n]*\n)*?"
        if line.strip() == ANY
        else r"[^\n]*?".join(map(re.escape, line.split(ANY))) + r"[ \t]*\n"
        for line in lines
    )
    shown = "\n".join(_form(line, varying=varying) for line in printed.rstrip("\n").split("\n")) + "\n"
    return re.fullmatch(pattern, shown) is not None


def _form(line: str, *, varying: bool) -> str:
    for pattern, name in _FORMS:
        line = pattern.sub(name, line)
    if varying:
        line = re.sub(r" +", " ", _ANY_NUMBER.sub("<number>", line))
    # Columns move with the width of what stands in them.
    return re.sub(r" {2,}", "  ", line).rstrip() if "<" in line else line
