"""Options of a measurement."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moechat.config import parse_size
from moechat.configurator.systems import CacheSettings, parse_settings
from moechat.errors import UsageError
from moechat.options import as_flag
from moechat.validation import require_number, require_whole

DEFAULT_FRACTIONS = (0.25, 0.5)
_RATIO = re.compile(r"(\d+(?:\.\d*)?|\.\d+)x", re.ASCII)
# Limits that keep transfer times practical and quotients within the range of floats.
_MOST_BANDWIDTH = float(1 << 50)
_MOST_RATIO = 1e6
_MOST = (1 << 63) - 1


@dataclass(frozen=True)
class System:
    """A system to measure.

    Attributes:
        name: Its name and settings, as written.
        settings: Parsed settings.
    """

    name: str
    settings: CacheSettings


@dataclass(frozen=True)
class LinkChoice:
    """The link to measure with.

    Attributes:
        kind: ``file`` reads the store; ``sim`` simulates transfers with a given bandwidth.
        bandwidth: ``sim``: bytes per second.
        ratio: ``sim``: alternative to ``bandwidth``: measured compute rate of expert blocks divided by it.
    """

    kind: Literal["file", "sim"] = "file"
    bandwidth: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class BenchOptions:
    """Options of a measurement.

    Attributes:
        systems: Systems to compare, in this order.
        fractions: Shares of all experts that fit in the near tier.
        ram: Alternative to fractions: bytes of the near tier's pages.
        link: Link between store and near tier.
        routing: Trace that determines the experts; ``None``: the model's routers choose.
        accuracy: Accuracy of drawn predictions for a replayed trace.
        prompt_tokens: Tokens of the prompt.
        tokens: Timed tokens.
        warmup_tokens: Tokens between the two, which fill the cache and are not timed.
        fill_tokens: Tokens of a replay before the prompt, for which only the expert layers are run, without
            delays of a simulated link, so that cache and policy are as after long use.
        runs: Number of runs of each system at each fraction.
        seed: Random seed.
        expect: Compute what the simulator expects of each run, which takes more runs and the speeds of link
            and kernels; only for a file link may it be left out.

    Raises:
        UsageError: A value is out of range.
    """

    systems: tuple[System, ...]
    fractions: tuple[float, ...] = DEFAULT_FRACTIONS
    ram: int | None = None
    link: LinkChoice = LinkChoice()
    routing: Path | None = None
    accuracy: float = 0.7
    prompt_tokens: int = 128
    tokens: int = 64
    warmup_tokens: int = 32
    fill_tokens: int = 0
    runs: int = 3
    seed: int = 0
    expect: bool = True

    def __post_init__(self) -> None:
        if not self.systems:
            raise UsageError("there is no system to measure")
        names = [system.name for system in self.systems]
        if len(set(names)) != len(names):
            raise UsageError(f"a system is named twice in {', '.join(names)}")
        for fraction in self.fractions:
            require_number("a fraction", fraction, 0, 1, above=True)
        if not self.fractions or len(set(self.fractions)) != len(self.fractions):
            raise UsageError("the fractions must be different numbers, at least one")
        require_number("--accuracy", self.accuracy, 0, 1)
        for name, least in (
            ("prompt_tokens", 1),
            ("tokens", 2),
            ("warmup_tokens", 0),
            ("fill_tokens", 0),
            ("runs", 1),
            ("seed", 0),
        ):
            require_whole(as_flag(name), getattr(self, name), least, _MOST)
        if self.fill_tokens and self.routing is None:
            raise UsageError("fill-tokens are taken from a trace; they need --routing")
        if not self.expect and self.link.kind != "file":
            raise UsageError(
                "the speed of a simulated link depends on that of the kernels, which is left out"
            )

    @property
    def all_tokens(self) -> int:
        """Tokens of one run, without ``fill_tokens``."""
        return self.prompt_tokens + self.warmup_tokens + self.tokens

    def check_context(self, context: int) -> None:
        """Check that all tokens fit into the model's context.

        Raises:
            UsageError: They do not.
        """
        if self.all_tokens > context:
            raise UsageError(
                f"{self.all_tokens} tokens are requested; the context holds {context}",
                hint="use fewer prompt-tokens, warmup-tokens or tokens",
            )


def parse_systems(text: str) -> tuple[System, ...]:
    """Parse ``mixtral-offloading,auto,auto:split=0.5,lookahead=2``: names with optional settings.

    A part of the form KEY=VALUE is a setting of the system before it.

    Raises:
        UsageError: Unknown system or setting, or a value out of range.
    """
    names: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        head, colon, _ = piece.partition(":")
        if names and not colon and "=" in head:
            if ":" not in names[-1]:
                raise UsageError(
                    f"the setting {piece!r} follows the system {names[-1]!r} after a comma",
                    hint=f"write {names[-1]}:{piece}",
                )
            names[-1] += f",{piece}"
        else:
            names.append(piece)
    return tuple(System(name, parse_settings(name)) for name in names)


def parse_fractions(text: str) -> tuple[float, ...]:
    """Parse ``0.25,0.5``, or quotients such as ``1/3``.

    Raises:
        UsageError: A part is not a number.
    """
    values = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        number, slash, divisor = piece.partition("/")
        try:
            values.append(float(number) / float(divisor) if slash else float(number))
        except (ValueError, ZeroDivisionError):
            raise UsageError(f"{piece!r} is not a fraction", hint="write 0.25 or 1/4") from None
    return tuple(values)


def parse_link(text: str) -> LinkChoice:
    """Parse ``file``, ``sim:2.5G`` (bytes per second) or ``sim:16x`` (16 times slower than the computation).

    Raises:
        UsageError: ``text`` is none of these.
    """
    kind, _, speed = text.partition(":")
    if text == "file":
        return LinkChoice()
    if kind == "sim" and speed:
        ratio = _RATIO.fullmatch(speed)
        if ratio:
            value = float(ratio.group(1))
            if math.isfinite(value) and 1 / _MOST_RATIO <= value <= _MOST_RATIO:
                return LinkChoice("sim", ratio=value)
        else:
            with suppress(UsageError):  # replaced by the error below, as its hint is about memory sizes
                value = float(parse_size(speed))
                if 0 < value <= _MOST_BANDWIDTH:
                    return LinkChoice("sim", bandwidth=value)
    raise UsageError(
        f"{text!r} is not a link",
        hint="write file, sim:2.5G (bytes a second, at most 1024T) or sim:16x (0.000001x to 1000000x)",
    )
