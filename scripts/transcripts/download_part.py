"""Transcript of a download that is interrupted, killed and cut, and goes on each time."""

from __future__ import annotations

import signal
import subprocess
import threading

from local_hub import REPOSITORY, Faults, Requests, hub_with_model, shard_bytes
from stage import Stage

_COMMAND = f"moechat download {REPOSITORY}"
_PACE_S = 0.04  # a piece of 16 KiB: slow enough to be stopped in time


def download(stage: Stage) -> None:
    """A model comes from the hub: interrupted, killed, cut three times, finished, used, removed."""
    with hub_with_model(stage) as (hub, stage):
        record, requests = stage.record, Requests(hub, stage)
        stage.command(f"{_COMMAND} --dry-run", "download  2.2 MiB", "disk", "memory", "time")
        requests.show()
        record.check(requests.sent == 0, "a dry run asks for no shard")

        record.say("Ctrl-C on a terminal in the middle of a shard (the hub is slow here)")
        reached = threading.Event()
        hub.faults = Faults(pace_s=_PACE_S, reached=700_000, at_reached=reached.set)
        with stage.terminal(*_COMMAND.split()) as terminal:
            terminal.until(reached.is_set)
            stage.seen(terminal, "while it downloads")
            stage.left(terminal, "\x03", "Ctrl-C", status=130)
            stage.seen(terminal, "after it")
            record.check("━" not in terminal.shown, "the bar is gone after Ctrl-C")
        hub.faults = Faults()
        requests.show()

        record.say("the same again, killed in the middle of a shard")
        running: list[subprocess.Popen[bytes]] = []
        hub.faults = Faults(pace_s=_PACE_S, reached=300_000, at_reached=lambda: running[0].kill())
        running.append(stage.start(f"exec {_COMMAND}"))
        stage.ended(
            _COMMAND, running[0], "are done", status=-signal.SIGKILL, note="kill -9 after 300,000 bytes"
        )
        hub.faults = Faults()
        requests.show()
        stage.command("moechat list", "unfinished")

        record.say("the same again; the hub cuts the connection three times, each after 90,000 bytes")
        hub.faults = Faults(cuts=3, cut_after=90_000)
        done = stage.command(_COMMAND, "are done", "is here after ")
        record.check(done.err.count("trying again") == 3, "each of the three cuts is said")
        requests.show()
        whole = shard_bytes(hub)
        record.show(
            f"\nall shards have {whole:,} bytes; sent were {requests.sent:,}, "
            f"{requests.sent / whole:.2f} times as many;\n"
            f"{requests.continued} requests began in the middle of a shard"
        )
        record.check(requests.continued >= 4, "at least four requests go on in the middle of a shard")
        record.check(requests.sent < 1.3 * whole, "what had arrived is not fetched again")

        record.say("in the library now; what a model of random weights says is random")
        stage.command("moechat list", REPOSITORY, "4")
        stage.command(f"moechat show {REPOSITORY}", "qwen3_moe", "apache-2.0")
        stage.command(
            f"moechat run {REPOSITORY} hello --temperature 0 --max-tokens 12 --json | cut -c 1-150", '"text"'
        )
        stage.command(f"moechat rm {REPOSITORY} --yes", REPOSITORY)
        gone = stage.command("moechat list", "the library is empty")
        record.check("unfinished" not in gone.text, "nothing unfinished is left")
