"""The result of ``moechat compare`` as text: tables, a picture, and what to use."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence

from moechat.bench.advice import (
    DEFAULT_SYSTEM,
    LEAST_GAP_OF_SIMULATIONS,
    LEAST_GAP_OF_SINGLE_RUNS,
    Advice,
    Cell,
)
from moechat.bench.compared import Compared
from moechat.bench.entries import Entry
from moechat.cli.terminal.chart_picture import LETTERS, Look, draw_picture, share_title
from moechat.cli.terminal.load_progress import format_bytes
from moechat.cli.terminal.page import Page
from moechat.safe_text import one_line
from moechat.simulate.plot import Chart, Point

_WIDTH = 80
_NAME = 22
_COLUMN = 18
# Columns of shares beside each other within 80 columns, in a table of times and of the rest.
_TIMES, _DETAILS = 3, 3
_SHOWN_EQUAL = 4
_READY = "ready: share of a token's experts that are in memory, or on their way, when it needs them."


def render(compared: Compared, model: str | None) -> str:
    """The result as text for people.

    Args:
        compared: The result.
        model: The model as the user wrote it, for commands to copy; ``None``: it can only be simulated.
    """
    page = Page()
    page.paragraph(_headline(compared))
    ranked = compared.ranked()
    letters = letters_of(compared)
    for shares in _groups(compared.fractions, _TIMES):
        _table(page, compared, "milliseconds a token" + _range(compared), ranked, shares, letters, _time)
    _floor(page, compared)
    for shares in _groups(compared.fractions, _DETAILS):
        if any(cell.first_token_s is not None for cell in compared.cells):
            title = "seconds to the first token, and experts that are ready"
        else:
            title = "tokens a second, and experts that are ready"
        _table(page, compared, title, ranked, shares, letters, _detail)
    if any(entry.also for entry in ranked):
        page.line("= comes to the same thing here, so only one of them is shown.")
    page.line()
    for line in draw_picture(chart_of(compared), letters, _look()):
        page.picture_line(line)
    page.line()
    for sentence in words(compared, model):
        page.paragraph(sentence)
    page.line()
    for sentence in (*compared.assumptions, _READY):
        page.paragraph(sentence, style="dim")
    return page.text


def letters_of(compared: Compared) -> dict[str, str]:
    """A letter for each system, the fastest first."""
    return {entry.system: LETTERS[number % len(LETTERS)] for number, entry in enumerate(compared.ranked())}


def chart_of(compared: Compared) -> Chart:
    """Time per token over memory; the fastest systems first."""
    model, machine = compared.model, compared.machine
    lines = {
        entry.system: tuple(
            Point(cell.nbytes, cell.ms, cell.low, cell.high)
            for cell in sorted(compared.cells, key=lambda cell: cell.fraction)
            if cell.system == entry.system
        )
        for entry in compared.ranked()
    }
    title = f"{model['name']}, {model['bits']} bits, on {machine['name']} ({compared.kind})"
    return Chart(title, lines, int(model["all_expert_bytes"]), compared.floor_ms)


def _look() -> Look:
    """What standard output can show: colors and Unicode lines on a terminal only."""
    terminal = sys.stdout.isatty()
    unicode = terminal and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    if not terminal:
        return Look(_WIDTH, False, False)
    from rich.console import Console

    console = Console(file=sys.stdout)
    colored = console.color_system is not None and not console.no_color and "NO_COLOR" not in os.environ
    plain = console.is_dumb_terminal
    return Look(min(100, console.width), unicode and not plain, colored and not plain)


def _headline(compared: Compared) -> str:
    model, machine = compared.model, compared.machine
    text = (
        f"{one_line(str(model['name']))}: {model['expert_layers']} layers of {model['experts']} experts, "
        f"{model['top_k']} a token, {model['bits']} bits, {format_bytes(model['all_expert_bytes'])} of "
        "experts; "
    )
    if compared.kind == "simulated":
        return f"Simulated, nothing was run. {text}on {machine['title']}"
    ended = "" if compared.complete else "Interrupted: this is what was measured before. "
    return f"{ended}{text}measured here, {machine['threads']} threads, {machine['isa']}"


def _range(compared: Compared) -> str:
    runs = [len(cell.runs) for cell in compared.cells]
    if compared.exact:
        return ", simulated"
    if max(runs) == 1:
        return ", one run"
    count = str(runs[0]) if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}"
    return f": median (range) of {count} runs"


def _groups(shares: Sequence[float], size: int) -> list[Sequence[float]]:
    return [shares[start : start + size] for start in range(0, len(shares), size)]


def _table(
    page: Page,
    compared: Compared,
    title: str,
    entries: Sequence[Entry],
    shares: Sequence[float],
    letters: dict[str, str],
    text_of: Callable[[Cell], str],
) -> None:
    cells = {(cell.system, cell.fraction): cell for cell in compared.cells}
    everything = compared.model["all_expert_bytes"]
    columns = [("", "left"), ("system", "left")]
    columns += [(f"{share_title(share)}: {format_bytes(share * everything)}", "right") for share in shares]
    rows = []
    for entry in entries:
        name = entry.system
        texts = [text_of(cells[name, share]) if (name, share) in cells else "-" for share in shares]
        for number, piece in enumerate(_pieces(entry, max(_NAME, _WIDTH - 6 - _COLUMN * len(shares)))):
            rows.append([letters[name], piece, *texts] if number == 0 else ["", piece, *[""] * len(shares)])
    page.line()
    page.line(title, style="bold")
    page.table("", columns, rows, no_wrap=True)


def _pieces(entry: Entry, width: int) -> list[str]:
    """The names of an entry in lines of their column."""
    names = [entry.system, *(f"= {other}" for other in entry.also)]
    return [name[start : start + width] for name in names for start in range(0, len(name), width)]


def _time(cell: Cell) -> str:
    if cell.low == cell.high:
        return _ms(cell.ms)
    return f"{_ms(cell.ms)} ({_ms(cell.low)}-{_ms(cell.high)})"


def _detail(cell: Cell) -> str:
    first = _ms(1000 / cell.ms) if cell.first_token_s is None else f"{cell.first_token_s:.3f}"
    return f"{first} {cell.ready:>5.0%}"


def _floor(page: Page, compared: Compared) -> None:
    if compared.floor_ms is not None:
        page.line(f"The floor, all experts in memory: {_ms(compared.floor_ms)} ms a token.")


def _ms(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def words(compared: Compared, model: str | None) -> list[str]:
    """What to use, in sentences.

    Args:
        compared: The result.
        model: As for :func:`render`.
    """
    advice = compared.advice()
    several = len({cell.system for cell in compared.cells}) > 1
    said = [
        *([_verdict(advice)] if several else []),
        *(_one(each, compared, model, several=several) for each in advice),
    ]
    if not compared.complete:
        said.append("This rests on the runs before the interrupt.")
    return said


def _verdict(advice: Sequence[Advice]) -> str:
    """One sentence about all shares."""
    choices = list(dict.fromkeys(each.use for each in advice))
    if choices == [DEFAULT_SYSTEM]:
        return f"Use {DEFAULT_SYSTEM}, the default."
    if len(choices) == 1:
        return f"Use {choices[0]}."
    parts = [
        f"{name}{' (the default)' if name == DEFAULT_SYSTEM else ''} at "
        + _listed([share_title(each.fraction) for each in advice if each.use == name])
        for name in choices
    ]
    return f"Use {_listed(parts)} of the experts."


def _one(each: Advice, compared: Compared, model: str | None, *, several: bool) -> str:
    """The advice for one share, in a sentence or two."""
    everything = compared.model["all_expert_bytes"]
    share = share_title(each.fraction)
    where = f"With {share} of the experts ({format_bytes(each.fraction * everything)})"
    text = f"{where}, {each.use} takes {_ms(each.ms)} ms a token"
    margin = _margin(each, compared)
    parts = []
    if each.default_ms is not None:
        beyond = "" if margin else ", beyond the spread"
        slower = f"{DEFAULT_SYSTEM}, the default ({_ms(each.default_ms)} ms)"
        parts.append(f"{_faster(each.default_ms / each.ms - 1)} {slower}{beyond}")
    elif each.following is not None and each.faster_by is not None:
        others = "the next" if each.equal else "the next best"
        parts.append(f"{_faster(each.faster_by)} {others}, {each.following}")
    if each.over_floor is not None:
        parts.append(_over_floor(each.over_floor))
    text += "".join(f", {part}" for part in parts) + "."
    if each.equal:
        left = len(each.equal) - _SHOWN_EQUAL
        shown = _listed([*each.equal[:_SHOWN_EQUAL], *([f"{left} more"] if left > 0 else [])])
        verb = "is" if len(each.equal) == 1 else "are"
        text += f" {shown} {verb} as fast, within {margin or 'the spread'}."
    if each.use != DEFAULT_SYSTEM and several:
        command = "" if compared.exact or model is None else f"moechat run {shlex.quote(model)} "
        text += f" `{command}--system {shlex.quote(each.use)}` selects it."
    return text


def _margin(each: Advice, compared: Compared) -> str:
    """The difference that counts as none where runs have no spread; empty: they have one."""
    if compared.exact:
        return f"{LEAST_GAP_OF_SIMULATIONS:.0%}"
    used = next(cell for cell in compared.at(each.fraction) if cell.system == each.use)
    return f"{LEAST_GAP_OF_SINGLE_RUNS:.0%} in one run" if len(used.runs) == 1 else ""


def _faster(share: float) -> str:
    return f"{share:.0%} faster than" if share < 1 else f"{1 + share:.1f} times as fast as"


def _listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _over_floor(over: float) -> str:
    if over <= 0.01:
        return "as fast as with all of them in memory"
    if over < 0.2:
        return f"within {over:.0%} of the floor"
    if over < 1:
        return f"{over:.0%} above the floor"
    return f"{1 + over:.1f} times the floor"
