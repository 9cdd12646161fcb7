"""Files with measured profiles: one JSON file per machine identity, in the user's data directory.

Damaged files, and files of other programs or format versions, are ignored; the ``notice`` callback gets the
reason.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moechat.atomic_file import replacing
from moechat.config import HOME_VARIABLE, user_paths
from moechat.errors import MoechatError
from moechat.hardware.gpu import find_gpus
from moechat.hardware.identity import Identity, this_machine
from moechat.hardware.profile import HardwareProfile
from moechat.hardware.profile_json import profile_from_json, profile_to_json

# 2 adds what is measured on a GPU; profiles of format 1 lack it.
FORMAT = 2
_READABLE = (1, 2)
_KIND = "moechat hardware profile"
_NAME = re.compile(r"[0-9a-f]{16}\.json", re.ASCII)
_MOST_BYTES = 4 << 20
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Measurement:
    """Result of measuring a machine.

    Attributes:
        profile: The figures.
        missing: By part (``gpu``, ``link file``, ``link gpu``): why it was not measured.
        remarks: Notes on the figures, in sentences.
        facts: Further properties of the machine as JSON types: caches, huge pages, versions.
        seconds: Duration of the measurement.
    """

    profile: HardwareProfile
    missing: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def age(self) -> float | None:
        """Seconds since the measurement; ``None`` if its time is unknown."""
        try:
            created = datetime.fromisoformat(self.profile.created)
        except ValueError:
            return None
        if created.tzinfo is None:
            created = created.replace(tzinfo=UTC)
        return max(0.0, (datetime.now(UTC) - created).total_seconds())

    def to_json(self) -> dict[str, Any]:
        """JSON types; :func:`_from_json` is the inverse."""
        return {
            "format": FORMAT,
            "kind": _KIND,
            "key": self.profile.key,
            "profile": profile_to_json(self.profile),
            "missing": dict(self.missing),
            "remarks": list(self.remarks),
            "facts": dict(self.facts),
            "seconds": self.seconds,
        }


def profiles_directory() -> Path:
    """Directory of the files; it may not exist.

    Raises:
        UsageError: ``MOECHAT_HOME`` names something that is not a directory.
    """
    return user_paths().data / "profiles"


def save_measurement(measurement: Measurement) -> Path:
    """Write a measurement atomically, replacing an older one of the same identity.

    Raises:
        MoechatError: The file cannot be written.
    """
    path = profiles_directory() / f"{measurement.profile.key}.json"
    write_json(path, measurement.to_json())
    return path


def load_measurement(
    notice: Notice = lambda _: None, *, identity: Identity | None = None
) -> Measurement | None:
    """Load the measurement of this machine with this software, with the GPU's currently free memory.

    Args:
        notice: Called with the reason, in a sentence, if a file is not used.
        identity: Identity of the machine, if known.

    Returns:
        ``None`` if there is none.
    """
    key = (this_machine() if identity is None else identity).key
    found = _read(profiles_directory() / f"{key}.json", notice)
    return found if found is None or found.profile.gpu is None else _with_free_now(found)


def load_measured(notice: Notice = lambda _: None) -> HardwareProfile | None:
    """Load the measured profile of this machine with this software; ``None`` if there is none.

    ``gpu.vram_free`` is the currently free memory.

    Args:
        notice: Called with the reason, in a sentence, if a file is not used.
    """
    found = load_measurement(notice)
    return None if found is None else found.profile


def saved_measurements(notice: Notice = lambda _: None) -> list[Measurement]:
    """All stored measurements, of any machine, newest first."""
    try:
        names = sorted(
            entry.name for entry in os.scandir(profiles_directory()) if _NAME.fullmatch(entry.name)
        )
    except OSError:
        return []
    found = [_read(profiles_directory() / name, notice) for name in names]
    return sorted((item for item in found if item), key=lambda item: item.profile.created, reverse=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file atomically.

    Raises:
        MoechatError: The file cannot be written.
    """
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as file:
            file.write(text.encode())
    except OSError as problem:
        raise MoechatError(
            f"{path} cannot be written: {problem.strerror}",
            hint=f"set {HOME_VARIABLE} to a directory that can be written to, with some room",
        ) from problem


def read_json(path: Path, notice: Notice) -> dict[str, Any] | None:
    """Read the JSON object in a file; ``None``, with a call of ``notice``, if it is damaged."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        data = json.loads(content.decode("utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it holds no object")
        return data
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        notice(f"{path} cannot be read and is ignored: {problem.strerror}")
    except (ValueError, RecursionError) as problem:
        notice(f"{path} is damaged and is ignored: {problem}")
    return None


def _read(path: Path, notice: Notice) -> Measurement | None:
    data = read_json(path, notice)
    if data is None:
        return None
    if data.get("kind") != _KIND or data.get("format") not in _READABLE:
        notice(f"{path} was written by another version of moechat, or is not a hardware profile: ignored")
        return None
    try:
        measurement = _from_json(data)
        if path.stem != measurement.profile.key:
            raise ValueError(f"it is the profile of {measurement.profile.key or 'no machine'}")
        return measurement
    except (MoechatError, AttributeError, KeyError, TypeError, ValueError) as problem:
        notice(f"{path} is damaged and is ignored: {problem}")
        return None


def _with_free_now(measurement: Measurement) -> Measurement:
    """The measurement with the GPU's currently free memory."""
    report = find_gpus()
    gpu, best = measurement.profile.gpu, report.best
    if gpu is None or best is None or best.name != gpu.name:
        return measurement
    profile = replace(measurement.profile, gpu=replace(gpu, vram_free=best.figures().vram_free))
    return replace(measurement, profile=profile, facts={**measurement.facts, "gpus": report.facts()})


def _from_json(data: Mapping[str, Any]) -> Measurement:
    seconds = data["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValueError(f"seconds is {seconds!r}")
    return Measurement(
        profile=profile_from_json(data["profile"]),
        missing={str(part): str(why) for part, why in dict(data["missing"]).items()},
        remarks=tuple(str(remark) for remark in list(data["remarks"])),
        facts=dict(data["facts"]),
        seconds=float(seconds),
    )
