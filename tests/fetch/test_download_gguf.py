"""GGUF models from the hub: chosen by type or file, planned from headers, fetched, converted, let go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from cli_support import Cli
from gguf.constants import GGMLQuantizationType as Kind
from gguf_families import FAMILIES
from gguf_family import gguf_tensors, random_model
from gguf_support import save_model, tensors_of, write_gguf
from gguf_writing import all_as, write_family
from hub_server import COMMIT, Faults, Hub
from library_support import models, sources
from transformers import AutoTokenizer

import moechat
from moechat.fetch.gguf_repository import gguf_models
from moechat.fetch.repository import RemoteFile, RemoteRepository
from moechat.hub.names import resolve
from moechat.loading.stores import open_store

REPOSITORY = "tiny/moe-GGUF"
DEMO = Path(moechat.__file__).parent / "hub" / "demo"


def _kinds(kind: Kind):  # type: ignore[no-untyped-def]
    return lambda name, shape: Kind.F32 if len(shape) == 1 or "ffn_gate_inp" in name else kind


@pytest.fixture(scope="session")
def gguf_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository like those of people who quantise: several types, one in parts, and what is no model."""
    work = tmp_path_factory.mktemp("gguf-hub")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    config = save_model("olmoe", work / "source", vocab_size=len(tokenizer))
    tensors = tensors_of(work / "source")
    directory = work / "repository"
    (directory / "Q8_0").mkdir(parents=True)
    write_gguf(
        "olmoe", config, tensors, directory / "moe-Q4_K_M.gguf", _kinds(Kind.Q4_K), tokenizer=tokenizer
    )
    write_gguf(
        "olmoe",
        config,
        tensors,
        directory / "Q8_0" / "moe-Q8_0.gguf",
        _kinds(Kind.Q8_0),
        tokenizer=tokenizer,
        parts=2,
    )
    (directory / "mmproj-moe-f16.gguf").write_bytes(b"GGUF")
    (directory / "README.md").write_text("---\nlicense: mit\n---\n# Quants\n")
    return directory


@pytest.fixture
def quants(hub: Hub, gguf_directory: Path) -> Hub:
    hub.add(REPOSITORY, gguf_directory)
    return hub


def same_files(one: Path, other: Path) -> bool:
    names = {path.name for path in one.glob("*.safetensors")}
    return names == {path.name for path in other.glob("*.safetensors")} and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


@pytest.mark.parametrize(("variant", "local"), [("q4_k_m", "moe-Q4_K_M.gguf"), ("Q8_0", "Q8_0")])
def test_a_gguf_download_gives_the_same_store_as_converting_the_file(
    inside: Cli, quants: Hub, gguf_directory: Path, variant: str, local: str
) -> None:
    done = inside.call("download", f"{REPOSITORY}:{variant}")
    assert done.status == 0, done.err
    store = models(inside) / f"tiny--moe-GGUF+{variant.upper()}-kept"
    manifest = json.loads((store / "manifest.json").read_text())
    assert manifest["source"]["name"] == f"{REPOSITORY}:{variant.upper()}"
    assert manifest["source"]["revision"] == COMMIT
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= manifest["files"].keys()
    assert not any(path.is_dir() for path in sources(inside).iterdir())
    asked = {request.path.rpartition("/")[2] for request in quants.requests if "/resolve/" in request.path}
    assert all(variant.lower() in name.lower() or name == "README.md" for name in asked)
    reference = open_store(resolve(str(gguf_directory / local)), None, lambda _: None)
    assert same_files(store, reference.path)
    again = inside.call("download", f"{REPOSITORY}:{variant}")
    assert "is here already" in again.err
    listed = json.loads(inside.call("list", "--json").out)
    assert [(model["name"], model["repository"]) for model in listed] == [
        (f"{REPOSITORY}:{variant.upper()}", REPOSITORY)
    ]
    answer = inside.call("run", f"{REPOSITORY}:{variant}", "--completion", "Once", "--max-tokens", "3")
    assert answer.status == 0, answer.err
    by_commit = inside.call("show", f"{REPOSITORY}@{COMMIT[:12]}:{variant}", "--json")
    assert by_commit.status == 0, by_commit.err
    assert inside.call("rm", "--yes", f"{REPOSITORY}:{variant}").status == 0
    assert inside.call("list", "--json").out == b"[]\n"


