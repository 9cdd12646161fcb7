"""The options that commands share, and how they become :class:`moechat.options.LoadOptions`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any

from moechat.cli.completion.completers import (
    complete_activation_bits,
    complete_bits,
    complete_dense_bits,
    complete_devices,
    complete_dtypes,
    complete_kv_bits,
    complete_systems,
)
from moechat.cli.parameters import flag, option
from moechat.configurator.systems import SYSTEMS
from moechat.errors import UsageError
from moechat.options import LoadOptions, as_flag


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of every command that loads a model.

    Raises:
        UsageError: A value is out of range, or two options exclude each other.
    """

    bits: Annotated[
        int | None,
        option(
            "BITS",
            "Bits of an expert weight: 2, 3, 4, 6, 8 or 16 (4 if it has to be converted).",
            complete_bits,
        ),
    ] = None
    threads: Annotated[int | None, option("N", "CPU threads; the physical cores if not given.")] = None
    dtype: Annotated[
        str,
        option(
            "TYPE", "Type the dense part computes in: auto, float32, bfloat16 or float16.", complete_dtypes
        ),
    ] = LoadOptions.dtype
    dense_bits: Annotated[
        str,
        option(
            "BITS",
            "Bits of a dense weight: auto, 16 as in the checkpoint, or 8, 6 or 4, smaller and faster.",
            complete_dense_bits,
        ),
    ] = str(LoadOptions.dense_bits)
    activation_bits: Annotated[
        int,
        option(
            "BITS",
            "Inputs of quantised weights: integers of 16 or 8 bits, or 32: float32.",
            complete_activation_bits,
        ),
    ] = LoadOptions.activation_bits
    kv_bits: Annotated[
        int,
        option(
            "BITS",
            "Bits of a key or value in the attention cache: 16 as the model computes them, or 8: half the "
            "memory and faster at long contexts.",
            complete_kv_bits,
        ),
    ] = LoadOptions.kv_bits

    def __post_init__(self) -> None:
        self.load_options  # noqa: B018 - parses and checks them

    @cached_property
    def shared(self) -> dict[str, Any]:
        """The values of this module's options, as they were given."""
        groups = (group for group in type(self).__mro__ if group.__module__ == __name__)
        return {entry.name: getattr(self, entry.name) for entry in fields(next(groups))}

    @cached_property
    def load_options(self) -> LoadOptions:
        """The options, parsed and checked."""
        return LoadOptions.parse(self.shared, as_flag)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(ModelOptions):
    """Options of commands that load a model within a budget of memory."""

    ram: Annotated[
        str | None,
        option(
            "SIZE",
            "Memory budget of the whole process, such as 2G or 800M; the available memory if not given. "
            "Experts that do not fit are read from disk when they are needed.",
        ),
    ] = None
    system: Annotated[
        str,
        option(
            "NAME",
            "How experts are kept and fetched ahead; the answer is the same for all. "
            f"One of: {', '.join(name for name in SYSTEMS if name != 'oracle')}.",
            complete_systems,
        ),
    ] = LoadOptions.system
    ctx: Annotated[
        int | None,
        option("TOKENS", "Context length; the model's own if not given, or less if memory is short."),
    ] = None

    def require_causal_system(self) -> None:
        """Refuse a system that needs to know the routing of later tokens.

        Raises:
            UsageError: It does.
        """
        if self.load_options.settings.needs_future:
            raise UsageError(
                f"--system is {self.system}, which needs the routing of later tokens",
                hint="`moechat simulate` and `moechat bench --routing` replay a recorded trace",
            )


@dataclass(frozen=True, kw_only=True)
class PlaceOptions(MemoryOptions):
    """Options of commands that can use a GPU."""

    device: Annotated[
        str | None,
        option(
            "DEVICE",
            "Where to compute: cpu, or cuda (cuda:1) for a GPU; the GPU if a budget for it is given.",
            complete_devices,
        ),
    ] = None
    vram: Annotated[
        str | None,
        option(
            "SIZE",
            "Budget of graphics memory for everything, such as 12G; with --device cuda the free memory "
            "if not given. Experts that do not fit are copied there when they are needed.",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        flag(
            "On a GPU: the same bits at every run; the CPU then computes no experts.",
            "--deterministic",
        ),
    ] = LoadOptions.deterministic


@dataclass(frozen=True, kw_only=True)
class ServingOptions(PlaceOptions):
    """Options of commands about several conversations at a time."""

    conversations: Annotated[
        int,
        option(
            "N",
            "Attention caches of a whole context that the memory budget holds: those of answers under way, "
            "and those of conversations that may go on. On the CPU shorter ones share their memory.",
        ),
    ] = LoadOptions.conversations
