"""Identifiers in answers."""

from __future__ import annotations

import secrets

from moechat import __version__

FINGERPRINT = f"moechat-{__version__}"


def new_id(kind: str) -> str:
    """A new identifier: ``chatcmpl-…``."""
    return f"{kind}-{secrets.token_hex(12)}"
