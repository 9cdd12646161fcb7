"""``moechat tune``: fine-tunes a model for few experts a sequence."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moechat.cli.commands.tune_arguments import TuneCommand
from moechat.cli.terminal.consoles import print_notice, require_output, write_output
from moechat.cli.terminal.load_progress import LoadProgress, format_seconds
from moechat.cli.terminal.tune_progress import TuneProgress
from moechat.errors import UsageError
from moechat.hub.names import resolve

if TYPE_CHECKING:
    from moechat.tune.measure import Measurement
    from moechat.tune.run import TuneResult


def tune(command: TuneCommand) -> int:
    """Run the command; returns the exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    ref = resolve(command.model)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", ref.name).strip("-.") or "model"
    out = (command.out or Path(f"{name}-tuned")).absolute()
    if not command.data.is_file():  # before seconds of imports
        raise UsageError(f"there is no file {command.data}", hint="--data takes a file of JSON lines")
    require_output()
    from moechat.tune.run import TuneJob, is_main_process, require_extra
    from moechat.tune.run import tune as tune_model

    require_extra()
    quiet = command.quiet or not is_main_process()
    job = TuneJob(
        ref,
        command.data,
        out,
        command.settings(),
        micro_batch=command.micro_batch,
        cpu=command.cpu,
        save_every_s=command.save_every,
    )
    with LoadProgress(quiet=quiet) as loading, TuneProgress(loading.stop, quiet=quiet) as progress:
        result = tune_model(job, loading, progress)
    if not result.is_main:
        return 0
    write_output(sys.stdout, json.dumps(result.facts()) + "\n" if command.json else render(result))
    if not quiet:
        print_notice(f"moechat run {shlex.quote(str(out))} talks to it")
    return 0


def render(result: TuneResult) -> str:
    """The result as lines for people."""
    lines = [
        f"{result.out}: {result.model} tuned on {result.trained:,} sequences in "
        f"{format_seconds(result.seconds)}"
    ]
    if result.before is not None and result.after is not None:
        lines.append(f"on {result.held_out:,} held-out sequences:")
        lines += [
            f"  {title:<44} {before:>8.3f} -> {after:<8.3f} {_change(before, after)}".rstrip()
            for title, before, after in _rows(result.before, result.after)
        ]
    if result.covered is not None:
        lines.append(
            f"answers' choices among the C experts ranked first by the prompt: {result.covered:.1%}, "
            f"by popularity: {result.covered_by_popularity:.1%}"
        )
    return "\n".join(lines) + "\n"


def _rows(before: Measurement, after: Measurement) -> list[tuple[str, float, float]]:
    misses = [
        (f"misses a token and layer, {capacity} experts cached", missed, after.misses[capacity])
        for capacity, missed in before.misses.items()
    ]
    return [
        ("perplexity", before.perplexity, after.perplexity),
        *misses,
        ("entropy of experts in a sequence, bits", before.sequence_entropy, after.sequence_entropy),
        ("entropy of experts in all, bits", before.global_entropy, after.global_entropy),
    ]


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""
