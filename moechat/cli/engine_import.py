"""Imports the engine, and with it torch and transformers, as fast as possible."""

from __future__ import annotations

import gc
import importlib


def import_engine() -> None:
    """Import it without searching for garbage among its objects, now and later.

    Nearly all of a million objects stay. Looking through them took a tenth of the time to the first token.
    """
    wanted = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("moechat.engine")
    finally:
        if wanted:
            gc.freeze()
            gc.enable()
