"""Formats the measured figures of a GPU and its link as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moechat.cli.commands.short_times import format_short
from moechat.cli.terminal.load_progress import format_bytes
from moechat.cli.terminal.page import Page

if TYPE_CHECKING:
    from moechat.hardware.profile import Figure, GpuFigures, LinkFigures

_PARTS = ("gpu ", "link gpu ", "pinned memory")


def render_gpu(page: Page, gpu: GpuFigures, link: LinkFigures | None, missing: Mapping[str, str]) -> None:
    """Show what was measured of a GPU, and why other figures were not.

    Args:
        page: Where it goes.
        gpu: The GPU.
        link: The link to it.
        missing: Reasons by part; see :class:`moechat.hardware.measured_file.Measurement`.
    """
    if link is not None and link.by_depth:
        page.line()
        _depths(page, link)
    if gpu.launch.origin == "measured" or gpu.bandwidth.origin == "measured":
        page.line()
        page.pairs(_alone(gpu, link))
    if gpu.expert_rate:
        page.line()
        _experts(page, gpu)
    for part, why in missing.items():
        if part.startswith(_PARTS):
            page.line(f"{part}: not measured: {why}", "dim")


def _depths(page: Page, link: LinkFigures) -> None:
    depths = sorted({depth for rates in link.by_depth.values() for depth in rates})
    rows = [
        (
            format_bytes(nbytes),
            *(_rate(rates.get(depth)) for depth in depths),
            _rate(link.staged.get(nbytes)),
            _rate(link.back.get(nbytes)),
        )
        for nbytes, rates in sorted(link.by_depth.items())
    ]
    columns = [("", "right"), *((f"{depth} in flight", "right") for depth in depths)]
    page.table("memory to GPU", [*columns, ("not pinned", "right"), ("to the host", "right")], rows)


def _alone(gpu: GpuFigures, link: LinkFigures | None) -> list[tuple[str, str]]:
    chip = [] if gpu.capability is None else [f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"]
    if gpu.sms is not None:
        chip.append(f"{gpu.sms} SMs")
    if gpu.l2_bytes is not None:
        chip.append(f"{format_bytes(gpu.l2_bytes)} of L2")
    memory = f"read at {_rate(gpu.bandwidth)}, copied at {_rate(gpu.copy)}"
    times = {
        "kernel": gpu.launch,
        "experts of a layer": gpu.call,
        "graph": gpu.graph_launch,
        "a node of it": gpu.graph_node,
        "wake-up of the host": gpu.sync,
        "numbers to the host": gpu.round_trip,
    }
    shown = ", ".join(f"{name} {_time(figure)}" for name, figure in times.items() if figure is not None)
    rows = [("GPU", ", ".join(chip)), ("GPU memory", memory), ("starting", shown)]
    for bits, rate in sorted(gpu.dense_rate.items(), reverse=True):
        many = gpu.dense_flops.get(bits)
        prompts = "" if many is None else f", {many.value / 1e12:.1f} TFLOP/s for prompts"
        rows.append((f"dense, {bits} bits", f"{_rate(rate)} for a token{prompts}"))
    if link is not None and link.pinned is not None:
        least = "at least " if link.pins_more else ""
        rows.append(("pinned memory", f"{least}{format_bytes(link.pinned.value)}"))
    if gpu.context is not None:
        rows.append(("CUDA context", format_bytes(gpu.context.value)))
    return rows


def _experts(page: Page, gpu: GpuFigures) -> None:
    counts = sorted({count for rates in gpu.expert_rate.values() for count in rates})
    rows = []
    for bits, rates in sorted(gpu.expert_rate.items()):
        flops = gpu.expert_flops.get(bits, {})
        many = flops.get(max(flops, default=0))
        rows.append(
            (
                str(bits),
                *(_rate(rates.get(count)) for count in counts),
                "-" if many is None else f"{many.value / 1e12:.1f} TFLOP/s",
            )
        )
    columns = [(f"{count} token{'' if count == 1 else 's'}", "right") for count in counts]
    page.table("GPU, expert kernels", [("bits", "right"), *columns, ("prompts", "right")], rows)


def _rate(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value / 1e9:.2f} GB/s"


def _time(figure: Figure) -> str:
    return f"{1e6 * figure.value:.1f} µs" if figure.value < 1e-4 else format_short(figure.value)
