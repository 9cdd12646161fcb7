"""``moechat profile``: what this machine can do, measured once and kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moechat.cli.options import check_load_flags
from moechat.cli.profile_page import TimedModel, render_list, render_profile
from moechat.cli.progress import LoadProgress, format_seconds
from moechat.cli.terminal import console, is_animated, neutralise, print_notice, write_output
from moechat.errors import MoechatError, UsageError
from moechat.hub.names import resolve

if TYPE_CHECKING:
    from moechat.hardware.measured_file import Measurement

FORMAT = 1


@dataclass(frozen=True)
class ProfileCommand:
    """What ``moechat profile`` was asked for; see its help."""

    model: str | None = None
    refresh: bool = False
    list: bool = False
    bits: int | None = None
    threads: int | None = None
    dtype: str = "auto"
    dense_bits: int = 16
    activation_bits: int = 16
    json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.list and (self.refresh or self.model is not None):
            raise UsageError("--list measures nothing; leave out --refresh and --model")
        said = (self.bits, self.threads, self.dtype, self.dense_bits, self.activation_bits)
        if self.model is None and said != (None, None, "auto", 16, 16):
            raise UsageError(
                "--bits, --threads, --dtype, --dense-bits and --activation-bits say how a model is loaded; "
                "they need --model"
            )
        check_load_flags(self)


def profile(command: ProfileCommand) -> int:
    """Do what ``moechat profile`` was asked for.

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
        resolve(command.model, bits=command.bits)  # before seconds of measuring
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
    from moechat.hardware.measure import measure
    from moechat.hardware.measured_file import save_measurement

    with _progress("measuring this machine, about 20 seconds", quiet) as report:
        measurement = measure(report)
    try:
        path = save_measurement(measurement)
    except MoechatError as problem:
        # The figures took seconds, and are what was asked for.
        notice(f"the profile is not kept: {problem}" + (f"; {problem.hint}" if problem.hint else ""))
    else:
        notice(f"measured in {format_seconds(measurement.seconds)}, and kept in {path}")
    return measurement


def _time_model(command: ProfileCommand, notice: Callable[[str], None]) -> TimedModel:
    import moechat
    from moechat.bench.model_times import measure_model_times, times_key
    from moechat.hardware.model_times import save_times
    from moechat.offload.settings import OffloadOptions

    assert command.model is not None
    with LoadProgress(quiet=command.quiet) as progress:
        engine = moechat.load(
            command.model,
            bits=command.bits,
            dtype=command.dtype,
            dense_bits=command.dense_bits,
            activation_bits=command.activation_bits,
            threads=command.threads,
            # The measurement takes the memory for experts itself.
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
            notice(f"the times of {engine.name} are not kept: {problem}")
        layers = int(engine.describe()["expert_layers"])
        return TimedModel(engine.name, key.dtype, key.threads, key.bits, layers, times)


@contextmanager
def _progress(title: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is measured; one word at the beginning elsewhere."""
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
            notice(f"the profile {name} is left out: {problem}")
            continue
        reference.append({"name": name, "title": title})
    return {"format": FORMAT, "kind": "moechat profile list", "saved": saved, "reference": reference}
