"""The outlines of known shapes that come with the package, for the usual options.

``scripts/outline_shapes`` writes them; a test compares them with models that are counted.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources, util
from pathlib import Path
from typing import Any

from moechat.outline.kept_outlines import OutlineRequest
from moechat.outline.plain_values import from_plain
from moechat.sizes.model_outline import ModelOutline


def packaged_requests(digest: str) -> list[OutlineRequest]:
    """What the package has outlines for: the usual options, on a CPU and on a GPU, old or new.

    Args:
        digest: Of the configuration.
    """
    return [
        OutlineRequest(digest, dtype, on_gpu=on_gpu)
        for on_gpu, dtypes in ((False, ("float32", "bfloat16")), (True, ("bfloat16", "float16")))
        for dtype in dtypes
    ]


def packaged_outline(shape: str, request: OutlineRequest) -> ModelOutline | None:
    """The outline of a known shape; ``None`` if the package has none for this request, or the installed
    transformers does not have its family.
    """
    wanted = asdict(request)
    for entry in packaged_entries(shape):
        if entry["request"] == wanted:
            outline: ModelOutline = from_plain(ModelOutline, entry["outline"])
            return outline if _has_family(outline.model_type) else None
    return None


def packaged_entries(shape: str) -> list[dict[str, Any]]:
    """Requests and outlines of a known shape, as JSON values; none if it has no file."""
    file = resources.files("moechat.outline") / "known" / f"{shape}.json"
    try:
        entries: list[dict[str, Any]] = json.loads(file.read_bytes())
    except OSError:
        return []
    return entries


def _has_family(model_type: str) -> bool:
    """Whether the installed transformers has a family; importing it to ask would take seconds."""
    spec = util.find_spec("transformers")
    places = None if spec is None else spec.submodule_search_locations
    # The text part of a model that also takes pictures has its code beside the whole.
    family = model_type.removesuffix("_text")
    return any((Path(place) / "models" / family).is_dir() for place in places or ())
