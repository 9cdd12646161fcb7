"""Stores whose files and manifest were changed on purpose, and fit each other again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def seal(store: Path, content: dict[str, Any] | None = None) -> None:
    """Write the manifest with sizes and hashes of the present files, and a checksum that fits.

    Args:
        store: The directory.
        content: Of the manifest, its files as they are there; ``None``: the present one, files anew.
    """
    if content is None:
        content = json.loads((store / MANIFEST).read_bytes())
        for name, entry in content["files"].items():
            data = (store / name).read_bytes()
            entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    rest = {name: value for name, value in content.items() if name != "checksum"}
    spelled = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    content["checksum"] = hashlib.sha256(spelled).hexdigest()
    (store / MANIFEST).write_text(json.dumps(content))
