"""Identity of hardware and software for which a measured profile is valid.

It contains no host or user names; UUIDs of GPUs are hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

import moechat
from moechat import _native
from moechat.config import active_isa, user_paths
from moechat.hardware.gpu import GpuReport, find_gpus

_KEY_DIGITS = 16
# The memory reserved by the kernel differs by some megabytes from boot to boot.
_RAM_STEP = 256 << 20


@dataclass(frozen=True)
class Disk:
    """The file system of a directory and the device below it.

    Attributes:
        file_system: Its type, such as ``ext4``; empty if unknown.
        device: Vendor's name of the device, or the system's; empty if unknown.
        nbytes: Size of the device; 0 if unknown.
    """

    file_system: str = ""
    device: str = ""
    nbytes: int = 0


@dataclass(frozen=True)
class Identity:
    """Properties that measured figures depend on and that are quick to determine.

    Attributes:
        cpu: Model of the processor.
        cores: Physical cores that may be used.
        isa: Instruction set of the kernels.
        ram: Total bytes, rounded to 256 MiB.
        gpus: Name and hashed UUID of each GPU that may be used.
        disk: Disk of the model library.
        linux: Release of the Linux kernel.
        version: Version of moechat.
        block_format: Version of the block layout.
    """

    cpu: str
    cores: int
    isa: str
    ram: int
    gpus: tuple[tuple[str, str], ...]
    disk: Disk
    linux: str
    version: str
    block_format: int

    @property
    def key(self) -> str:
        """Hash of all fields, 16 hexadecimal digits."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON types."""
        return asdict(self)


def this_machine(gpus: GpuReport | None = None) -> Identity:
    """Identity of the parts of this machine that this process may use.

    Args:
        gpus: Its GPUs, if known.

    Raises:
        UsageError: ``MOECHAT_HOME`` names something that is not a directory.
    """
    found = _gpus() if gpus is None else gpus
    return Identity(
        cpu=cpu_model(),
        cores=_native.available_cores(),
        isa=active_isa(),
        ram=round(psutil.virtual_memory().total / _RAM_STEP) * _RAM_STEP,
        gpus=tuple((device.name, device.identity) for device in found.devices),
        disk=disk_of(user_paths().models),
        linux=platform.release(),
        version=moechat.__version__,
        block_format=_native.BLOCK_FORMAT_VERSION,
    )


@cache
def _gpus() -> GpuReport:
    # Cached, because initialising the driver can take a second.
    return find_gpus()


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model name of the processor."""
    fields = ("model name", "Model", "Hardware", "cpu")
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    # Reversed, so that the first processor's values win.
    lines = [line.partition(":") for line in reversed(text.splitlines())]
    found = {name.strip(): " ".join(value.split()) for name, _, value in lines}
    return next((found[name] for name in fields if found.get(name)), platform.machine())


def existing_parent(path: Path) -> Path:
    """The path, or its closest existing parent directory."""
    for candidate in (path, *path.parents):
        if candidate.is_dir():
            return candidate
    return Path("/")


def disk_of(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Disk:
    """The file system that contains (or will contain) a directory; fields are empty if unknown."""
    place = existing_parent(directory).resolve()
    best: tuple[int, str, str, str] | None = None
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        # 36 35 98:0 /root /mount options - type source super: see proc(5)
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or len(right) < 2:
            continue
        mount = Path(left[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        # Of several file systems on one mount point the last one is visible.
        if place.is_relative_to(mount) and (best is None or len(mount.parts) >= best[0]):
            best = (len(mount.parts), right[0], right[1], left[2])
    if best is None:
        return Disk()
    _, kind, source, number = best
    name, nbytes = _block_device(source, number)
    return Disk(kind, name, nbytes)


def _block_device(source: str, number: str) -> tuple[str, int]:
    """Name and size of the whole device of a file system."""
    system = Path("/sys/dev/block") / number
    if not system.exists() and source.startswith("/dev/"):
        # Btrfs and others have device numbers of their own.
        try:
            status = os.stat(source)
            system = Path("/sys/dev/block") / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        except OSError:
            return "", 0
    try:
        device = system.resolve(strict=True)
        if (device / "partition").exists():
            device = device.parent
        nbytes = 512 * int((device / "size").read_text())
    except (OSError, ValueError):
        return "", 0
    try:
        model = " ".join((device / "device" / "model").read_text(errors="replace").split())
    except OSError:
        model = ""
    return model or device.name, nbytes
