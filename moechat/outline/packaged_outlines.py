"""The outlines of known shapes that come with the package, for the usual options.

They hold for the versions of torch and transformers that they were counted with: with others, the code of a
family may keep other activations alive. ``scripts/outline_shapes`` writes them; a test compares them with
models that are counted.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from moechat.outline.kept_outlines import OutlineRequest, library_versions
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
    """The outline of a known shape; ``None`` if the package has none for this request and these versions."""
    content = packaged_file(shape)
    if content.get("counted_with") != counted_with():
        return None
    wanted = asdict(request)
    for entry in content["outlines"]:
        if entry["request"] == wanted:
            outline: ModelOutline = from_plain(ModelOutline, entry["outline"])
            return outline
    return None


def packaged_file(shape: str) -> dict[str, Any]:
    """What the package has for a known shape, as JSON values; empty if it has no file."""
    file = resources.files("moechat.outline") / "known" / f"{shape}.json"
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except OSError:
        return {}
    return content


def counted_with() -> dict[str, str]:
    """Major and minor versions of the libraries that a model is counted with."""
    return {name: ".".join(version.split(".")[:2]) for name, version in library_versions().items()}
