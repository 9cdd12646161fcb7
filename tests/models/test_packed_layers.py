"""The file of packed dense layers: used where it fits, made again where it does not, whole or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat import _native
from moechat.models import packed, packed_file

TOKENS = [5, 9, 2, 77, 31]


@pytest.fixture
def checkpoint(tmp_path: Path, moechat_home: Path) -> Path:
    write_tiny_checkpoint(tmp_path / "model", tiny_config("qwen3_moe", 0))
    return tmp_path / "model"


def logits(checkpoint: Path, bits: int = 4) -> torch.Tensor:
    with moechat.load(checkpoint, dense_bits=bits, dtype="float32") as engine:
        return engine.logits(TOKENS)


def files(home: Path) -> list[Path]:
    return sorted((home / "cache" / "dense").iterdir())


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts matrices that are packed."""
    counted: list[int] = []
    pack = _native.pack_linear

    def counting(layout: Any, matrix: Any, **settings: Any) -> Any:
        counted.append(layout.rows)
        return pack(layout, matrix, **settings)

    monkeypatch.setattr(packed._native, "pack_linear", counting)
    return counted


def test_the_second_start_reads_what_the_first_one_packed(
    checkpoint: Path, moechat_home: Path, packings: list[int]
) -> None:
    first = logits(checkpoint)
    assert len(packings) > 4
    packings.clear()
    assert torch.equal(logits(checkpoint), first)
    assert packings == []
    assert len(files(moechat_home)) == 1
    logits(checkpoint, 8)
    assert len(files(moechat_home)) == 2


@pytest.mark.parametrize("at", [0, 10, 40, 5000, -1])
def test_a_damaged_file_is_packed_again(
    at: int, checkpoint: Path, moechat_home: Path, packings: list[int]
) -> None:
    first = logits(checkpoint)
    (path,) = files(moechat_home)
    good = path.read_bytes()
    damaged = bytearray(good)
    damaged[at] ^= 0x11
    path.write_bytes(damaged)
    packings.clear()
    assert torch.equal(logits(checkpoint), first)
    assert packings
    assert path.read_bytes() == good


@pytest.mark.parametrize("content", [b"", b"MOEDENSE", b"MOEDENSE" + b"\xff" * 8 + b"{}"])
def test_a_file_of_another_kind_is_packed_again(
    content: bytes, checkpoint: Path, moechat_home: Path, packings: list[int]
) -> None:
    first = logits(checkpoint)
    (path,) = files(moechat_home)
    path.write_bytes(content)
    packings.clear()
    assert torch.equal(logits(checkpoint), first)
    assert packings


def test_a_truncated_file_is_packed_again(checkpoint: Path, moechat_home: Path, packings: list[int]) -> None:
    first = logits(checkpoint)
    (path,) = files(moechat_home)
    os.truncate(path, path.stat().st_size - 1)
    packings.clear()
    assert torch.equal(logits(checkpoint), first)
    assert packings


def test_another_version_has_a_file_of_its_own(
    checkpoint: Path, moechat_home: Path, packings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = logits(checkpoint)
    packings.clear()
    monkeypatch.setattr(packed_file, "_FORMAT", packed_file._FORMAT + 1)
    assert torch.equal(logits(checkpoint), first)
    assert packings
    assert len(files(moechat_home)) == 2


def test_without_a_writable_directory_layers_are_packed_at_every_start(
    checkpoint: Path, moechat_home: Path, packings: list[int]
) -> None:
    (moechat_home / "cache").mkdir(parents=True)
    (moechat_home / "cache" / "dense").write_text("in the way")
    first = logits(checkpoint)
    packings.clear()
    assert torch.equal(logits(checkpoint), first)
    assert packings


def test_the_store_stays_whole_without_the_file(checkpoint: Path, moechat_home: Path) -> None:
    first = logits(checkpoint)
    (path,) = files(moechat_home)
    path.unlink()
    assert torch.equal(logits(checkpoint), first)
    assert files(moechat_home) == [path]


_KILLED = """
import os, signal, sys
from contextlib import contextmanager
import moechat
from moechat.models import packed_file
whole = packed_file.replacing
@contextmanager
def killed(path):
    with whole(path) as file:
        yield file
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
packed_file.replacing = killed
moechat.load(sys.argv[1], dense_bits=4, dtype="float32")
"""


def test_a_start_that_is_killed_while_writing_leaves_no_file_under_the_name(
    checkpoint: Path, moechat_home: Path, packings: list[int]
) -> None:
    moechat.load(
        checkpoint, dense_bits=16
    ).close()  # converted, so that only the packed file is written in the child
    done = subprocess.run([sys.executable, "-c", _KILLED, str(checkpoint)], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    (left,) = files(moechat_home)
    assert left.name.startswith(".")
    first = logits(checkpoint)
    assert packings
    (path,) = files(moechat_home)  # what was left is gone
    assert not path.name.startswith(".")
    packings.clear()
    assert torch.equal(logits(checkpoint), first)
    assert packings == []
