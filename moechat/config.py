"""User directories, environment variables, and the syntax of sizes.

Directories come from ``platformdirs``; ``MOECHAT_HOME`` moves all of them below one directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from moechat.errors import UsageError

HOME_VARIABLE = "MOECHAT_HOME"
GRAPHS_VARIABLE = "MOECHAT_CUDA_GRAPHS"
RUN_AHEAD_VARIABLE = "MOECHAT_RUN_AHEAD"
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE | re.ASCII)
_EXPONENT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
# File offsets are signed 64-bit integers, so no budget can be larger.
_MOST_BYTES = (1 << 63) - 1


@dataclass(frozen=True)
class Paths:
    """The user's directories; each is created by the first write.

    Attributes:
        data: Model library and measured hardware profiles: large, worth keeping.
        state: Verification stamps, routing statistics, histories: small, grows with use.
        cache: Files that can be regenerated at any time.
        config: Settings.
    """

    data: Path
    state: Path
    cache: Path
    config: Path

    @property
    def models(self) -> Path:
        """The library: one directory per block store."""
        return self.data / "models"

    @property
    def sources(self) -> Path:
        """Shards of unfinished downloads, and checkpoints kept on request."""
        return self.data / "sources"


def user_paths(environment: Mapping[str, str] | None = None) -> Paths:
    """Find the directories of this user.

    Args:
        environment: Environment variables; ``None`` takes those of the process.

    Raises:
        UsageError: ``MOECHAT_HOME`` is not a directory, or names the home of an unknown user.
    """
    home = (os.environ if environment is None else environment).get(HOME_VARIABLE, "")
    if home:
        try:
            base = Path(home).expanduser().absolute()
        except RuntimeError as error:
            raise UsageError(
                f"{HOME_VARIABLE} is {home}, and that user has no home directory",
                hint="set it to a directory, or unset it",
            ) from error
        if base.exists() and not base.is_dir():
            raise UsageError(
                f"{HOME_VARIABLE} is {base}, which is not a directory",
                hint="set it to a directory, or unset it",
            )
        return Paths(data=base / "data", state=base / "state", cache=base / "cache", config=base / "config")
    import platformdirs  # imported late: it adds several milliseconds to every start

    directories = platformdirs.PlatformDirs("moechat", appauthor=False)
    return Paths(
        data=directories.user_data_path,
        state=directories.user_state_path,
        cache=directories.user_cache_path,
        config=directories.user_config_path,
    )


# Device names, for a full match; the group is the GPU's index.
DEVICE = r"cpu|cuda(?::([0-9]+))?"


def cuda_graphs_wanted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether CUDA graphs may be used; ``MOECHAT_CUDA_GRAPHS=0`` disables them.

    Args:
        environment: Environment variables; ``None`` takes those of the process.
    """
    return (os.environ if environment is None else environment).get(GRAPHS_VARIABLE, "") != "0"


def run_ahead_wanted(environment: Mapping[str, str] | None = None) -> bool | None:
    """Whether a GPU looks up the experts of decoded tokens by itself, so that it need not wait for the host.

    Args:
        environment: Environment variables; ``None`` takes those of the process.

    Returns:
        ``None``, the default: where every block of every expert has a page, so that a token is two graphs.
        ``True`` with ``MOECHAT_RUN_AHEAD=1``: also where a block may be missing. ``False`` with
        ``MOECHAT_RUN_AHEAD=0``: never.
    """
    value = (os.environ if environment is None else environment).get(RUN_AHEAD_VARIABLE, "")
    return {"0": False, "1": True}.get(value)


def parse_size(text: str) -> int:
    """Parse a size such as ``12G``, ``1.5GiB``, ``800 MB`` or ``4096``; the letters are powers of 1024.

    Args:
        text: A decimal number and optionally K, M, G or T, then optionally ``B`` or ``iB``, in either case.

    Returns:
        Whole bytes, rounded down; exact for any number of decimals.

    Raises:
        UsageError: ``text`` is not a size, or larger than 2⁶³ - 1 bytes.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="write a number and K, M, G or T, as in 12G or 1.5G")
    number, unit = match.groups()
    # Integers, because Decimal arithmetic rounds to 28 digits and a size may have more.
    numerator, denominator = Decimal(number).as_integer_ratio()
    size = (numerator << _EXPONENT[unit.upper()]) // denominator
    if size > _MOST_BYTES:
        raise UsageError(
            f"{text.strip()} is larger than any memory",
            hint="write a number and K, M, G or T, as in 12G or 1.5G",
        )
    return size


def active_isa() -> str:
    """Instruction set of the native kernels: ``MOECHAT_ISA`` if set, else the best of this processor.

    Raises:
        UsageError: ``MOECHAT_ISA`` is unknown or not supported by this processor.
    """
    from moechat import _native  # imported late: commands that need no kernels start without it

    try:
        return _native.active_isa()
    except RuntimeError as error:
        raise UsageError(str(error), hint="unset MOECHAT_ISA to use the best of these") from None
