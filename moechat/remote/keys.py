"""Keys for other engines: from the environment, or from the system's keyring. They are never shown."""

from __future__ import annotations

import os
from contextlib import suppress

from moechat.errors import UsageError

VARIABLE = "MOECHAT_API_KEY"
_SERVICE = "moechat"


def api_key(host: str, variable: str = "") -> str:
    """The key for a host; empty if there is none.

    Args:
        host: Name and port, as in the URL; the name of the keyring's entry.
        variable: The variable for this server; empty: :data:`VARIABLE`, which is for any server.

    Raises:
        UsageError: The variable or the entry holds something that cannot be a key.
    """
    name = variable or VARIABLE
    key, place = os.environ.get(name, "").strip(), name
    if not key:
        key, place = _from_keyring(host).strip(), f"the keyring's entry for {host}"
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"{place} holds no key: it has white space or other characters than ASCII")
    return key


def _from_keyring(host: str) -> str:
    """From the package ``keyring``, if it is installed: ``keyring set moechat HOST``."""
    with suppress(Exception):  # it is a convenience; its back ends fail in many ways
        import keyring  # type: ignore[import-not-found, unused-ignore]

        return keyring.get_password(_SERVICE, host) or ""
    return ""
