"""Loads the default configuration of model types with each number at its limit, within a limit of memory.

Arguments: model types. Prints how many configurations were tried.
"""

from __future__ import annotations

import copy
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moechat.errors import MoechatError
from moechat.models.skeleton import config_from
from moechat.store.config_limits import LIMITS

MEMORY_BYTES = 512 << 20


def numbers_in(config: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of all numbers, with those of the objects that they are in."""
    for key, value in config.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield (*before, key)
        elif isinstance(value, dict) and key not in ("id2label", "label2id"):
            yield from numbers_in(value, (*before, key))


def try_limits(family: str) -> int:
    """Load them for one model type."""
    base = json.loads(json.dumps(CONFIG_MAPPING[family]().to_dict(), default=str))
    base.pop("id2label", None)
    paths = [*numbers_in(base), ("num_labels",)]
    for path in paths:
        limit = next((each for each in LIMITS if each.keys.fullmatch(path[-1])), None)
        config = copy.deepcopy(base)
        inner = config
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = (1 << 63) - 1 if limit is None else int(limit.most)
        with suppress(MoechatError):
            config_from(config, Path("m"))
    return len(paths)


if __name__ == "__main__":
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    print(sum(map(try_limits, sys.argv[1:])))
