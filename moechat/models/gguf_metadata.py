"""Checked access to the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.gguf_header import GgufHeader
from moechat.store.gguf_tables import Tables

EMBEDDING = "token_embd.weight"  # [words, hidden]
VOCABULARY = "tokenizer.ggml.tokens"  # the metadata that has it


class Metadata:
    """Values of one file; remembers which of the architecture's were read.

    Attributes:
        header: The file's header.
        where: Name of the file, for messages.
        used: Keys read so far, without the architecture's name.
    """

    def __init__(
        self, header: GgufHeader, architecture: str, where: str, tables: Tables | None = None
    ) -> None:
        self.header = header
        self.where = where
        self.used: set[str] = set()
        self._values = header.metadata
        self._architecture = architecture
        self._tables = tables or {}

    def number(self, key: str, default: float | None = None) -> Any:
        """A positive, finite number of the architecture.

        Raises:
            CheckpointError: It is missing without a default, or not such a number.
        """
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._expected(key, value, "a positive number")
        return without_float32_rounding(value)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of the architecture, at least 0.

        Raises:
            CheckpointError: It is missing without a default, or not such a number.
        """
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._expected(key, value, "a whole number, at least 0")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of the architecture, at least 1.

        Raises:
            CheckpointError: It is missing without a default, or not such a number.
        """
        value = self.count(key, default)
        if value < 1:
            raise self._expected(key, value, "a whole number, at least 1")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value of the architecture.

        Raises:
            CheckpointError: It is another value.
        """
        value = self._read(key, default)
        if not isinstance(value, bool):
            raise self._expected(key, value, "true or false")
        return value

    def counts(self, key: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """Whole numbers for each layer, from an array or from one number for all.

        Raises:
            CheckpointError: It is missing without a default, has too few elements, or others.
        """
        value = self._read(key, default)
        values = value if isinstance(value, tuple) else (value,) * layers
        if len(values) < layers or not all(
            isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in values
        ):
            raise self._expected(key, value, f"a whole number or {layers} of them")
        return values[:layers]

    def flags(self, key: str, layers: int) -> tuple[bool, ...] | None:
        """Truth values for each layer, or ``None`` if the file has none.

        Raises:
            CheckpointError: It has too few of them, or other values.
        """
        value = self._read(key, None)
        if value is None:
            return None
        if not isinstance(value, tuple) or len(value) < layers:
            raise self._expected(key, value, f"{layers} truth values")
        return tuple(bool(each) for each in value[:layers])

    def get(self, key: str) -> Any:
        """A value of the architecture, or ``None``."""
        return self._read(key, None)

    def table(self, name: str) -> tuple[float, ...] | None:
        """Factors of rotary frequencies, by the name of their tensor; ``None`` without it.

        Raises:
            CheckpointError: It is no list of float32, or they are not positive.
        """
        if name not in self.header.tensors:
            return None
        if name not in self._tables:
            raise CheckpointError(f"{self.where}: {name} is no list of numbers in F32")
        factors = self._tables[name]
        if not all(0 < each < math.inf for each in factors):
            raise CheckpointError(f"{self.where}: {name} has factors that are not positive numbers")
        return factors

    def names(self, prefix: str) -> list[str]:
        """Keys of the architecture's values that begin with ``prefix``."""
        whole = f"{self._architecture}.{prefix}"
        return [key.removeprefix(f"{self._architecture}.") for key in self._values if key.startswith(whole)]

    def token(self, key: str) -> int | None:
        """Id of a special token; ``None`` if missing or invalid, also if it has no row in the embedding."""
        value = self._values.get(f"tokenizer.ggml.{key}")
        embedding = self.header.tensors.get(EMBEDDING)
        valid = type(value) is int and embedding is not None and 0 <= value < embedding.shape[0]
        return value if valid else None

    def plain(self, key: str) -> Any:
        """A value by its full key."""
        return self._values.get(key)

    def refused(self, key: str) -> UnsupportedModelError:
        """The error for a value that moechat would compute differently."""
        return UnsupportedModelError(
            f"{self.where}: {key[:200]} is {quoted(self.get(key))}, which moechat does not compute"
        )

    def _read(self, key: str, default: Any) -> Any:
        self.used.add(key)
        return self._values.get(f"{self._architecture}.{key}", default)

    def _expected(self, key: str, value: Any, wanted: str) -> CheckpointError:
        name = f"{self._architecture}.{key}"
        found = f" lacks {name}" if value is None else f": {name} is {quoted(value)}"
        return CheckpointError(f"{self.where}{found}; {wanted} is expected")


def without_float32_rounding(value: int | float) -> int | float:
    """The shortest decimal number with the same float32 value: 0.6, not 0.60000002."""
    return (
        float(np.format_float_positional(np.float32(value), unique=True))
        if isinstance(value, float)
        else value
    )


def quoted(value: Any) -> str:
    """A value for a message, at most 80 characters long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
