"""The hub of the tests with a tiny real model, and what it was asked for."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hub_checkpoint import write_hub_checkpoint
from hub_server import REPOSITORY, Faults, Hub
from stage import Stage

__all__ = ["REPOSITORY", "Faults", "Hub", "Requests", "hub_with_model", "shard_bytes"]


@contextmanager
def hub_with_model(stage: Stage) -> Iterator[tuple[Hub, Stage]]:
    """A hub that serves the model, and a stage that is connected to it."""
    with tempfile.TemporaryDirectory(prefix="mt-hub-") as place, Hub().running() as hub:
        checkpoint = Path(place) / "moe-chat"
        with _quiet():
            write_hub_checkpoint(checkpoint)
        hub.add(REPOSITORY, checkpoint)
        stage.record.masks[hub.endpoint] = "$HUB"
        yield hub, replace(stage, extra={**stage.extra, **_connected(hub)})


def _connected(hub: Hub) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "",
        "NO_PROXY": "127.0.0.1",
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars of libraries."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield


def shard_bytes(hub: Hub) -> int:
    """Size of all shards."""
    files = hub.repositories[REPOSITORY]
    return sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))


class Requests:
    """Shows what the hub was asked for since the last time.

    Attributes:
        sent: Bytes of bodies of shards that were sent in all, those of their headers apart.
        continued: Requests that began in the middle of a shard.
    """

    def __init__(self, hub: Hub, stage: Stage) -> None:
        self._hub, self._stage = hub, stage
        self._seen = 0
        self.sent = self.continued = 0

    def show(self) -> None:
        time.sleep(0.3)  # a request is noted when its end is noticed
        new = self._hub.requests[self._seen :]
        self._seen += len(new)
        shown = [request for request in new if _is_body(request.path, request.range)]
        lines = ["", f"{'the hub was asked for':42}{'from byte':>12}{'bytes sent':>12}"]
        for request in shown:
            begin = int(request.range.removeprefix("bytes=").partition("-")[0] or 0) if request.range else 0
            self.sent += request.sent
            self.continued += begin > 0
            lines.append(f"{request.path.rpartition('/')[2]:42}{begin:>12,}{request.sent:>12,}")
        others = [request for request in new if request not in shown]
        if others:
            rest = f"{len(others)} others: model, configuration, headers of shards"
            lines.append(f"{rest:54}{sum(request.sent for request in others):>12,}")
        self._stage.record.show("\n".join(lines))


def _is_body(path: str, asked: str) -> bool:
    """Whether it is a shard from somewhere to its end; headers are asked for with their end."""
    return path.startswith("/cdn/") and (not asked or asked.endswith("-"))
