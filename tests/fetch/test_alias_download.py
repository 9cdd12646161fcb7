"""``download`` and ``run`` of an alias: the source is chosen, described with its speed, and found again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import Cli
from gguf.constants import GGMLQuantizationType as Kind
from gguf_support import save_model, tensors_of, write_gguf
from hub_server import Hub
from library_support import models
from transformers import AutoTokenizer

import moechat
from moechat.config import user_paths
from moechat.fetch import sources
from moechat.hub.names import resolve

MAKER, FP8, GGUF = "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.6-35B-A3B-FP8", "unsloth/Qwen3.6-35B-A3B-GGUF"
DEMO = Path(moechat.__file__).parent / "hub" / "demo"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GGUF files: Q8_0, Q4_0, and one of an unknown architecture."""
    work = tmp_path_factory.mktemp("alias-gguf")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    config = save_model("olmoe", work / "source", vocab_size=len(tokenizer))
    tensors = tensors_of(work / "source")
    directory = work / "repository"
    directory.mkdir()
    for name, kind in (("Q8_0", Kind.Q8_0), ("Q4_0", Kind.Q4_0)):
        write_gguf(
            "olmoe",
            config,
            tensors,
            directory / f"Qwen3.6-35B-A3B-{name}.gguf",
            lambda tensor, shape, kind=kind: Kind.F32 if len(shape) == 1 or "gate_inp" in tensor else kind,
            tokenizer=tokenizer,
        )
    return directory


