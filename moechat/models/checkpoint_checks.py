"""Checks that configuration and tensors of a checkpoint belong together; errors name file and tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from moechat.errors import CheckpointError, MoechatError, UsageError
from moechat.store.checkpoint import Checkpoint
from moechat.store.checkpoint_files import CONFIG_FILE

_LAYER = re.compile(r"(?P<before>(?:.*?\.)?layers)\.(?P<layer>\d+)\.(?P<name>.+)")


@contextmanager
def about_config(checkpoint: Checkpoint) -> Iterator[None]:
    """Name the configuration file in errors of the block.

    Raises:
        CheckpointError: Instead of a ``UsageError``: here the user has given no sizes.
    """
    where = str(checkpoint.path / CONFIG_FILE)
    try:
        yield
    except UsageError as error:
        raise CheckpointError(f"{where}: {error}", hint=error.hint) from error
    except MoechatError as error:
        if str(checkpoint.path) not in str(error):
            error.args = (f"{where}: {error}", *error.args[1:])
        raise


def require_each_expert(checkpoint: Checkpoint, pattern: str, keys: Sequence[str], count: int) -> None:
    """Check that there is one tensor for each expert.

    Args:
        checkpoint: Has the tensors.
        pattern: Of their names, for messages.
        keys: Their names, in the order of their numbers.
        count: Experts of the layer.

    Raises:
        CheckpointError: One is missing, or belongs to an expert that the configuration does not have.
    """
    numbers = [_last_number(key) for key in keys]
    if len(keys) == count and numbers in (list(range(count)), [None] * count):
        return
    if None in numbers:
        raise CheckpointError(
            f"{checkpoint.title} has {len(keys)} tensors like {pattern!r}, "
            f"{checkpoint.path / CONFIG_FILE} says {count} experts"
        )
    for place, (key, number) in enumerate(zip(keys, numbers, strict=True)):
        if number in numbers[:place]:
            raise CheckpointError(f"{checkpoint.place(key)} is the second one of expert {number}")
    missing = sorted(set(range(count)) - set(numbers))
    if missing:
        first = _with_last_number(keys[0], missing[0]) if keys else pattern
        raise CheckpointError(
            f"{checkpoint.title} lacks {len(missing)} of {count} tensors like {pattern!r}, first {first!r}"
        )
    surplus = next(key for key, number in zip(keys, numbers, strict=True) if number not in range(count))
    raise CheckpointError(
        f"{checkpoint.place(surplus)} belongs to expert {_last_number(surplus)} (from 0), "
        f"{checkpoint.path / CONFIG_FILE} says {count} experts"
    )


def require_no_further_layers(
    checkpoint: Checkpoint, used: Iterable[str], unused: Iterable[str], depth: int
) -> None:
    """Check that the configuration has all layers whose tensors are in the checkpoint.

    Args:
        checkpoint: The checkpoint.
        used: Tensors that become parameters of the decoder's layers.
        unused: Tensors that become none.
        depth: Layers of the configuration.

    Raises:
        CheckpointError: It has fewer: a further layer has the same tensors as those that are used. Layers
            that only predict further tokens have others too, and are left out.
    """
    known: dict[str, set[str]] = {}
    for match in filter(None, map(_LAYER.fullmatch, used)):
        known.setdefault(match["before"], set()).add(_any_number(match["name"]))
    further: dict[int, list[re.Match[str]]] = {}
    for match in filter(None, map(_LAYER.fullmatch, unused)):
        if match["before"] in known and int(match["layer"]) >= depth:
            further.setdefault(int(match["layer"]), []).append(match)
    for number, tensors in sorted(further.items()):
        if all(_any_number(match["name"]) in known[match["before"]] for match in tensors):
            raise CheckpointError(
                f"{checkpoint.place(tensors[0][0])} belongs to layer {number} (from 0), "
                f"{checkpoint.path / CONFIG_FILE} says {depth} layers"
            )


def _any_number(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _last_number(key: str) -> int | None:
    """The last dotted part of a name that is a number: that of the expert."""
    return next((int(part) for part in reversed(key.split(".")) if part.isdecimal()), None)


def _with_last_number(key: str, number: int) -> str:
    parts = key.split(".")
    place = max((index for index, part in enumerate(parts) if part.isdecimal()), default=None)
    if place is not None:
        parts[place] = str(number)
    return ".".join(parts)
