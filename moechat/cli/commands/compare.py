"""``moechat compare``: all systems on one model, a picture of their times, and which to use."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from moechat.cli.commands.bench import keep_result, prompt_of
from moechat.cli.commands.compare_arguments import CompareCommand
from moechat.cli.output_file import require_writable
from moechat.cli.terminal.consoles import print_notice, require_output, write_output
from moechat.cli.terminal.load_progress import LoadProgress, about_seconds, format_bytes
from moechat.errors import DoesNotFitError, UsageError
from moechat.hub.names import resolve

if TYPE_CHECKING:
    from moechat import Engine
    from moechat.bench.compare_here import CompareOptions, ComparisonHere
    from moechat.bench.compared import Compared
    from moechat.bench.entries import Entry


def compare(command: CompareCommand) -> int:
    """Run the command.

    Returns:
        The exit status.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the results so far have been printed.
        MoechatError: See :mod:`moechat.errors`.
    """
    require_output()
    if command.plot is not None:
        from moechat.simulate.plot import check_plot

        check_plot(command.plot)
        require_writable(command.plot)
    if command.out is not None:
        require_writable(command.out)
    if command.simulate:
        from moechat.cli.commands.compare_simulated import simulated

        _show(command, simulated(command))
        return 0
    _measure(command)
    return 0


def _measure(command: CompareCommand) -> None:
    """Measure, and show the result even of an interrupted measurement."""
    assert command.model is not None
    resolve(command.model, bits=command.bits)
    from moechat.bench.entries import entries_of, shares_to_compare, systems_to_compare

    names = systems_to_compare(command.systems)
    # Experts that are not in memory come from the disk, which cannot compute.
    entries = entries_of(names, far_computes=False)
    shares = shares_to_compare(command.fractions)
    _options(command, entries, shares)  # refuses values before anything is loaded
    if command.ram is not None:
        shares = _share_of_ram(command)
    engine = _load(command)
    from moechat.bench.compare_here import ComparisonHere

    if command.ram is None and command.fractions is None:
        shares = _fitting(shares, engine, quiet=command.quiet)
    options = _options(command, entries, shares)
    with LoadProgress(quiet=command.quiet) as progress:
        progress.say("trying out")
        comparison = ComparisonHere(engine, options, prompt_of(engine))
    if not command.quiet:
        print_notice(_announcement(options, comparison))
    try:
        _run(comparison, quiet=command.quiet)
    except KeyboardInterrupt:
        found = comparison.result(complete=False)
        if found is not None:
            _show(command, found)
        raise
    found = comparison.result(complete=True)
    assert found is not None
    _show(command, found)


def _options(
    command: CompareCommand, entries: tuple[Entry, ...], shares: tuple[float, ...]
) -> CompareOptions:
    from moechat.bench.compare_here import CompareOptions

    runs = 3 if command.runs is None else command.runs
    return CompareOptions(entries, shares, tokens=command.tokens, runs=runs, seed=command.seed)


def _share_of_ram(command: CompareCommand) -> tuple[float, ...]:
    """The share of the experts that a budget of the whole process leaves memory for, as plans count it.

    Raises:
        UsageError: It holds all experts.
        DoesNotFitError: It is too small.
    """
    from moechat.planning.make import brief_plan

    assert command.model is not None
    given = {key: value for key, value in command.load_options.given.items() if key != "ram"}
    made = brief_plan(command.model, ram=command.ram, **given)
    if made.resident_share >= 1:
        raise UsageError(
            f"all {format_bytes(made.all_expert_bytes)} of experts fit in {command.ram}: every system would "
            "be as fast",
            hint="give a smaller --ram, or --fractions",
        )
    return (made.resident_share,)


def _load(command: CompareCommand) -> Engine:
    import moechat
    from moechat.offload.settings import OffloadOptions

    assert command.model is not None
    with LoadProgress(quiet=command.quiet) as progress:
        # The measurement creates its own near tiers; only the dense weights are used from here.
        return moechat.load(
            command.model, **command.load_options.given, offload=OffloadOptions(pages=0), progress=progress
        )


def _fitting(shares: tuple[float, ...], engine: Engine, *, quiet: bool) -> tuple[float, ...]:
    """The usual shares, without those that do not fit in the free memory.

    Raises:
        DoesNotFitError: None fits.
    """
    from moechat.hardware.memory import available_bytes

    store = engine.loaded.store
    everything, free = len(store.layers) * store.geometry.layer_bytes, available_bytes()
    fitting = tuple(share for share in shares if share * everything <= free)
    if not fitting:
        raise DoesNotFitError(
            f"{shares[0]:g} of the experts takes {format_bytes(shares[0] * everything)}; "
            f"{format_bytes(free)} of memory are free",
            hint="give a smaller share with --fractions",
        )
    if fitting != shares and not quiet:
        left = " and ".join(f"{share:g}" for share in shares if share not in fitting)
        print_notice(f"{left} of the experts: left out, {format_bytes(free)} of memory are free")
    return fitting


def _announcement(options: CompareOptions, comparison: ComparisonHere) -> str:
    """What will be run, and how long it takes."""
    each = f"{_counted(options.runs, 'run')} of {comparison.tokens} timed tokens"
    return (
        f"{_counted(len(options.entries), 'system')} at {_counted(len(options.fractions), 'share')} of the "
        f"experts, {each} each: about {about_seconds(comparison.seconds)}. Ctrl-C shows what has "
        "been measured so far."
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _run(comparison: ComparisonHere, *, quiet: bool) -> None:
    import moechat

    with LoadProgress(quiet=quiet) as progress:

        def show(done: float, total: float, text: str) -> None:
            # In milliseconds, because reports are whole numbers.
            progress(moechat.Progress("compare", round(1000 * done), max(2, round(1000 * total)), text))

        comparison.run(show)


def _show(command: CompareCommand, found: Compared) -> None:
    """Print the result, and write the files that were wanted."""
    from moechat.cli.commands.compare_text import chart_of, render

    text = json.dumps(found.to_json(), indent=1) + "\n"
    try:
        write_output(sys.stdout, text if command.json else render(found, command.model))
    finally:
        # Also after stdout failed, because the measurement took minutes.
        try:
            if command.out is not None:
                keep_result(command.out, text)
        finally:
            if command.plot is not None:
                from moechat.simulate.plot import draw_chart

                draw_chart(chart_of(found), command.plot)
