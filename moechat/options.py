"""The options with which a model is loaded or planned for: their types, ranges and defaults.

:class:`LoadOptions` is the only place where these options are parsed and checked. ``moechat.load``,
``moechat.plan`` and the commands run, plan, bench, trace and profile share it. To add an option: a field of
``LoadOptions`` and a key of :class:`LoadKeywords` here, a field in :mod:`moechat.cli.options` for the
commands, and its effect; ``moechat help architecture`` lists the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from moechat.config import parse_size
from moechat.configurator.systems import SYSTEMS, CacheSettings, parse_settings
from moechat.errors import UsageError
from moechat.geometry import (
    ACTIVATION_BITS,
    AUTO_BITS,
    DEFAULT_ACTIVATION_BITS,
    DENSE_BITS,
    KV_BITS,
    PLAIN_KV_BITS,
    DenseBits,
)
from moechat.geometry import SUPPORTED_BITS as BITS
from moechat.validation import (
    require_bool,
    require_choice,
    require_known,
    require_whole,
    require_whole_type,
    shown,
)

__all__ = [
    "ACTIVATION_BITS",
    "BITS",
    "DENSE_BITS",
    "DTYPES",
    "KV_BITS",
    "MOST_CONTEXT",
    "LoadKeywords",
    "LoadOptions",
    "as_flag",
    "as_keyword",
]

_DEVICE = re.compile("cpu|cuda(:[0-9]{1,3})?")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MOST_CONTEXT = 1 << 24
_MOST_THREADS = 1024
# Offsets in files are signed 64-bit numbers; no memory budget can be larger.
_MOST_BYTES = (1 << 63) - 1

Rule = Callable[[str, Any], Any]
Label = Callable[[str], str]


def as_keyword(name: str) -> str:
    """The name of an option in Python: ``dense_bits``."""
    return name


def as_flag(name: str) -> str:
    """The name of an option on the command line: ``--dense-bits``."""
    return "--" + name.replace("_", "-")


def _choice(choices: tuple[Any, ...]) -> Rule:
    return lambda label, value: require_choice(label, value, choices)


def _whole(least: int, most: int) -> Rule:
    return lambda label, value: require_whole(label, value, least, most)


def _dense_bits(label: str, value: Any) -> DenseBits:
    if isinstance(value, str) and value == AUTO_BITS:
        return value
    if isinstance(value, str) and value.isdecimal():  # as the command line gives it
        value = int(value)
    try:
        bits: int = require_choice(label, value, DENSE_BITS)
    except UsageError as error:
        choices = ", ".join(map(str, (AUTO_BITS, *DENSE_BITS)))
        raise UsageError(str(error), hint=f"choose one of: {choices}") from None
    return bits


def _size(label: str, value: Any) -> int:
    size = value
    if isinstance(value, str):
        try:
            size = parse_size(value)
        except UsageError as error:
            raise UsageError(f"{label}: {error}", hint=error.hint) from None
    hint = "give a size such as '12G', or a number of bytes; leave it out to use the available memory"
    # The bound of file offsets means nothing to the user, so both ends have their own words.
    number = require_whole_type(label, size, hint=hint)
    if number < 1:
        raise UsageError(f"{label} is {shown(number)}; it must be more than 0 bytes", hint=hint)
    if number > _MOST_BYTES:
        raise UsageError(f"{label} is {shown(value)}; that is larger than any memory", hint=hint)
    return number


def _device(label: str, value: Any) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise UsageError(f"{label} is {shown(value)}", hint="choose one of: cpu, cuda, cuda:N")
    return value


def _system(label: str, value: Any) -> str:
    if not isinstance(value, str) or value.partition(":")[0] not in SYSTEMS:
        raise UsageError(f"{label} is {shown(value)}", hint=f"choose one of: {', '.join(SYSTEMS)}")
    try:
        parse_settings(value)
    except UsageError as error:
        raise UsageError(f"{label} is {shown(value)}: {error}", hint=error.hint) from None
    return value


def _option(default: Any, rule: Rule) -> Any:
    """A field with the rule that parses its values; ``None`` is allowed where it is the default."""
    return field(default=default, metadata={"rule": rule})


class LoadKeywords(TypedDict, total=False):
    """The keyword arguments that ``moechat.load`` and ``moechat.plan`` share; see :class:`LoadOptions`."""

    bits: int | None
    device: str | None
    vram: str | int | None
    ram: str | int | None
    system: str
    ctx: int | None
    threads: int | None
    dtype: str
    dense_bits: DenseBits
    activation_bits: int
    kv_bits: int
    conversations: int
    deterministic: bool
    tune: bool
    replan_tokens: int


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded, or planned for. Plain values, checked when they are made.

    The constructor takes the same values as :meth:`parse`: a size may be ``"12G"`` or a number of bytes, and
    is a number of bytes afterwards.

    Attributes:
        bits: 2, 3, 4, 6, 8 or 16 bits an expert weight; ``None`` takes 4, or the bits of a finished store.
        device: ``cpu``, or a CUDA GPU: ``cuda``, ``cuda:1``; ``None``: a GPU if ``vram`` is given.
        vram: With a GPU: bytes of its memory for everything; ``None`` takes what is free, less a twentieth.
            Experts that do not fit beside the rest are copied there when they are needed.
        ram: Bytes of memory for the whole process; ``None`` takes what is available, less a reserve. Experts
            that do not fit beside the rest are read from the store when they are needed. With a GPU: all
            experts lie in memory if they fit, else in their files.
        system: How experts are kept and fetched ahead: a name in
            ``moechat.configurator.systems.SYSTEMS``, or ``NAME:KEY=VALUE,...`` with changed settings. The
            answer is the same for all, on a GPU within rounding (see ``deterministic``).
        ctx: Context length in tokens, 2 to 2²⁴; ``None`` takes the model's own, or what the memory allows.
        threads: CPU threads, 1 to 1024; ``None`` takes the physical cores this process may use.
        dtype: Type that the dense part computes in: ``float32``, ``bfloat16``, ``float16`` or ``auto``
            (bfloat16 where the device multiplies it natively, else float32, on a GPU float16).
        dense_bits: Bits of a dense weight (attention, shared experts, head): 16 keeps those of a bf16 or fp16
            checkpoint as they are, whatever ``dtype`` is (on a GPU in ``dtype``); 8, 6 and 4 pack them like
            the experts, except embeddings and routers. ``auto``: 6 or 4, see
            :func:`moechat.models.dense_form.automatic_parts`; on a GPU 16. Weights that a store has in the
            encoding of a GGUF file or of quantised safetensors stay as they are with ``auto`` and 16, FP8 on
            the CPU with 16 only.
        activation_bits: Type of the inputs of quantised weights: integers of 16 or 8 bits with a scale for
            every 64 columns, or 32: float32. With a GPU, the CPU computes its part with at least 16.
        kv_bits: Bits of a key or value in the attention cache: 16 keeps them in the type that the dense part
            computes in, 8 packs them with a power of two for every 32.
        conversations: Attention caches of a whole context that the budget holds, 1 to 64: those of answers
            that are generated side by side, and those of conversations that may go on.
        deterministic: The same logits, bit by bit, at every run and budget on a GPU too: the CPU
            then computes none of the experts that are missing there, and no graphs are replayed. On the CPU
            they are the same anyway.
        tune: Time a few plans and keep the fastest, as ``Engine.tune`` does, or take the remembered one.
        replan_tokens: Decoded tokens after which ``Engine.idle`` makes a new plan; 0: never.

    Raises:
        UsageError: A value has the wrong type or is out of range, or two options exclude each other.
    """

    bits: int | None = _option(None, _choice(BITS))
    device: str | None = _option(None, _device)
    vram: int | None = _option(None, _size)
    ram: int | None = _option(None, _size)
    system: str = _option("auto", _system)
    ctx: int | None = _option(None, _whole(2, MOST_CONTEXT))
    threads: int | None = _option(None, _whole(1, _MOST_THREADS))
    dtype: str = _option("auto", _choice(DTYPES))
    dense_bits: int | str = _option(AUTO_BITS, _dense_bits)
    activation_bits: int = _option(DEFAULT_ACTIVATION_BITS, _choice(ACTIVATION_BITS))
    kv_bits: int = _option(PLAIN_KV_BITS, _choice(KV_BITS))
    conversations: int = _option(1, _whole(1, 64))
    deterministic: bool = _option(False, require_bool)
    tune: bool = _option(False, require_bool)
    replan_tokens: int = _option(5000, _whole(0, _MOST_BYTES))

    def __post_init__(self) -> None:
        for name, value in _checked(vars(self), as_keyword).items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, values: Mapping[str, Any], label: Label = as_keyword) -> LoadOptions:
        """Options from the values that a user has given, by field name; the others take their defaults.

        Args:
            values: Such as ``{"ram": "2G", "dense_bits": 8}``.
            label: The name of an option in messages: :func:`as_keyword` or :func:`as_flag`.

        Raises:
            UsageError: A name is unknown, a value has the wrong type or is out of range, or two options
                exclude each other.
        """
        names = [entry.name for entry in fields(cls)]
        for name in values:
            require_known(name, names, purpose="loading a model", label=label)
        return cls(**_checked(values, label))

    @property
    def gpu(self) -> int | None:
        """Index of the CUDA GPU to compute on; ``None``: the CPU."""
        device = self.device or ("cpu" if self.vram is None else "cuda")
        return None if device == "cpu" else int(device.partition(":")[2] or 0)

    @property
    def settings(self) -> CacheSettings:
        """Settings of the system; with ``deterministic``, missing experts are always fetched."""
        settings = parse_settings(self.system)
        return replace(settings, miss="fetch") if self.deterministic else settings

    @property
    def given(self) -> dict[str, Any]:
        """The values that differ from their defaults, by field name."""
        return {
            entry.name: value
            for entry in fields(self)
            if (value := getattr(self, entry.name)) != entry.default
        }


def _checked(values: Mapping[str, Any], label: Label) -> dict[str, Any]:
    """The values in their plain types; raises as :meth:`LoadOptions.parse`."""
    checked = {
        entry.name: None
        if (value := values[entry.name]) is None and entry.default is None
        else entry.metadata["rule"](label(entry.name), value)
        for entry in fields(LoadOptions)
        if entry.name in values
    }
    if checked.get("vram") is not None and checked.get("device") == "cpu":
        raise UsageError(
            f"{label('vram')} needs a GPU, and {label('device')} is cpu",
            hint=f"leave {label('device')} out, or choose cuda; {label('ram')} limits the memory of the "
            "process",
        )
    return checked
