"""Silences transformers' warnings about kernels and training, which a user of moechat cannot act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR

from transformers.utils import logging


def no_more_warnings() -> None:
    """Silence transformers' warnings for the rest of the process."""
    logging.set_verbosity(ERROR)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence transformers' warnings about configuration values and kernels, which are irrelevant here."""
    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
