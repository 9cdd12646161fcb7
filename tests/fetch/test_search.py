"""``moechat search``: models on the hub with size and speed on this machine, and why others do not run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli
from hub_server import COMMIT, REPOSITORY, Faults, Hub
from tiny import tiny_config

from moechat.cli.commands.search import SearchCommand
from moechat.errors import UsageError

DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.fixture
def shelf(hub: Hub) -> Iterator[Hub]:
    """A hub with a model that runs, GGUF files of it, and all kinds of others."""
    before, weights = hub.repositories, {"model.safetensors": b"weights"}
    config = json.loads(before[REPOSITORY]["config.json"])
    packed = json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}}).encode()
    hub.repositories = {
        REPOSITORY: before[REPOSITORY],
        "people/moe-chat-GGUF": {"moe-chat-Q8_0.gguf": bytes(3000), "moe-chat-Q4_K_M.gguf": bytes(2000)},
        "people/moe-orphan-GGUF": {"moe-orphan-Q8_0.gguf": bytes(3000)},
        "dense/moe-not-at-all": {"config.json": json.dumps(DENSE).encode(), **weights},
        "new/moe-strange": {"config.json": b'{"model_type": "strange"}', **weights},
        "new/moe-packed": {"config.json": packed, **weights},
        "new/moe-broken": {"config.json": b"{", **weights},
        "old/moe-pickled": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
    }
    hub.tags["people/moe-chat-GGUF"] = ["gguf", f"base_model:quantized:{REPOSITORY}"]
    yield hub
    hub.repositories = before


def found(program: Cli, *arguments: str) -> dict[str, dict[str, Any]]:
    done = program.call("search", *arguments, "--json", "--quiet")
    assert done.status == 0, done.err
    assert done.err == ""
    return {entry["repository"]: entry for entry in json.loads(done.out)}


def test_models_that_run_come_with_size_and_speed_and_others_with_a_reason(inside: Cli, shelf: Hub) -> None:
    entries = found(inside, "moe")
    assert list(entries)[:2] == [REPOSITORY, "people/moe-chat-GGUF"]
    maker, files = entries[REPOSITORY], entries["people/moe-chat-GGUF"]
    assert (maker["name"], maker["commit"], maker["licence"]) == (REPOSITORY, COMMIT, "apache-2.0")
    assert maker["download_bytes"] == sum(
        len(data) for name, data in shelf.repositories[REPOSITORY].items() if name.endswith(".safetensors")
    )
    assert (maker["bits"], maker["refused"], maker["base"]) == (4, None, None)
    assert maker["speed"]["tokens_per_s"] > 0
    assert maker["speed"]["basis"] == "assumed"
    assert maker["speed"]["active_parameters"] < maker["speed"]["parameters"]
    assert (files["name"], files["base"]) == ("people/moe-chat-GGUF:moe-chat-Q4_K_M.gguf", REPOSITORY)
    assert files["speed"]["parameters"] == maker["speed"]["parameters"]
    reasons = {name: entry["refused"] for name, entry in entries.items() if entry["speed"] is None}
    assert list(reasons) == [
        "people/moe-orphan-GGUF",
        "dense/moe-not-at-all",
        "new/moe-strange",
        "new/moe-packed",
        "new/moe-broken",
        "old/moe-pickled",
    ]
    assert "name no model that they were made from" in reasons["people/moe-orphan-GGUF"]
    assert "experts" in reasons["dense/moe-not-at-all"]
    assert "strange" in reasons["new/moe-strange"]
    assert "new/moe-packed are packed with 'bitsandbytes'; moechat reads" in reasons["new/moe-packed"]
    assert "new/moe-broken is not valid JSON" in reasons["new/moe-broken"]
    assert "no weights as safetensors or GGUF files" in reasons["old/moe-pickled"]
    assert not inside.home.exists()
    assert shelf.sent(".safetensors") == shelf.sent(".gguf") == 0


def test_the_size_of_the_store_is_that_of_the_download(inside: Cli, shelf: Hub) -> None:
    planned = json.loads(inside.call("download", REPOSITORY, "--dry-run", "--json").out)
    store = found(inside, "moe-chat")[REPOSITORY]["speed"]["store_bytes"]
    # Tokenizer and other small files are extra.
    assert 0.5 * planned["store_bytes"] < store < planned["store_bytes"]


def test_the_text_has_a_table_and_the_reasons(inside: Cli, shelf: Hub) -> None:
    done = inside.call("search", "MOE")
    assert done.status == 0, done.err
    lines = done.out.decode().splitlines()
    assert lines[0].split() == ["name", "parameters", "download", "store", "tokens", "a", "second"]
    assert lines[1].startswith(f"{REPOSITORY} ")
    assert "4 bits" in lines[1]
    assert lines[2].startswith("people/moe-chat-GGUF:moe-chat-Q4_K_M.gguf ")
    assert lines[3:5] == ["", "not run here:"]
    assert lines[6].startswith("  dense/moe-not-at-all: ")
    assert "this machine has not been measured (`moechat profile`, 20 s)" in done.err


def test_words_limit_and_bits_are_taken(inside: Cli, shelf: Hub) -> None:
    assert list(found(inside, "chat", "moe", "gguf")) == ["people/moe-chat-GGUF"]
    assert len(found(inside, "moe", "--limit", "2")) == 2
    eight = found(inside, "moe-chat", "--bits", "8")
    assert eight[REPOSITORY]["bits"] == eight[REPOSITORY]["speed"]["bits"] == 8
    nothing = inside.call("search", "zebra")
    assert (nothing.status, nothing.out) == (0, b"")
    assert "no model on the hub has 'zebra' in its name" in nothing.err
    assert found(inside, "zebra") == {}
    wrong = inside.call("search", "moe", "--limit", "51")
    assert wrong.status == 2
    assert "--limit" in wrong.err
    with pytest.raises(UsageError, match="WORDS is missing"):
        SearchCommand((" ",))


def test_a_model_larger_than_the_memory_is_refused_with_both_sizes(
    inside: Cli, shelf: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.planning import machine

    config = tiny_config("qwen3_moe", 0, hidden_size=4096, vocab_size=150_000, num_hidden_layers=40)
    shelf.repositories["big/moe-large"] = {
        "config.json": config.to_json_string().encode(),
        "model.safetensors": b"weights",
    }
    monkeypatch.setattr(machine, "available_bytes", lambda: 600 << 20)
    entry = found(inside, "moe-large")["big/moe-large"]
    assert "the memory that is available is" in entry["refused"]
    assert "the least that works is" in entry["refused"]


def test_files_that_may_not_be_read_are_refused_and_the_search_goes_on(inside: Cli, shelf: Hub) -> None:
    shelf.faults = Faults(gated=True)
    entries = found(inside, "moe-chat")
    assert {name: "gated" in entry["refused"] for name, entry in entries.items()} == {
        REPOSITORY: True,
        "people/moe-chat-GGUF": True,
    }


def test_a_hub_that_cannot_be_reached_or_is_none_is_an_error(
    inside: Cli, shelf: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    shelf.faults = Faults(status=503, times=1)
    assert list(found(inside, "moe-chat")) == [REPOSITORY, "people/moe-chat-GGUF"]
    shelf.say_raw = b"<html>Log in</html>"
    portal = inside.call("search", "moe")
    assert portal.status == 5
    assert "does not answer like a model hub" in portal.err
    shelf.say_raw = json.dumps([{"id": "../../etc", "downloads": 1, "tags": []}]).encode()
    odd = inside.call("search", "moe")
    assert odd.status == 5
    assert "does not answer like a model hub" in odd.err
    shelf.say_raw = None
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    unreachable = inside.call("search", "moe")
    assert unreachable.status == 5
    assert "127.0.0.1:9 cannot be reached" in unreachable.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = inside.call("search", "moe")
    assert offline.status == 5
    assert "a search needs the hub, and HF_HUB_OFFLINE forbids the network" in offline.err
    assert "hint: unset HF_HUB_OFFLINE; `moechat plan NAME` needs no network" in offline.err


def test_hubs_that_answer_with_too_many_are_cut(inside: Cli, shelf: Hub) -> None:
    many = [{"id": f"org/moe-{number}", "downloads": None, "tags": None} for number in range(30)]
    shelf.say_raw = json.dumps(many).encode()
    from moechat.fetch.search import search_hub

    hits = search_hub(["moe"], 4, pytest.fail)
    assert [hit.repository for hit in hits] == [f"org/moe-{number}" for number in range(4)]
    assert {hit.downloads for hit in hits} == {None}


def test_a_path_for_the_help_of_search_exists(inside: Cli) -> None:
    page = inside.call("search", "--help").out.decode()
    assert "--limit" in page
    assert "Parts of the name of a model." in page


def test_no_weights_are_kept_of_a_search(inside: Cli, shelf: Hub, tmp_path: Path) -> None:
    found(inside, "moe-chat")
    assert not list(tmp_path.rglob("*.safetensors"))
