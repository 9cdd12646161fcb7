"""Converts a checkpoint or GGUF file in its own process; kills itself at a chosen change of the file system.

usage: convert_child.py SOURCE DESTINATION BITS [--kill-at N] [--count] [--limit BYTES] [--slow SECONDS]
    [--memory]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from store_support import mixtral_plan

from moechat.errors import MoechatError
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.expert_refs import CheckpointPlan

CHANGES = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")


def arm(kill_at: int) -> list[str]:
    """Log calls that change the file system, and die before the ``kill_at``-th; a write dies half done."""
    log: list[str] = []

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            log.append(name)
            if len(log) == kill_at:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in CHANGES:
        wrap(name)
    return log


def memory_bytes(*fields: str) -> int:
    """Sum of fields of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return sum(int(values[field].split()[0]) * 1024 for field in fields)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("bits", type=int)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    if options.source.suffix == ".gguf":
        from moechat.models.checkpoint_mapping import plan_checkpoint
        from moechat.models.gguf_source import opened_gguf

        with opened_gguf(options.source) as checkpoint:
            work(checkpoint, plan_checkpoint(checkpoint), options)
    else:
        checkpoint = Checkpoint.open(options.source)
        work(checkpoint, mixtral_plan(checkpoint), options)


def work(checkpoint: Checkpoint, plan: CheckpointPlan, options: argparse.Namespace) -> None:
    stages: dict[str, int] = {}
    start = {"beyond": memory_bytes("RssAnon", "RssShmem"), "peak": memory_bytes("VmHWM")}
    most = dict(start)
    if options.limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.limit, options.limit))

    def progress(event: ConvertProgress) -> None:
        stages[event.stage] = stages.get(event.stage, 0) + 1
        if options.memory:
            most["beyond"] = max(most["beyond"], memory_bytes("RssAnon", "RssShmem"))
            most["peak"] = memory_bytes("VmHWM")
        if options.slow and event.stage == "experts":
            print("working", flush=True)
            time.sleep(options.slow)

    changes = arm(options.kill_at) if options.kill_at or options.count else []
    report: dict[str, Any] = {"stages": stages}
    try:
        convert(checkpoint, plan, options.destination, bits=options.bits, source_name="x", progress=progress)
    except MoechatError as error:
        report |= {"error": type(error).__name__, "message": str(error), "hint": error.hint}
    report["changes"] = list(changes)
    if options.memory:
        report |= {name: most[name] - start[name] for name in most}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
