"""Checkpoints that become unreadable while they are converted: an error, and nothing wrong is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store_support import beside, mixtral_plan, tree

from moechat.errors import CheckpointError
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.progress import ConvertProgress, ProgressCallback
from moechat.store.store import Store


def run(source: Path, destination: Path, progress: ProgressCallback | None = None) -> Store:
    checkpoint = Checkpoint.open(source)
    return convert(
        checkpoint, mixtral_plan(checkpoint), destination, bits=4, source_name="x", progress=progress
    )


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("experts", r"could not be read while it was in use: byte \d+"),  # mapped
        ("dense", "it was longer a moment ago"),
    ],
)
def test_a_source_that_is_cut_short_is_an_error_and_nothing_of_it_is_kept(
    stage: str, message: str, mixtral: Path, tmp_path: Path
) -> None:
    run(mixtral, tmp_path / "reference" / "m")
    shards = sorted(mixtral.glob("*.safetensors"))
    contents = {shard: (shard.read_bytes(), shard.stat().st_mtime_ns) for shard in shards}
    destination = tmp_path / "library" / "m"

    def cut(event: ConvertProgress) -> None:
        if event.stage == stage:
            for shard in shards:
                os.truncate(shard, 4096)

    with pytest.raises(CheckpointError, match=message):
        run(mixtral, destination, cut)
    assert not destination.exists()
    # As after an error of the disk: the file is what it was, so the conversion goes on where it ended.
    for shard, (content, written) in contents.items():
        shard.write_bytes(content)
        os.utime(shard, ns=(written, written))
    run(mixtral, destination)
    assert tree(destination) == tree(tmp_path / "reference" / "m")
    assert beside(destination) == []
