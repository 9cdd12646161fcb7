"""Figures of bench/cpu from its turns: medians with their range, shares of streaming, ratios by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gguf_shapes import FORMATS

Spread = tuple[float, float, float]


def spread(values: Sequence[float]) -> Spread | None:
    """Median, least and most; ``None`` of nothing."""
    return (statistics.median(values), min(values), max(values)) if values else None


class Figures:
    """What the turns of one model come to.

    Args:
        model: An entry under ``models`` of the result.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.model = model
        self._turns: dict[tuple[str, str, int, int], list[Mapping[str, Any]]] = {}
        for turn in model["turns"]:
            key = turn["system"], turn["what"], turn["size"], turn["threads"]
            self._turns.setdefault(key, []).append(turn)

    @property
    def systems(self) -> list[str]:
        """Names, without the one that is only there for a difference."""
        return [name for name in self.model["systems"] if not name.endswith("thin")]

    def sizes(self, what: str) -> list[int]:
        """Contexts or prompts that were measured."""
        return sorted({size for _, kind, size, _ in self._turns if kind == what})

    def rates(self, system: str, what: str, size: int, threads: int) -> Spread | None:
        """Tokens a second; bytes a second of experts."""
        return spread([turn["rate"] for turn in self._of(system, what, size, threads)])

    def gigabytes(self, system: str, size: int, threads: int) -> Spread | None:
        """GB of weights a second in decode."""
        active = self.model["systems"][system]["active_bytes"] / 1e9
        return spread([turn["rate"] * active for turn in self._of(system, "decode", size, threads)])

    def shares(self, system: str, size: int, threads: int) -> Spread | None:
        """Of the streaming speed around each turn, in decode."""
        active = self.model["systems"][system]["active_bytes"]
        return spread(
            [turn["rate"] * active / _stream(turn) for turn in self._of(system, "decode", size, threads)]
        )

    def expert_shares(self, system: str, threads: int) -> Spread | None:
        """Of the streaming speed, experts alone.

        moechat's are computed alone. llama.cpp's come from the difference between the file and one whose
        experts have fewer neurons: bytes that the second reads less by the time that it takes less. Both
        times hold the same attention, routers and head.
        """
        alone = self._of(system, "experts", 0, threads)
        if alone:
            return spread([turn["rate"] / _stream(turn) for turn in alone])
        thin = f"{system} thin"
        if thin not in self.model["systems"]:
            return None
        size = self.sizes("decode")[0]
        facts = self.model["systems"]
        less = facts[system]["active_bytes"] - facts[thin]["active_bytes"]
        values = []
        for whole, part in zip(
            self._of(system, "decode", size, threads), self._of(thin, "decode", size, threads), strict=True
        ):
            # As multiples of the time that streaming the bytes takes, so that a drift between the two turns
            # does not count as a difference.
            seconds = _stream(whole) / whole["rate"] - _stream(part) / part["rate"]
            if seconds > 0:
                values.append(less / seconds)
        return spread(values)

    def ratios(self, system: str, other: str, what: str, size: int, threads: int) -> Spread | None:
        """Speed as a multiple of another system's in the same round."""
        theirs = {_when(turn): turn["rate"] for turn in self._of(other, what, size, threads)}
        return spread(
            [
                turn["rate"] / theirs[_when(turn)]
                for turn in self._of(system, what, size, threads)
                if _when(turn) in theirs
            ]
        )

    def _of(self, system: str, what: str, size: int, threads: int) -> list[Mapping[str, Any]]:
        return self._turns.get((system, what, size, threads), [])


def _when(turn: Mapping[str, Any]) -> tuple[int, int]:
    return turn["session"], turn["round"]


def _stream(turn: Mapping[str, Any]) -> float:
    return float(turn["before"] + turn["after"]) / 2


def summary(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Everything that the table shows, by system and threads; each figure as median, least and most."""
    figures = Figures(model)
    rows = []
    for threads in sorted({turn["threads"] for turn in model["turns"]}, reverse=True):
        for system in figures.systems:
            row: dict[str, Any] = {"system": system, "threads": threads}
            for size in figures.sizes("decode"):
                row[f"decode_{size}"] = figures.rates(system, "decode", size, threads)
                row[f"decode_{size}_gb_s"] = figures.gigabytes(system, size, threads)
                row[f"decode_{size}_share"] = figures.shares(system, size, threads)
            row["experts_share"] = figures.expert_shares(system, threads)
            for size in figures.sizes("prompt"):
                row[f"prompt_{size}"] = figures.rates(system, "prompt", size, threads)
            for kind in FORMATS:
                if kind not in figures.systems or kind == system:
                    continue
                for what in ("decode", "prompt"):
                    for size in figures.sizes(what):
                        name = f"{what}_{size}_to_{kind}"
                        row[name] = figures.ratios(system, kind, what, size, threads)
            rows.append(row)
    return rows


def table(model: Mapping[str, Any]) -> list[str]:
    """Lines for people."""
    figures, rows = Figures(model), summary(model)
    columns: list[tuple[str, str, str, bool]] = []  # title, key, format, with its range
    first, *more = figures.sizes("decode") or [0]
    columns += [
        ("decode/s", f"decode_{first}", "{:.1f}", True),
        ("GB/s", f"decode_{first}_gb_s", "{:.1f}", False),
        ("share", f"decode_{first}_share", "{:.2f}", True),
        ("experts", "experts_share", "{:.2f}", True),
    ]
    columns += [(f"at {size}", f"decode_{size}", "{:.1f}", False) for size in more]
    columns += [(f"prompt {size}", f"prompt_{size}", "{:.0f}", True) for size in figures.sizes("prompt")]
    for kind in FORMATS:
        if kind in figures.systems:
            columns.append((f"decode x {kind}", f"decode_{first}_to_{kind}", "{:.2f}", False))
            columns += [
                (f"{size} x {kind}", f"prompt_{size}_to_{kind}", "{:.2f}", False)
                for size in figures.sizes("prompt")
            ]
    cells = [["threads", "system", *(title for title, *_ in columns)]]
    for row in rows:
        line = [str(row["threads"]), row["system"]]
        line += [_cell(row.get(key), form, wide) for _, key, form, wide in columns]
        cells.append(line)
    kept = [
        index for index in range(len(cells[0])) if any(line[index] != "-" for line in cells[1:]) or index < 2
    ]
    widths = [max(len(line[index]) for line in cells) for index in kept]
    title = f"{model['name']}, {model['layers']} of {model['all_layers']} layers"
    streams = spread([_stream(turn) / 1e9 for turn in model["turns"]])
    if streams is not None:
        title += f"; streaming reads {streams[0]:.1f} GB/s ({streams[1]:.1f}..{streams[2]:.1f})"
    return [title] + [
        "  ".join(line[index].rjust(width) for index, width in zip(kept, widths, strict=True)).rstrip()
        for line in cells
    ]


def _cell(value: Spread | None, form: str, wide: bool) -> str:
    if value is None:
        return "-"
    middle, least, most = (form.format(part) for part in value)
    return middle if not wide or least == most else f"{middle} ({least}..{most})"
