"""Damages files of stores as failing media do: bytes change, and nothing in the metadata tells."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from moechat.store.stamps import VerificationRecord, record_path, status_of
from moechat.store.store import Store


def flip(path: Path, place: int, bits: int = 0x10) -> None:
    """XOR one byte of a file, to the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, place)[0]
        os.pwrite(descriptor, bytes([byte ^ bits]), place)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_place(store: Store, layer: int, expert: int, block: int = 0) -> tuple[Path, int]:
    """File and offset of the middle of a block record."""
    extent, geometry = store.expert_extent(layer), store.geometry
    number = expert * geometry.blocks_per_expert + block
    return extent.path, extent.offset + number * geometry.record_bytes + geometry.record_bytes // 2


def look_unchanged(path: Path, state: Path) -> None:
    """Make the record of the last verification fit the files as they are now: ctime cannot be set back."""
    place = record_path(path, state)
    record = VerificationRecord.read(place)
    assert record is not None
    files = {
        name: replace(file, status=status_of((path / name).stat())) for name, file in record.files.items()
    }
    VerificationRecord(record.manifest, files).write(place)


def age(path: Path, state: Path, seconds: float) -> None:
    """Move the last verification of all files into the past."""
    place = record_path(path, state)
    record = VerificationRecord.read(place)
    assert record is not None
    files = {name: replace(file, at=file.at - seconds) for name, file in record.files.items()}
    VerificationRecord(record.manifest, files).write(place)
