"""What ``moechat run`` was asked for, checked before anything heavy is imported."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from moechat.chat.settings import NAMES, ChatOptions, Generation
from moechat.config import DEVICE, parse_size
from moechat.configurator.systems import settings_of
from moechat.errors import UsageError

BITS = (2, 3, 4, 8, 16)
DTYPES = ("auto", "float32", "bfloat16", "float16")
DENSE_BITS = (4, 8, 16)
ACTIVATION_BITS = (8, 16, 32)


# Options that say how a model is loaded.
_LOADING = (
    "bits",
    "device",
    "vram",
    "ram",
    "system",
    "ctx",
    "threads",
    "dtype",
    "dense_bits",
    "activation_bits",
    "deterministic",
)


@dataclass(frozen=True)
class RunOptions:
    """The options of ``moechat run``; ``None`` leaves the choice to the model or the engine.

    ``origins`` says of values that did not come from the command line where they came from.

    Raises:
        UsageError: A value is out of range, not UTF-8, or two options exclude each other.
    """

    model: str
    prompt: str | None = None
    jsonl: str | None = None
    bits: int | None = None
    device: str | None = None
    vram: str | None = None
    ram: str | None = None
    system: str = "auto"
    ctx: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    system_prompt: str | None = None
    completion: bool = False
    threads: int | None = None
    dtype: str = "auto"
    dense_bits: int = 16
    activation_bits: int = 16
    deterministic: bool = False
    tune: bool | None = None
    raw: bool = False
    hide_thinking: bool = False
    resume: bool = False
    session: int | None = None
    save: bool = True
    json: bool = False
    stats: bool = False
    quiet: bool = False
    verbose: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)
    yes: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        _one_of("--bits", self.bits, BITS)
        if self.device is not None and not re.fullmatch(DEVICE, self.device):
            raise UsageError(f"--device is {self.device}; this version knows cpu, cuda and cuda:N")
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--dense-bits", self.dense_bits, DENSE_BITS)
        _one_of("--activation-bits", self.activation_bits, ACTIVATION_BITS)
        if self.ram is not None and parse_size(self.ram) == 0:
            raise UsageError("--ram is 0", hint="leave it out to use the memory that is available")
        if self.vram is not None and parse_size(self.vram) == 0:
            raise UsageError("--vram is 0", hint="leave it out to use the graphics memory that is free")
        if self.vram is not None and self.device == "cpu":
            raise UsageError(
                "--vram needs a graphics card",
                hint="leave --device out, or say cuda; --ram limits the memory of the process",
            )
        settings = settings_of(self.system)
        if settings.policy == "belady" or settings.prefetch == "perfect":
            raise UsageError(
                f"the system {self.system} looks into the future, which a chat does not have",
                hint="`moechat simulate` and `moechat bench --routing` play a recorded one back",
            )
        _between("--ctx", self.ctx, 2, 1 << 24)
        _between("--max-tokens", self.max_tokens, 1, 1 << 24)
        _between("--threads", self.threads, 1, 1024)
        _between("--seed", self.seed, 0, (1 << 63) - 1)
        _between("--top-k", self.top_k, 0, 1 << 24)
        _between("--temperature", self.temperature, 0, 100)
        _between("--min-p", self.min_p, 0, 1)
        _between("--top-p", self.top_p, 0, 1, above=True)
        _between("--repetition-penalty", self.repetition_penalty, 0, 10, above=True)
        check_utf8("the prompt", self.prompt)
        check_utf8("the system prompt", self.system_prompt)
        _between("--session", self.session, 1, (1 << 63) - 1)
        if self.jsonl is not None:
            for option, given in (
                ("a prompt", self.prompt is not None),
                ("--json", self.json),
                ("--continue or --session", self.resumes),
            ):
                if given:
                    raise UsageError(f"--jsonl answers the prompts of a file and goes without {option}")
        if self.completion and self.resumes:
            raise UsageError(
                "--completion continues a text; --continue and --session go on with conversations"
            )
        if self.completion and self.system_prompt is not None:
            raise UsageError(
                "--completion uses no chat template, so --system-prompt has no place in it",
                hint="put that text at the beginning of the prompt",
            )
        if self.quiet and self.verbose:
            raise UsageError("--quiet and --verbose exclude each other")

    @property
    def resumes(self) -> bool:
        """Whether a conversation that was kept is to go on."""
        return self.resume or self.session is not None

    @property
    def chat(self) -> ChatOptions:
        """How a chat behaves."""
        settings = {name: getattr(self, name) for name in NAMES}
        given = {name: value for name, value in settings.items() if value is not None}
        return ChatOptions(
            generation=Generation(given, self.origins),
            system=self.system_prompt,
            raw=self.raw,
            hide_thinking=self.hide_thinking,
            save=self.save,
            resume=self.resume if self.session is None else self.session,
            stats=self.stats,
            quiet=self.quiet,
            verbose=self.verbose,
            loading=tuple(
                (name.replace("_", "-"), str(value), self.origins.get(name, "from the command line"))
                for name in _LOADING
                if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default
            ),
        )

    @property
    def generation(self) -> dict[str, Any]:
        """Keyword arguments of the engine's ``generate``."""
        return {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        }


def check_utf8(what: str, text: str | None) -> None:
    """Refuse arguments whose bytes were not UTF-8; Python smuggles such bytes in as lone surrogates.

    Raises:
        UsageError: There is such a byte; the message gives its position.
    """
    if text is None:
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{what} is not UTF-8 (character {error.start + 1})",
            hint="convert it first, for example with iconv",
        ) from None


def _one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value is not None and value not in choices:
        shown = ", ".join(map(str, choices))
        raise UsageError(f"{name} is {value}; this version knows {shown}")


def _between(name: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    if value is None:
        return
    # Written so that NaN fails too.
    if not (math.isfinite(value) and low <= value <= high and not (above and value == low)):
        raise UsageError(
            f"{name} is {value}; it must be {'above' if above else 'at least'} {low} and at most {high}"
        )


class LoadFlags(Protocol):
    """The options of another command that say how a model is loaded."""

    @property
    def bits(self) -> int | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def dense_bits(self) -> int: ...
    @property
    def activation_bits(self) -> int: ...
    @property
    def threads(self) -> int | None: ...


def check_load_flags(flags: LoadFlags) -> None:
    """Check what has the same meaning as for run, as run does it.

    Raises:
        UsageError: A value is out of range.
    """
    RunOptions(
        model="",
        bits=flags.bits,
        dtype=flags.dtype,
        dense_bits=flags.dense_bits,
        activation_bits=flags.activation_bits,
        threads=flags.threads,
    )
