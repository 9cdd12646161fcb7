"""Transcript of a disk that is too small and of one that becomes full, on a real file system."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from local_hub import REPOSITORY, Faults, Requests, hub_with_model
from stage import Skipped, Stage

_COMMAND = f"moechat download {REPOSITORY}"


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has a file system of this size where nobody else sees it.

    Raises:
        Skipped: The system does not allow it.
    """
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        raise Skipped("unshare and nsenter (util-linux) are not here")
    place.mkdir(parents=True)
    script = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && echo ready && exec cat'
    holder = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash", size, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "ready\n":
            raise Skipped(
                f"this system allows no file system of its own here: {holder.stderr.read().strip()}"
            )
        yield holder
    finally:
        holder.communicate()


def disk(stage: Stage) -> None:
    """A disk that is too small, then one that becomes full in the middle."""
    with small_disk(stage.home / "disk", "2m") as holder, hub_with_model(stage) as (hub, stage):
        within = ["nsenter", "-t", str(holder.pid), "--user", "--preserve-credentials", "--mount"]
        stage = replace(
            stage, within=within, extra={**stage.extra, "MOECHAT_HOME": str(stage.home / "disk/moechat")}
        )
        record, requests = stage.record, Requests(hub, stage)
        room = "df -k --output=size,avail ~/disk"
        record.say("a file system of 2 MiB; MOECHAT_HOME is ~/disk/moechat, the model takes more")
        stage.command(room)
        stage.command(_COMMAND, "needs 3.4", "are free", "hint: free", status=4)
        requests.show()
        record.check(requests.sent == 0, "it is refused before the first shard")

        record.say("large enough now, but another program fills it during the download")
        stage.command(f"mount -o remount,size=6m ~/disk && {room}")
        filled = threading.Event()

        def fill() -> None:
            _fill(Path(f"/proc/{holder.pid}/root{stage.home}/disk/filler"))
            filled.set()

        hub.faults = Faults(pace_s=0.02, reached=900_000, at_reached=fill)
        stage.command(_COMMAND, "error:", "hint:", status=4, note="~/disk/filler grows meanwhile")
        record.check(filled.is_set(), "the disk was filled while it ran")
        hub.faults = Faults()
        requests.show()
        stage.command(f"{room}; ls -s --block-size=K ~/disk/filler")
        before = requests.sent

        record.say("freed again, and the same command goes on")
        stage.command("rm ~/disk/filler")
        stage.command(_COMMAND, "are done", "is here after ")
        requests.show()
        record.check(before > 0 and requests.continued > 0, "it goes on in the middle of a shard")
        stage.command("moechat list", REPOSITORY)
        stage.command(room)


def _fill(path: Path) -> None:
    """Write until there is no room left."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
