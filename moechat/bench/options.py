"""What a measurement was asked to be."""

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

DEFAULT_SYSTEMS = "mixtral-offloading,auto"
DEFAULT_FRACTIONS = (0.25, 0.5)
_RATIO = re.compile(r"(\d+(?:\.\d*)?|\.\d+)x", re.ASCII)
# Beyond these a transfer takes no time, or longer than anyone waits, and quotients leave the range of floats.
_MOST_BANDWIDTH = float(1 << 50)
_MOST_RATIO = 1e6


@dataclass(frozen=True)
class System:
    """One of the systems that are compared.

    Attributes:
        name: As it was written.
        settings: What it stands for.
    """

    name: str
    settings: CacheSettings


@dataclass(frozen=True)
class LinkChoice:
    """The link to measure with.

    Attributes:
        kind: ``file`` reads the store; ``sim`` lets transfers take a programmed time.
        bandwidth: ``sim``: bytes a second.
        ratio: ``sim``: instead of a bandwidth: how many times slower than the measured compute rate of expert
            blocks.
    """

    kind: Literal["file", "sim"] = "file"
    bandwidth: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class BenchOptions:
    """A measurement.

    Attributes:
        systems: What is compared, in this order.
        fractions: Shares of all experts that the near tier can hold.
        ram: Instead of fractions: bytes of the near tier's pages.
        link: Between store and near tier.
        routing: Trace that chooses the experts; ``None`` leaves it to the model's routers.
        accuracy: Of drawn predictions, where a trace is replayed.
        prompt_tokens: Tokens of the prompt.
        tokens: Tokens that are timed.
        warmup_tokens: Tokens between the two, which fill the cache and are not timed.
        fill_tokens: Tokens of a replay before the prompt, of which only the expert layers are run, over a
            link that does not hold them up (if it is simulated): a cache and a policy as after a long use.
        runs: How often each system is measured at each fraction.
        seed: Of everything drawn.

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

    def __post_init__(self) -> None:
        if not self.systems:
            raise UsageError("there is no system to measure")
        names = [system.name for system in self.systems]
        if len(set(names)) != len(names):
            raise UsageError(f"a system is named twice in {', '.join(names)}")
        for fraction in self.fractions:
            if not 0 < fraction <= 1:
                raise UsageError(f"a fraction is {fraction}; it must be above 0 and at most 1")
        if not self.fractions or len(set(self.fractions)) != len(self.fractions):
            raise UsageError("the fractions must be different numbers, at least one")
        if not 0 <= self.accuracy <= 1:
            raise UsageError(f"accuracy is {self.accuracy}; it must be between 0 and 1")
        for name, least in (
            ("prompt_tokens", 1),
            ("tokens", 2),
            ("warmup_tokens", 0),
            ("fill_tokens", 0),
            ("runs", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"{name.replace('_', '-')} is {value}; it must be at least {least}")

        if self.fill_tokens and self.routing is None:
            raise UsageError("fill-tokens are taken from a trace; they need --routing")

    @property
    def all_tokens(self) -> int:
        """Tokens of one run, without those that fill the cache before it."""
        return self.prompt_tokens + self.warmup_tokens + self.tokens

    def check_context(self, context: int) -> None:
        """Refuse more tokens than the model's context holds.

        Raises:
            UsageError: There are more.
        """
        if self.all_tokens > context:
            raise UsageError(
                f"{self.all_tokens} tokens are asked for; the context holds {context}",
                hint="use fewer prompt-tokens, warmup-tokens or tokens",
            )


def parse_systems(text: str) -> tuple[System, ...]:
    """``mixtral-offloading,auto,auto:split=0.5,lookahead=2``: names, each with settings of its own if it has
    any.

    A piece between commas is a setting if it has the form KEY=VALUE, and belongs to the system before it.

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
    """``0.25,0.5``, or quotients such as ``1/3``.

    Raises:
        UsageError: It is not that.
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
    """``file``, ``sim:2.5G`` (bytes a second) or ``sim:16x`` (so many times slower than the computation).

    Raises:
        UsageError: It is none of these.
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
            with suppress(UsageError):  # its hint is about sizes, and speaks of memory
                value = float(parse_size(speed))
                if 0 < value <= _MOST_BANDWIDTH:
                    return LinkChoice("sim", bandwidth=value)
    raise UsageError(
        f"{text!r} is not a link",
        hint="write file, sim:2.5G (bytes a second, at most 1024T) or sim:16x (0.000001x to 1000000x)",
    )