@pytest.fixture
def offers(hub: Hub, checkpoint: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The maker's repository, whose stand-in is a tiny random chat model, and the GGUF files of others."""
    hub.add(MAKER, checkpoint)
    hub.repositories[MAKER]["model-of-pictures.safetensors"] = bytes(16 << 20)
    hub.add(GGUF, files)
    # A shape whose speed is estimated at once.
    monkeypatch.setattr(sources, "find_shape", lambda _: "olmoe-1b-7b")
    yield hub
    for name in (MAKER, FP8, GGUF):
        hub.repositories.pop(name, None)


def without(hub: Hub, *names: str) -> None:
    for name in names:
        hub.repositories.pop(name)


def lines_of(text: str) -> dict[str, str]:
    return {line.split()[0]: line for line in text.splitlines() if line.strip()}


def test_an_alias_shows_source_size_memory_and_speed_before_anything_is_downloaded(
    inside: Cli, offers: Hub
) -> None:
    done = inside.call("run", "qwen3.6", "--dry-run")
    assert done.status == 0, done.err
    shown = lines_of(done.out.decode())
    assert f"({FP8} is left out: there is no public repository {FP8}" in done.err
    assert shown["source"].startswith(
        "source    Qwen3.6-35B-A3B-Q4_0.gguf, the smallest of 3 downloads that lose hardly anything at 4 "
        f"bits; others: {GGUF}:Qwen3.6-35B-A3B-Q8_0.gguf ("
    )
    assert f"{MAKER} (" in shown["source"]
    assert "Q4_0" in shown["store"]
    assert {"download", "store", "disk", "memory", "speed", "time"} <= shown.keys()
    assert "tokens a second, if this machine is an ordinary desktop: `moechat profile`" in shown["speed"]
    assert offers.sent(".gguf") <= sum(map(len, offers.repositories[GGUF].values()))
    assert not inside.home.exists()
    facts = json.loads(inside.call("download", "qwen3.6", "--dry-run", "--json").out)
    assert facts["name"] == f"{GGUF}:Qwen3.6-35B-A3B-Q4_0.gguf"
    assert facts["source"]["others"][1]["name"] == MAKER
    four = json.loads(inside.call("download", "qwen3.6", "--bits", "4", "--dry-run", "--json").out)
    assert (four["name"], four["bits"]) == (f"{GGUF}:Qwen3.6-35B-A3B-Q8_0.gguf", 4)
    assert facts["speed"]["basis"] == "assumed"
    assert facts["speed"]["tokens_per_s"] > 0


def test_what_was_chosen_is_found_by_the_alias_again(inside: Cli, offers: Hub) -> None:
    done = inside.call("run", "qwen3.6", "--yes", "--completion", "Once", "--max-tokens", "3")
    assert done.status == 0, done.err
    store = models(inside) / "unsloth--Qwen3.6-35B-A3B-GGUF+Qwen3.6-35B-A3B-Q4_0.gguf-kept"
    assert (store / "manifest.json").is_file()
    offers.requests.clear()
    again = inside.call("run", "qwen3.6", "--completion", "Once", "--max-tokens", "3")
    assert (again.status, again.out) == (0, done.out)
    assert offers.requests == []
    shown = inside.call("show", "qwen3.6", "--json")
    assert json.loads(shown.out)["path"] == str(store)
    assert "is here already: moechat run qwen3.6" in inside.call("download", "qwen3.6").err
    assert inside.call("rm", "--yes", "qwen3.6").status == 0
    assert not store.exists()


def test_a_source_that_cannot_be_read_is_passed_over_with_the_reason(
    inside: Cli, offers: Hub, tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    config = save_model("olmoe", tmp_path / "source", vocab_size=len(tokenizer))
    target = odd / "Qwen3.6-35B-A3B-Q8_0.gguf"
    write_gguf(
        "olmoe", config, tensors_of(tmp_path / "source"), target, lambda *_: Kind.F32, tokenizer=tokenizer
    )
    target.write_bytes(target.read_bytes().replace(b"olmoe", b"xlmoe"))
    offers.add(GGUF, odd)
    done = inside.call("download", "qwen3.6", "--dry-run")
    assert done.status == 0, done.err
    assert done.out.decode().startswith(f"{MAKER}@")
    assert "source    the only source" in done.out.decode()
    reason = next(line for line in done.err.splitlines() if "Q8_0.gguf is left out" in line)
    assert "xlmoe" in reason


def test_a_gated_maker_is_passed_over_where_others_have_the_weights(inside: Cli, offers: Hub) -> None:
    without(offers, MAKER)  # the hub answers for gated and private repositories alike
    done = inside.call("download", "qwen3.6", "--dry-run")
    assert done.status == 0, done.err
    assert f"({MAKER} is left out: there is no public repository" in done.err
    assert done.out.decode().startswith(f"{GGUF}@")


def test_without_any_repository_the_error_is_that_of_the_makers(inside: Cli, offers: Hub) -> None:
    without(offers, MAKER, GGUF)
    done = inside.call("download", "qwen3.6", "--dry-run")
    assert done.status == 3
    assert f"error: there is no public repository {MAKER}" in done.err


def test_a_model_too_large_for_the_memory_is_refused_before_it_is_downloaded(
    inside: Cli, offers: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.planning import machine

    monkeypatch.setattr(machine, "available_bytes", lambda: 600 << 20)
    done = inside.call("run", "qwen3.6", "--yes", "Hello")
    assert done.status == 4
    assert "error: qwen3.6 does not fit here: the memory that is available is " in done.err
    assert "; the least that works is " in done.err
    assert "hint: free memory, or choose a smaller model: moechat plan --list-models; " in done.err
    assert not any("/cdn/" in request.path for request in offers.requests)
    given = inside.call("download", "qwen3.6", "--bits", "4", "--dry-run")
    assert given.status == 0, given.err
    assert "speed" in given.out.decode()


def test_without_a_network_and_for_unknown_names_the_errors_say_what_to_do(
    inside: Cli, offers: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    unknown = inside.call("run", "qwen3.5", "Hello")
    assert unknown.status == 3
    assert "hint: did you mean qwen3.6 or qwen3" in unknown.err
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    unreachable = inside.call("run", "qwen3.6", "--yes", "Hello")
    assert unreachable.status == 5
    assert "127.0.0.1:9 cannot be reached" in unreachable.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = inside.call("run", "qwen3.6", "--yes", "Hello")
    assert offline.status == 5
    assert f"{MAKER} is not in the library, and HF_HUB_OFFLINE forbids the network" in offline.err


def test_a_budget_of_the_run_counts_for_what_fits(inside: Cli, offers: Hub) -> None:
    refused = inside.call("run", "qwen3.6", "--yes", "--ram", "700M", "Hello")
    assert refused.status == 4
    assert "the least that works is" in refused.err
    given = inside.call("run", "qwen3.6", "Hello")
    assert given.status == 3
    assert "hint: moechat download qwen3.6, or --yes with the same command" in given.err


def test_a_store_of_another_repository_is_no_source(inside: Cli, offers: Hub) -> None:
    assert inside.call("download", "qwen3.6").status == 0
    store = next(models(inside).iterdir())
    other = store.with_name("unsloth--Qwen3.6-35B-A3B-GGUF-mirror-4bit")
    shutil.move(store, other)
    with pytest.raises(moechat.ModelNotFoundError):
        resolve("qwen3.6", paths=user_paths({"MOECHAT_HOME": str(inside.home)}))
