"""The options that commands share, and how they become :class:`moechat.options.LoadOptions`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any

import typer

from moechat.cli.completion.completers import (
    answering,
    complete_activation_bits,
    complete_bits,
    complete_dense_bits,
    complete_devices,
    complete_dtypes,
    complete_systems,
)
from moechat.configurator.systems import SYSTEMS
from moechat.errors import UsageError
from moechat.options import LoadOptions, as_flag

Json = Annotated[bool, typer.Option("--json", metavar="", help="Print the result as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Only the result, and errors.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of every command that loads a model.

    Raises:
        UsageError: A value is out of range, or two options exclude each other.
    """

    bits: Annotated[
        int | None,
        typer.Option(
            metavar="BITS",
            autocompletion=answering(complete_bits),
            help="Bits of an expert weight: 2, 3, 4, 8 or 16 (4 if it has to be converted).",
        ),
    ] = None
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="CPU threads; the physical cores if not given.")
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            autocompletion=answering(complete_dtypes),
            help="Type the dense part computes in: auto, float32, bfloat16 or float16.",
        ),
    ] = LoadOptions.dtype
    dense_bits: Annotated[
        int,
        typer.Option(
            metavar="BITS",
            autocompletion=answering(complete_dense_bits),
            help="Bits of a dense weight: 16 as in the checkpoint; 8 or 4 are smaller, faster, less exact.",
        ),
    ] = LoadOptions.dense_bits
    activation_bits: Annotated[
        int,
        typer.Option(
            metavar="BITS",
            autocompletion=answering(complete_activation_bits),
            help="Inputs of quantised weights: integers of 16 or 8 bits, or 32: float32.",
        ),
    ] = LoadOptions.activation_bits

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
        typer.Option(
            metavar="SIZE",
            help="Memory budget of the whole process, such as 2G or 800M; the available memory if not given. "
            "Experts that do not fit are read from disk when they are needed.",
        ),
    ] = None
    system: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=answering(complete_systems),
            help="How experts are kept and fetched ahead; the answer is the same for all. "
            f"One of: {', '.join(name for name in SYSTEMS if name != 'oracle')}.",
        ),
    ] = LoadOptions.system
    ctx: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", help="Context length; the model's own if not given, or less if memory is short."
        ),
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
    """Options of commands that can use a graphics card."""

    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            autocompletion=answering(complete_devices),
            help="Where to compute: cpu, or cuda (cuda:1) for a graphics card; the card if a budget for it "
            "is given.",
        ),
    ] = None
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Budget of graphics memory for everything, such as 12G; with --device cuda the free memory "
            "if not given. Experts that do not fit are copied there when they are needed.",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            metavar="",
            help="On a graphics card: the same bits at every run; the CPU then computes no experts.",
        ),
    ] = LoadOptions.deterministic
