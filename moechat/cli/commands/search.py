"""``moechat search``: models on the hub, with size and expected speed on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moechat.cli.commands.download_text import ASSUMED, short_rate
from moechat.cli.commands.library_list import write_json
from moechat.cli.terminal.consoles import print_notice, write_output
from moechat.cli.terminal.load_progress import LoadProgress, format_bytes
from moechat.errors import UsageError
from moechat.hub.model_ref import ALIASES
from moechat.options import BITS
from moechat.safe_text import one_line
from moechat.validation import require_choice, require_whole

if TYPE_CHECKING:
    from moechat.fetch.search import Candidate, Hit

_MOST = 50


@dataclass(frozen=True)
class SearchCommand:
    """Arguments of ``moechat search``.

    Raises:
        UsageError: There are no words, or a value is out of range.
    """

    words: tuple[str, ...]
    limit: int = 10
    bits: int | None = None
    quiet: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        if not any(word.strip() for word in self.words):
            raise UsageError("WORDS is missing", hint="moechat search qwen3 a3b")
        require_whole("--limit", self.limit, 1, _MOST)
        if self.bits is not None:
            require_choice("--bits", self.bits, BITS)


def search(command: SearchCommand) -> int:
    """Search, judge and show; returns the exit status.

    Raises:
        OfflineError: The hub cannot be reached.
    """
    say = (lambda _text: None) if command.quiet else print_notice
    with LoadProgress(quiet=command.quiet) as progress:
        progress.say("searching the hub")
        from moechat.fetch.search import Judge, by_fit, search_hub

        hits = search_hub(command.words, command.limit, say)  # before seconds of importing torch
        judge, found = Judge(command.bits, say), []
        for number, hit in enumerate(hits, 1):
            progress.say(f"{number} of {len(hits)}: {hit.repository}")
            found.append(judge.judge(hit))
    found = by_fit(found)
    if command.json:
        write_json([_json(candidate) for candidate in found])
        return 0
    if not found:
        print_notice(f"no model on the hub has {' '.join(command.words)!r} in its name")
        return 0
    write_output(sys.stdout, _text(found))
    if any(candidate.expected is not None and candidate.expected.basis == "assumed" for candidate in found):
        say(ASSUMED)
    return 0


def _text(found: Sequence[Candidate]) -> str:
    rows = [("name", "parameters", "download", "store", "tokens a second", "")]
    refused = []
    for candidate in found:
        choice, expected = candidate.choice, candidate.expected
        if choice is None or expected is None:
            refused.append(f"{_name(candidate.hit)}: {one_line(candidate.refused)}")
            continue
        speed = short_rate(expected.tokens_per_s)
        if expected.low is not None and expected.high is not None:
            speed += f" ({short_rate(expected.low)} to {short_rate(expected.high)})"
        source = choice.sources[0]
        rows.append(
            (
                _name(candidate.hit) + (f":{source.variant}" if source.variant else ""),
                f"{_count(expected.parameters)}, {_count(expected.active_parameters)} a token",
                format_bytes(source.nbytes),
                f"{format_bytes(expected.store_bytes)}, {choice.bits} bits",
                speed,
                "reads the disk" if expected.reads_disk else "",
            )
        )
    lines = _table(rows) if len(rows) > 1 else []
    if refused:
        lines += ["", "not run here:"] if lines else ["not run here:"]
        lines += [f"  {line}" for line in refused]
    return "\n".join(lines) + "\n"


def _name(hit: Hit) -> str:
    alias = next((name for name, repository in ALIASES.items() if repository == hit.repository), None)
    return hit.repository if alias is None else f"{hit.repository} ({alias})"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align columns; without rich, whose import takes longer than all the rest."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _json(candidate: Candidate) -> dict[str, Any]:
    choice, expected = candidate.choice, candidate.expected
    return {
        "repository": candidate.hit.repository,
        "commit": candidate.commit,
        "licence": candidate.licence,
        "downloads": candidate.hit.downloads,
        "base": candidate.hit.base,
        "name": None if choice is None else choice.sources[0].name,
        "download_bytes": None if choice is None else choice.sources[0].nbytes,
        "bits": None if choice is None else choice.bits,
        "speed": None if expected is None else expected.to_json(),
        "refused": candidate.refused or None,
    }
