"""What a measured profile holds for."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from moechat.hardware.gpu import GpuReport
from moechat.hardware.identity import Disk, cpu_model, disk_of, existing_parent, this_machine

NOBODY = GpuReport(why="not asked")


def test_the_key_is_the_same_for_two_processes() -> None:
    code = "from moechat.hardware.identity import this_machine; print(this_machine().key)"
    keys = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert keys == {this_machine().key + "\n"}


def test_the_key_changes_with_every_ingredient() -> None:
    identity = this_machine(NOBODY)
    others: dict[str, Any] = {
        "cpu": identity.cpu + " v2",
        "cores": identity.cores + 1,
        "isa": "other",
        "ram": identity.ram + (1 << 30),
        "gpus": (("NVIDIA GeForce RTX 4090", "0" * 16),),
        "disk": replace(identity.disk, device="other"),
        "linux": "9.9.9",
        "version": "99.0",
        "block_format": identity.block_format + 1,
    }
    assert set(others) == {item.name for item in fields(identity)}
    keys = {replace(identity, **{name: value}).key for name, value in others.items()}
    assert len(keys) == len(others)
    assert identity.key not in keys


def test_fewer_allowed_cores_are_another_machine() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2 or this_machine(NOBODY).cores < 2:
        pytest.skip("one core only")
    code = (
        "import os; from moechat.hardware.identity import this_machine as machine; before = machine().key; "
        f"os.sched_setaffinity(0, {{{min(allowed)}}}); print(before != machine().key, machine().cores)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "1"]


def test_another_instruction_set_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from moechat.hardware.identity import this_machine; print(this_machine().isa, this_machine().key)"
    said = {}
    for isa in ("portable", ""):
        monkeypatch.setenv("MOECHAT_ISA", isa) if isa else monkeypatch.delenv("MOECHAT_ISA", raising=False)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        said[isa] = done.stdout.split()
    assert said["portable"][0] == "portable"
    assert (said["portable"][1] == said[""][1]) == (said[""][0] == "portable")


def test_the_identity_has_no_host_or_user_name() -> None:
    text = json.dumps(this_machine().to_json())
    for name in (socket.gethostname(), getpass.getuser(), str(Path.home())):
        # A user called "x" or "a" would be found in every text.
        if len(name) > 3:
            assert name not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "processor\t: 0\nmodel name\t: AMD  Ryzen 5 5600X\nprocessor\t: 1\nmodel name\t: other\n",
            "AMD Ryzen 5 5600X",
        ),
        (
            "processor\t: 0\nBogoMIPS\t: 50\n\nHardware\t: BCM2835\nModel\t\t: Raspberry Pi 5\n",
            "Raspberry Pi 5",
        ),
    ],
)
def test_the_processor_has_its_model_name(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert cpu_model(file) == expected


def test_a_processor_without_a_name_is_called_by_its_architecture(tmp_path: Path) -> None:
    assert cpu_model(tmp_path / "missing") == os.uname().machine


def test_the_mount_closest_to_a_directory_is_its_file_system(tmp_path: Path) -> None:
    place = tmp_path / "with space"
    place.mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 250:99 / / rw,relatime shared:1 - ext4 /dev/none1 rw\n"
        f"30 22 0:45 / {tmp_path} rw - btrfs none2 rw\n"
        f"31 30 0:46 / {tmp_path}/with\\040space rw,noatime shared:5 master:3 - xfs none3 rw\n"
        "damaged line\n"
        f"32 30 0:47 / {tmp_path}/within rw - zfs none4 rw\n"
    )
    assert disk_of(place / "not" / "there", mounts) == Disk("xfs")
    assert disk_of(tmp_path, mounts) == Disk("btrfs")
    assert disk_of(Path("/"), mounts) == Disk("ext4")


def test_without_a_list_of_mounts_the_disk_is_unknown(tmp_path: Path) -> None:
    assert disk_of(tmp_path, tmp_path / "missing") == Disk()


def test_this_machines_disk_is_known() -> None:
    assert disk_of(Path.cwd()).file_system


def test_the_closest_existing_directory_is_found(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "a").write_text("a file")
    assert existing_parent(tmp_path / "a" / "b") == tmp_path