def test_factors_of_frequencies_are_read_from_the_hub(inside: Cli, hub: Hub, tmp_path: Path) -> None:
    """They are tensors of the file, and part of the configuration."""
    family = FAMILIES["phimoe"]
    config = family.config(num_hidden_layers=1)
    tensors = gguf_tensors(family, random_model(config))
    (tmp_path / "phi").mkdir()
    write_family(family, config, tensors, tmp_path / "phi" / "phi-Q8_0.gguf", all_as(Kind.Q8_0), parts=2)
    hub.add("tiny/phi-GGUF", tmp_path / "phi")
    done = inside.call("download", "tiny/phi-GGUF")
    assert done.status == 0, done.err
    stored = json.loads((models(inside) / "tiny--phi-GGUF-kept" / "config.json").read_text())
    for kind in ("short_factor", "long_factor"):
        assert stored["rope_parameters"][kind] == pytest.approx(config.rope_parameters[kind])


def test_a_dry_run_reads_the_header_and_nothing_else(inside: Cli, quants: Hub) -> None:
    done = inside.call("download", f"{REPOSITORY}:moe-Q4_K_M.gguf", "--dry-run")
    assert done.status == 0, done.err
    assert f"{REPOSITORY}@{COMMIT[:12]}, licence apache-2.0" in done.out.decode()
    size = len(quants.repositories[REPOSITORY]["moe-Q4_K_M.gguf"])
    assert "in 1 file of weights and 1 other" in done.out.decode()
    ranged = [request for request in quants.requests if "/cdn/" in request.path]
    assert all(request.range.startswith("bytes=0-") for request in ranged)
    assert sum(request.sent for request in ranged) <= size
    assert not inside.home.exists()


def test_the_files_are_listed_if_none_or_several_match(inside: Cli, quants: Hub) -> None:
    several = inside.call("download", REPOSITORY)
    assert several.status == 2
    assert "has 2 GGUF models: Q8_0/moe-Q8_0-00001-of-00002.gguf (" in several.err
    assert "moe-Q4_K_M.gguf (" in several.err
    assert f"hint: name one by its type or file: moechat download {REPOSITORY}:Q4_K_M" in several.err
    none = inside.call("download", f"{REPOSITORY}:Q2_K")
    assert (none.status, "has no such GGUF model for Q2_K" in none.err) == (2, True), none.err
    del quants.repositories[REPOSITORY]["Q8_0/moe-Q8_0-00002-of-00002.gguf"]
    part = inside.call("download", f"{REPOSITORY}:Q8_0")
    assert (part.status, "lacks 1 of the 2 parts" in part.err) == (3, True), part.err
    del quants.repositories[REPOSITORY]["Q8_0/moe-Q8_0-00001-of-00002.gguf"]
    alone = inside.call("download", REPOSITORY, "--dry-run")
    assert alone.status == 0, alone.err


def test_models_in_a_thousand_parts_are_grouped_quickly() -> None:
    def parts(stem: str, count: int) -> list[str]:
        return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]

    expected = {stem: parts(stem, 1000) for stem in ("Q8_0/a", "Q8_0/b", "a", "b")}
    expected["Q8_0/a-less"] = parts("Q8_0/a", 999)
    expected["b-lacking"] = parts("b", 500)[1:]
    names = [name for model in expected.values() for name in reversed(model)]
    files = {name: RemoteFile(name, 1, "0", None) for name in names}
    started = time.process_time()
    found = gguf_models(RemoteRepository(REPOSITORY, None, COMMIT, files, None))
    assert time.process_time() - started < 2
    assert sorted([file.path for file in model] for model in found.values()) == sorted(expected.values())
    assert "b-00001-of-00500.gguf" in found  # the first part's name, though it is not there


def test_a_file_named_as_part_1_of_0_does_not_hide_the_others(inside: Cli, quants: Hub) -> None:
    quants.repositories[REPOSITORY]["x-00001-of-00000.gguf"] = b"GGUF"
    done = inside.call("download", f"{REPOSITORY}:Q4_K_M", "--dry-run")
    assert done.status == 0, done.err
    several = inside.call("download", REPOSITORY)
    assert (several.status, "has 3 GGUF models" in several.err) == (2, True), several.err


