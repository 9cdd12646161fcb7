"""Imports the engine, and with it torch and transformers, as fast as possible."""

from __future__ import annotations

import gc
import importlib


def import_engine() -> None:
    """Import it without searching for garbage among its objects, now and later.

    Four searches remained with the threshold of the command line, and took 0.2 s.
    """
    wanted = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("moechat.engine")
    finally:
        if wanted:
            gc.freeze()
            gc.enable()
