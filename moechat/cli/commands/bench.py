"""``moechat bench``: measures systems side by side and shows the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.cli.commands.bench_arguments import BenchCommand
from moechat.cli.output_file import require_writable
from moechat.cli.terminal.consoles import print_notice, require_output, write_output
from moechat.cli.terminal.load_progress import LoadProgress, format_bytes, format_seconds
from moechat.cli.terminal.page import READY_REMARK, render_cases
from moechat.config import user_paths
from moechat.errors import MoechatError, UsageError
from moechat.hub.names import resolve
from moechat.safe_text import one_line

if TYPE_CHECKING:
    from moechat import Engine
    from moechat.bench.options import BenchOptions

_PROMPT = "Once upon a time, in a village between the hills and the sea, there lived a clockmaker who "


def bench(command: BenchCommand) -> int:
    """Run the command.

    Returns:
        The exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    require_output()
    if command.model is not None:
        resolve(command.model, bits=command.bits)
    out = None if command.out is None else require_writable(command.out)

    from moechat.bench.measure import run_bench
    from moechat.bench.report import assumptions

    options = _options(command)
    _check_before_loading(command, options)
    engine, cuts = _load(command)
    report = (lambda _: None) if command.quiet else print_notice
    result = run_bench(engine, options, prompt=prompt_of(engine), report=report)
    synthetic = str(result["model"]["source"]).startswith("synthetic ")
    result["assumptions"] = assumptions(result, cuts, random_weights=synthetic)
    text = json.dumps(result, indent=1) + "\n"
    try:
        write_output(sys.stdout, text if command.json else render(result, wide=command.wide))
    finally:
        # Also after stdout failed, because the measurement took minutes.
        if out is not None:
            keep_result(out, text)
    return 0


def keep_result(out: Path, text: str) -> None:
    """Write the JSON object to a file.

    Raises:
        MoechatError: It cannot be written.
    """
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise MoechatError(f"{out} cannot be written: {problem.strerror}") from problem


def _check_before_loading(command: BenchCommand, options: BenchOptions) -> None:
    """Check the trace and the context before gigabytes are written or read.

    Raises:
        MoechatError: The trace cannot be read, or the tokens exceed the shape's context.
    """
    from moechat.bench.synthetic_models import load_shape
    from moechat.routing import Trace
    from moechat.sizes.context_length import context_length, stated_context

    if options.routing is not None:
        Trace.read(options.routing)
    if command.synthetic is not None:
        shape = load_shape(command.synthetic, layers=command.layers, vocabulary=command.vocabulary)
        options.check_context(context_length(stated_context(shape.config), None))


def _options(command: BenchCommand) -> BenchOptions:
    from moechat.bench.options import (
        DEFAULT_FRACTIONS,
        BenchOptions,
        parse_fractions,
        parse_link,
        parse_systems,
    )
    from moechat.config import parse_size

    return BenchOptions(
        systems=parse_systems(command.systems),
        fractions=DEFAULT_FRACTIONS if command.fractions is None else parse_fractions(command.fractions),
        ram=None if command.ram is None else parse_size(command.ram),
        link=parse_link(command.link),
        routing=command.routing,
        accuracy=command.accuracy,
        prompt_tokens=command.prompt_tokens,
        tokens=command.tokens,
        warmup_tokens=command.warmup_tokens,
        fill_tokens=command.fill_tokens,
        runs=command.runs,
        seed=command.seed,
    )


def _load(command: BenchCommand) -> tuple[Engine, list[str]]:
    import moechat
    from moechat.offload.settings import OffloadOptions

    cuts: list[str] = []
    model: str | Path
    with LoadProgress(quiet=command.quiet) as progress:
        if command.synthetic is not None:
            from moechat.bench.synthetic_models import load_shape, synthetic_store

            shape = load_shape(command.synthetic, layers=command.layers, vocabulary=command.vocabulary)
            cuts = shape.cuts
            parent = user_paths().cache / "synthetic" if command.directory is None else command.directory
            bits = 4 if command.bits is None else command.bits

            def on_write(event: Any) -> None:
                done, total = event.done_bytes, event.total_bytes
                progress(moechat.Progress("synthetic", done, total, event.detail))

            model = synthetic_store(shape, parent, bits=bits, progress=on_write).path
        else:
            assert command.model is not None
            model = command.model
        engine = moechat.load(
            model,
            **command.load_options.given,
            # The measurement creates its own near tiers; only the dense weights are used from here.
            offload=OffloadOptions(pages=0),
            progress=progress,
        )
    return engine, cuts


