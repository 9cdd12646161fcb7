"""``moechat download`` of a repository with quantised weights: the store of converting its directory."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import Cli
from hub_server import Hub
from library_support import STORE, hashes, models
from quantised_support import change_config, fp8, integers, nvfp4, write_pair, write_source

from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert


def test_shards_are_decoded_as_they_arrive(inside: Cli, hub: Hub, tmp_path: Path) -> None:
    source, packed = write_source(tmp_path / "source", shape=1), tmp_path / "packed"
    settings = {"quant_method": "fp8", "weight_block_size": [48, 40]}
    write_pair(
        source,
        packed,
        tmp_path / "decoded",
        fp8((48, 40)),
        settings,
        shard_of=lambda name: 1 + sum(map(ord, name)) % 4,  # scales are not beside their weights
    )
    opened = Checkpoint.open(packed)
    convert(opened, plan_checkpoint(opened), tmp_path / "expected", bits=4, source_name="x")
    hub.add("tiny/moe-fp8", packed)
    dry = inside.call("download", "tiny/moe-fp8", "--dry-run")
    assert "with 4 bits (the files have FP8 in blocks of 48 x 40), in" in dry.out.decode(), dry.err
    done = inside.call("download", "tiny/moe-fp8")
    assert done.status == 0, done.err
    assert (
        "experts are FP8 in blocks of 48 x 40 in the checkpoint; they are quantised again, to 4" in done.err
    )
    name = STORE.replace("moe-chat", "moe-fp8")
    assert hashes(models(inside) / name) == hashes(tmp_path / "expected")
    shown = json.loads(inside.call("show", "tiny/moe-fp8", "--json").out)
    assert shown["source_format"] == "FP8 in blocks of 48 x 40"
    assert "made from   FP8 in blocks" in inside.call("show", "tiny/moe-fp8").out.decode()
    planned = inside.call("plan", "tiny/moe-fp8", "-v")
    assert "4 bits (the checkpoint has FP8 in blocks of 48 x 40)" in planned.out.decode(), planned.err


def test_settings_in_a_file_of_their_own_are_fetched_first(inside: Cli, hub: Hub, tmp_path: Path) -> None:
    source, packed = write_source(tmp_path / "source"), tmp_path / "packed"
    write_pair(source, packed, tmp_path / "decoded", nvfp4(divides=False), None)
    (packed / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    hub.add("tiny/moe-nvfp4", packed)
    done = inside.call("download", "tiny/moe-nvfp4", "--bits", "16")
    assert done.status == 0, done.err
    assert "experts are NVFP4 in the checkpoint; they are stored with 16 bits" in done.err
    opened = Checkpoint.open(packed)
    convert(opened, plan_checkpoint(opened), tmp_path / "expected", bits=16, source_name="x")
    made = models(inside) / STORE.replace("moe-chat-4bit", "moe-nvfp4-16bit")
    assert hashes(made) == hashes(tmp_path / "expected")


def test_what_contradicts_itself_is_refused_before_a_weight_is_fetched(
    inside: Cli, hub: Hub, tmp_path: Path
) -> None:
    source, packed = write_source(tmp_path / "source"), tmp_path / "packed"
    settings = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    write_pair(source, packed, tmp_path / "decoded", fp8((64, 64)), settings)
    change_config(packed, quantization_config={**settings, "weight_block_size": [128, 128]})
    hub.add("tiny/moe-odd", packed)
    done = inside.call("download", "tiny/moe-odd")
    assert done.status == 3
    assert "in blocks of 128 x 128 it would be" in done.err
    planned = inside.call("plan", str(packed))
    assert planned.status == 0, planned.err
    assert "note   the weights cannot be loaded:" in planned.out.decode()
    assert not models(inside).exists()


def test_what_a_kernel_reads_is_kept_and_named(inside: Cli, hub: Hub, tmp_path: Path) -> None:
    source, packed = write_source(tmp_path / "source"), tmp_path / "packed"
    weights = {"num_bits": 4, "type": "int", "group_size": 32}
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group": {"targets": ["Linear"], "weights": weights}},
    }
    write_pair(source, packed, tmp_path / "decoded", integers(4, 32), settings)
    hub.add("tiny/moe-int4", packed)
    done = inside.call("download", "tiny/moe-int4")
    assert done.status == 0, done.err
    assert "quantised again" not in done.err
    shown = json.loads(inside.call("show", "tiny/moe-int4", "--json").out)
    assert (shown["experts_form"], shown["source_format"]) == ("Q4_0", "4-bit integers in groups of 32")
    text = inside.call("show", "tiny/moe-int4").out.decode()
    assert "kept as     Q4_0" in text
    assert "made from   4-bit integers in groups of 32" in text
    planned = inside.call("plan", "tiny/moe-int4", "-v").out.decode()
    assert "Q4_0 (the checkpoint has 4-bit integers in groups of 32)" in planned
