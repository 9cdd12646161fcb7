"""Where the configuration of a model is; it is read only if the model has to be counted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moechat.errors import CheckpointError
from moechat.hub.known_shapes import shape_bytes
from moechat.store.checkpoint_files import config_bytes


@dataclass(frozen=True)
class ConfigSource:
    """The configuration of a model.

    Attributes:
        digest: SHA-256 of its content, in hexadecimal.
        read: Makes transformers' configuration of it, which imports torch and transformers; raises
            :class:`~moechat.errors.UnsupportedModelError` if it cannot be used.
        shape: Name of the known shape that it is, if it is one.
        is_still: Whether the digest is still that of all that :attr:`read` reads.
    """

    digest: str
    read: Callable[[], Any]
    shape: str | None = None
    is_still: Callable[[], bool] = lambda: True


def known_shape(name: str) -> ConfigSource:
    """The configuration of a known model, one of :func:`moechat.hub.known_shapes.shape_names`.

    Raises:
        UsageError: The name is unknown.
    """

    def read() -> Any:
        from moechat.models.outlining import known_config

        return known_config(name)

    return ConfigSource(hashlib.sha256(shape_bytes(name)).hexdigest(), read, name)


def config_in(path: Path) -> ConfigSource:
    """The configuration in a model's directory, or in a file like a ``config.json``.

    Raises:
        CheckpointError: It is missing, cannot be read, or is no JSON object.
    """

    def read() -> Any:
        from moechat.models.outlining import read_config

        return read_config(path)

    content = config_bytes(path)
    digest = hashlib.sha256(content).hexdigest()
    # transformers reads other files in place of this one if it names some.
    alone = b'"configuration_files"' not in content
    return ConfigSource(digest, read, is_still=lambda: alone and _digest_now(path) == digest)


def _digest_now(path: Path) -> str:
    try:
        return hashlib.sha256(config_bytes(path)).hexdigest()
    except CheckpointError:
        return ""


def read_now(source: ConfigSource) -> ConfigSource:
    """The same, read before its file goes away.

    Raises:
        UnsupportedModelError: As :attr:`ConfigSource.read`.
    """
    config = source.read()
    return replace(source, read=lambda: config)
