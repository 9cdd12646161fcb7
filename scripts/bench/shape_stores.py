"""Models of bench scripts: as for ``moechat run``, or a shape with layers and random weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moechat.bench.synthetic_models import cut_shape, synthetic_store
from moechat.hub.known_shapes import shape_names, shape_values


def is_shape(model: str) -> bool:
    """Whether a model is a shape, such as ``olmoe-1b-7b:4``."""
    return model.partition(":")[0] in shape_names()


def model_or_store(model: str, work: Path | None, *, mtp: bool = False) -> str:
    """The model itself, or the store of a shape, which is written below ``work`` if it does not exist.

    Args:
        model: Its name.
        work: Directory of stores of shapes.
        mtp: A shape has a head for multi-token prediction.

    Raises:
        SystemExit: A shape needs ``work``.
    """
    if not is_shape(model):
        return model
    if work is None:
        sys.exit("error: --work is needed for the store of a shape")
    name, _, layers = model.partition(":")
    shape = cut_shape(name, shape_values(name), layers=int(layers) if layers else None)
    # Where the stamps of verified stores go.
    os.environ["MOECHAT_HOME"] = str(work / "home")
    return str(synthetic_store(shape, work / "stores", mtp=mtp).path)