def test_kept_files_stay_whatever_their_names(inside: Cli, quants: Hub, gguf_directory: Path) -> None:
    name = "header.gguf"
    content = (gguf_directory / "moe-Q4_K_M.gguf").read_bytes()
    quants.repositories[REPOSITORY] = {name: content}
    assert inside.call("download", REPOSITORY, "--keep-source").status == 0
    (directory,) = (path for path in sources(inside).iterdir() if path.is_dir())
    assert (directory / name).read_bytes() == content
    (store,) = models(inside).iterdir()
    shutil.rmtree(store)
    quants.requests.clear()
    again = inside.call("download", REPOSITORY)
    assert again.status == 0, again.err
    asked = [request.range for request in quants.requests if "/cdn/" in request.path]
    assert not any(wanted.endswith("-") or not wanted for wanted in asked), asked  # headers only
    assert (directory / name).read_bytes() == content


def test_a_partly_written_tokenizer_is_written_again(inside: Cli, quants: Hub) -> None:
    name = f"{REPOSITORY}:Q4_K_M"
    assert inside.call("download", name, "--keep-source").status == 0
    (directory,) = (path for path in sources(inside).iterdir() if path.is_dir())
    (store,) = models(inside).iterdir()
    expected = (store / "tokenizer.json").read_bytes()
    shutil.rmtree(store)
    (directory / "tokenizer.json").write_bytes(expected[: len(expected) // 2])
    again = inside.call("download", name)
    assert again.status == 0, again.err
    assert (store / "tokenizer.json").read_bytes() == expected


def test_an_interrupted_download_is_resumed(inside: Cli, quants: Hub, gguf_directory: Path) -> None:
    name = f"{REPOSITORY}:Q4_K_M"
    size = len(quants.repositories[REPOSITORY]["moe-Q4_K_M.gguf"])
    quants.faults = Faults(
        pace_s=0.01, reached=size // 2, at_reached=lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    stopped = inside.call("download", name)
    assert stopped.status == 130, stopped.err
    (directory,) = (path for path in sources(inside).iterdir() if path.is_dir())
    part = directory / "moe-Q4_K_M.gguf.part"
    before = part.stat().st_size
    assert before >= size // 4
    quants.faults = Faults(cuts=2, cut_after=size // 8)
    quants.requests.clear()
    done = inside.call("download", name)
    assert done.status == 0, done.err
    fetched = sum(r.sent for r in quants.requests if "/cdn/" in r.path and r.range.endswith("-"))
    assert fetched == size - before
    reference = open_store(resolve(str(gguf_directory / "moe-Q4_K_M.gguf")), None, lambda _: None)
    assert same_files(models(inside) / "tiny--moe-GGUF+Q4_K_M-kept", reference.path)


def test_rm_of_one_type_keeps_the_partial_files_of_others(inside: Cli, quants: Hub) -> None:
    for name in ("Q4_K_M", "moe-Q4_K_M.gguf", "Q8_0"):
        assert inside.call("download", f"{REPOSITORY}:{name}", "--keep-source").status == 0
    one, other = (
        next(path.parent for path in sources(inside).rglob(f"*{name}*.gguf")) for name in ("Q4_K_M", "Q8_0")
    )
    while other.parent != sources(inside):
        other = other.parent
    (other / ".kept").unlink()  # as if it had been interrupted
    assert (one / ".variants").read_text() == "Q4_K_M\nmoe-Q4_K_M.gguf\n"
    assert inside.call("rm", f"{REPOSITORY}:Q4_K_M", "--sources", "--yes").status == 0
    assert not one.exists()
    assert other.exists()
    assert inside.call("rm", f"{REPOSITORY}:Q8_0", "--yes").status == 0
    assert not other.exists()


def test_an_altered_header_or_file_is_refused(inside: Cli, quants: Hub) -> None:
    quants.faults.alter = "moe-Q4_K_M.gguf"
    altered = inside.call("download", f"{REPOSITORY}:Q4_K_M")
    assert (altered.status, "was altered on its way" in altered.err) == (3, True), altered.err
    quants.faults = Faults()
    quants.repositories[REPOSITORY]["moe-Q4_K_M.gguf"] = b"GGUF" + bytes(10_000)
    other = inside.call("download", f"{REPOSITORY}:Q4_K_M")
    assert (other.status, "GGUF version 0" in other.err) == (3, True), other.err