def prompt_of(engine: Engine) -> list[int] | None:
    """Tokens of the prompt; ``None`` without a tokenizer: then they are random."""
    try:
        return engine.encode(_PROMPT)
    except UsageError:
        return None


def render(result: Mapping[str, Any], *, wide: bool = False) -> str:
    """The result as text for people: a table for each fraction, and the assumptions.

    Args:
        result: The measurement.
        wide: Show all columns.
    """

    def rows(group: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        fastest = min(case["tpot_s"]["median"] for case in group)
        return [_row(case, group[0], fastest) for case in group]

    return render_cases(
        _headline(result),
        result["cases"],
        lambda case: case["pages_bytes"],
        _COLUMNS,
        rows,
        [*([] if wide else [READY_REMARK]), *result["assumptions"]],
        few=None if wide else _FEW,
    )


_COLUMNS: Sequence[tuple[str, str]] = (
    ("system", "left"),
    ("first token", "right"),
    ("ms/token", "right"),
    ("range", "right"),
    ("simulated", "right"),
    ("speed", "right"),
    ("ready", "right"),
    ("full/ahead/top/miss %", "right"),
    ("MB/token demand+ahead (wasted)", "right"),
    ("link", "right"),
    ("stall", "right"),
    ("compute", "right"),
    ("floor ms", "right"),
    ("µs/layer python+predict+native", "right"),
)


_FEW = ("system", "first token", "ms/token", "speed", "ready")


def _row(case: Mapping[str, Any], first: Mapping[str, Any], fastest: float) -> list[str]:
    pace, moved, hits = case["tpot_s"], case["bytes_per_token"], case["hits"]
    costs = case["us_per_layer"]
    native = costs["begin"] + costs["prefetch"] + costs["finish"]
    return [
        case["system"],
        format_seconds(case["ttft_s"]["median"]),
        f"{1000 * pace['median']:.1f}",
        f"{1000 * pace['min']:.1f}-{1000 * pace['max']:.1f}",
        _simulated(case),
        f"{first['tpot_s']['median'] / pace['median']:.2f}x",
        f"{hits['full'] + hits['prefetch']:.0%}",
        "/".join(f"{100 * hits[kind]:.0f}" for kind in ("full", "prefetch", "top", "miss")),
        f"{moved['demand'] / 1e6:.1f}+{moved['prefetch'] / 1e6:.1f} ({moved['wasted'] / 1e6:.1f})",
        f"{case['link_busy_share']:.0%}",
        f"{case['stall_share']:.0%}",
        f"{case['compute_share']:.0%}",
        _floor(case, fastest),
        f"{costs['python']:.0f}+{costs['predict']:.0f}+{native:.0f}",
    ]


def _simulated(case: Mapping[str, Any]) -> str:
    """Milliseconds per token expected by the simulator, and their deviation from the measured ones."""
    expected = case["predicted_tpot_ms"]
    return "-" if expected is None else f"{expected:.1f} ({case['predicted_ratio'] - 1:+.0%})"


def _floor(case: Mapping[str, Any], fastest: float) -> str:
    """Least milliseconds per token of any system; a bound that a measured time is below is ignored."""
    link, compute = case["floor_s"]["link"], case["floor_s"]["compute"]
    floors = [link] if link <= case["tpot_s"]["median"] else []
    if compute is not None and compute <= fastest:
        floors.append(compute)
    least = max(floors, default=0.0)
    return f"{1000 * least:.1f}" if least > 0 else "-"


def _headline(result: Mapping[str, Any]) -> list[str]:
    model, link, machine = result["model"], result["link"], result["machine"]
    resident = result["resident"]
    lines = [
        f"{one_line(str(model['name']))}: {model['expert_layers']} layers of {model['experts']} experts, "
        f"{model['top_k']} a token, {model['bits']} bits, {format_bytes(model['all_expert_bytes'])} "
        f"of experts; {machine['threads']} threads, {machine['isa']}",
        f"expert blocks: {link['compute_rate'] / 1e9:.2f} GB/s computed, "
        f"{link['bandwidth'] / 1e9:.3f} GB/s over the link ({link['kind']})",
    ]
    if resident is not None:
        lines.append(f"everything in memory: {1000 * resident['tpot_s']['median']:.1f} ms a token")
    if result["prediction"].get("right_of_top_k"):
        right = result["prediction"]["right_of_top_k"]
        figures = " ".join("-" if value is None else f"{value:.2f}" for value in right)
        lines.append(f"correct predictions of {model['top_k']}, by layer: {figures}")
    return lines
