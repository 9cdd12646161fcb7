"""``moechat profile``: measures this machine once, saves the figures and shows them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from moechat.cli.commands.plan_arguments import ProfileCommand
from moechat.cli.commands.profile_tables import TimedModel, render_list, render_profile
from moechat.cli.terminal.consoles import console, is_animated, neutralise, print_notice, write_output
from moechat.cli.terminal.load_progress import LoadProgress, format_seconds
from moechat.errors import MoechatError
from moechat.hub.names import resolve

if TYPE_CHECKING:
    from moechat.hardware.card import Card
    from moechat.hardware.gpu import GpuDevice
    from moechat.hardware.measured_file import Measurement

FORMAT = 1


def profile(command: ProfileCommand) -> int:
    """Run the command.

    Returns:
        The exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    from moechat.hardware.measured_file import load_measurement

    notice = _silent if command.quiet else print_notice
    if command.list:
        found = _list(notice)
        write_output(sys.stdout, _json(found) if command.json else render_list(found))
        return 0
    if command.model is not None:
        resolve(command.model, bits=command.bits)  # fails before seconds of measuring
    measurement = None if command.refresh else load_measurement(notice)
    fresh = measurement is None
    if measurement is None:
        measurement = _measure(command.quiet, notice)
    timed = None if command.model is None else _time_model(command, notice)
    if command.json:
        age = measurement.age
        value = measurement.to_json() | {
            "format": FORMAT,
            "kind": "moechat profile",
            "age_s": None if age is None else round(age),
            "fresh": fresh,
            "model_times": None if timed is None else timed.to_json(),
        }
        write_output(sys.stdout, _json(value))
    else:
        write_output(sys.stdout, render_profile(measurement, timed))
    return 0


def _silent(text: str) -> None:
    pass


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


# ---- measuring


def _measure(quiet: bool, notice: Callable[[str], None]) -> Measurement:
    from moechat.hardware.gpu import find_gpus
    from moechat.hardware.measure import measure
    from moechat.hardware.measured_file import save_measurement

    # Building its kernels for the first time takes the most.
    what = " and its GPU, up to two minutes the first time" if find_gpus().best else ", about 20 seconds"
    with _progress(f"measuring this machine{what}", quiet) as report:
        measurement = measure(report, open_card=_open_card)
    try:
        path = save_measurement(measurement)
    except MoechatError as problem:
        # The figures can still be shown.
        notice(f"the profile was not saved: {problem}" + (f"; {problem.hint}" if problem.hint else ""))
    else:
        notice(f"measured in {format_seconds(measurement.seconds)}, saved in {path}")
    return measurement


def _open_card(device: GpuDevice) -> Card:
    from moechat.offload.cuda_card import open_card  # loads torch and Triton

    return open_card(device)


def _time_model(command: ProfileCommand, notice: Callable[[str], None]) -> TimedModel:
    import moechat
    from moechat.bench.model_times import measure_model_times, times_key
    from moechat.hardware.times_file import save_times
    from moechat.offload.settings import OffloadOptions

    assert command.model is not None
    with LoadProgress(quiet=command.quiet) as progress:
        engine = moechat.load(
            command.model,
            **command.load_options.given,
            # The measurement allocates the memory for experts.
            offload=OffloadOptions(pages=0),
            progress=progress,
        )
    with engine:
        with _progress(f"timing {engine.name}", command.quiet) as report:
            report("decoding")
            times = measure_model_times(engine)
        key = times_key(engine)
        try:
            save_times(key, times)
        except MoechatError as problem:
            notice(f"the times of {engine.name} were not saved: {problem}")
        layers = engine.describe().expert_layers
        return TimedModel(engine.name, key.dtype, key.threads, key.bits, layers, times)


@contextmanager
def _progress(title: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the current step on a terminal; elsewhere print the title once."""
    if quiet:
        yield _silent
    elif not is_animated():
        print_notice(title)
        yield _silent
    else:
        from rich.text import Text

        with console().status(Text(neutralise(title))) as status:
            yield lambda step: status.update(Text(neutralise(f"{title}: {step}")))


# ---- the list


def _list(notice: Callable[[str], None]) -> dict[str, Any]:
    from moechat.hardware.identity import this_machine
    from moechat.hardware.measured_file import saved_measurements
    from moechat.hardware.profile_file import reference_names, reference_profile

    here = this_machine().key
    saved = []
    for item in saved_measurements(notice):
        age = item.age
        saved.append(
            {
                "key": item.profile.key,
                "name": item.profile.name,
                "title": item.profile.title,
                "created": item.profile.created,
                "age_s": None if age is None else round(age),
                "current": item.profile.key == here,
            }
        )
    reference = []
    for name in reference_names():
        try:
            title = reference_profile(name).title
        except MoechatError as problem:
            notice(f"the profile {name} is not listed: {problem}")
            continue
        reference.append({"name": name, "title": title})
    return {"format": FORMAT, "kind": "moechat profile list", "saved": saved, "reference": reference}
