"""``moechat list``, ``show`` and ``rm``: what is here, and how it goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import Cli
from hub_server import COMMIT, REPOSITORY, Hub

from moechat.store.lock import exclusive_lock
from moechat.store.store import Store
from moechat.store.workspace import lock_path, workspace_path

STORE = "tiny--moe-chat-4bit"


@pytest.fixture(scope="module")
def stored(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as a download leaves it."""
    from moechat.models.checkpoint_mapping import plan_checkpoint
    from moechat.store.checkpoint import Checkpoint
    from moechat.store.convert import convert

    opened = Checkpoint.open(checkpoint)
    place = tmp_path_factory.mktemp("made") / STORE
    convert(opened, plan_checkpoint(opened), place, bits=4, source_name=REPOSITORY, revision=COMMIT)
    return place


@pytest.fixture
def library(tmp_path: Path, stored: Path) -> Cli:
    """The program with that store in its library."""
    import shutil

    cli = Cli(directory=tmp_path, home=tmp_path / "home")
    shutil.copytree(stored, cli.home / "data" / "models" / STORE)
    return cli


def models(cli: Cli) -> Path:
    return cli.home / "data" / "models"


def test_the_list_shows_name_commit_bits_size_and_last_use(library: Cli) -> None:
    first = library.call("list")
    assert first.status == 0
    header, line, demo = first.out.decode().splitlines()
    assert header.split() == ["name", "experts", "size", "last", "used"]
    assert line.split() == [f"{REPOSITORY}@{COMMIT[:12]}", "4", "bits", "984", "KiB", "never"]
    assert demo.startswith("demo (in the package)")
    assert library.call("run", f"{REPOSITORY}@{COMMIT[:12]}", "a", "--max-tokens", "1").status == 0
    assert library.call("ls").out.decode().splitlines()[1].endswith("just now")
    (entry,) = json.loads(library.call("list", "--json").out)
    assert entry["repository"] == REPOSITORY
    assert entry["commit"] == COMMIT
    assert (entry["bits"], entry["experts"]) == (4, "4 bits")
    assert entry["path"] == str(models(library) / STORE)
    assert abs(entry["used"] - time.time()) < 60


def test_an_empty_library_says_how_to_fill_it(tmp_path: Path) -> None:
    empty = Cli(directory=tmp_path, home=tmp_path / "home")
    done = empty.call("list")
    assert done.status == 0
    assert [line.split()[0] for line in done.out.decode().splitlines()] == ["name", "demo"]
    assert "moechat download MODEL" in done.err
    assert empty.call("list", "--json").out.strip() == b"[]"
    assert not empty.home.exists()


def test_list_and_show_and_rm_import_no_torch(library: Cli) -> None:
    code = (
        "import sys; from moechat.cli.main import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules);"
        "assert not heavy, heavy; assert sys.argv[1] != 'list' or 'numpy' not in sys.modules;"
        "sys.exit(status)"
    )
    for arguments in (["list"], ["list", "--json"], ["show", REPOSITORY], ["rm", REPOSITORY, "--yes"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=library.environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()


def test_show_describes_a_model(library: Cli) -> None:
    text = library.call("show", REPOSITORY).out.decode()
    for part in ("qwen3_moe", "1.1 million", "8 a layer, 2 a token", "984 KiB", "apache-2.0", COMMIT):
        assert part in text
    facts = json.loads(library.call("show", REPOSITORY, "--json").out)
    assert facts["parameters"] == 1_142_784
    assert facts["active_parameters"] == 405_504 - 260 * 64  # one row of the embedding is read
    assert (facts["layers"], facts["expert_layers"], facts["experts"], facts["top_k"]) == (5, 5, 8, 2)
    assert facts["expert_bytes"] + facts["dense_bytes"] < facts["bytes"]
    demo = json.loads(library.call("show", "demo", "--json").out)
    assert demo["experts"] == 16


def test_show_of_a_model_that_is_not_here_names_what_shows_it(library: Cli, checkpoint: Path) -> None:
    missing = library.call("show", "mixtral")
    assert missing.status == 3
    assert "not in the library" in missing.err
    assert "`moechat plan mixtral`" in missing.err
    assert "`moechat download mixtral --dry-run`" in missing.err
    unknown = library.call("show", "org/name").err
    assert "moechat download org/name --dry-run" in unknown
    assert "moechat plan" not in unknown
    assert "did you mean mixtral?" in library.call("show", "mixtrall").err
    assert f"`moechat plan {checkpoint}`" in library.call("show", str(checkpoint)).err
    assert "`moechat list`" in library.call("show", REPOSITORY, "--bits", "8").err


def test_rm_on_a_terminal_removes_only_after_a_yes(library: Cli) -> None:
    without = library.call("rm", REPOSITORY)
    assert without.status == 2
    assert "--yes" in without.err
    for answer, status in (("n", 1), ("y", 0)):
        terminal = library.terminal("rm", REPOSITORY)
        terminal.expect("Remove 984 KiB")
        terminal.sendline(answer)
        terminal.wait()
        assert terminal.exitstatus == status
        assert (models(library) / STORE).exists() is (answer == "n")
    assert list(models(library).iterdir()) == []


def test_rm_refuses_a_model_that_is_in_use(library: Cli) -> None:
    store = Store.open(models(library) / STORE)
    store.hold()
    for names in ([REPOSITORY], [STORE], [str(models(library) / STORE)], [f"{REPOSITORY}@{COMMIT}"]):
        done = library.call("rm", *names, "--yes")
        assert done.status == 8
        assert "is in use by a running moechat" in done.err
    store.release()
    with exclusive_lock(lock_path(store.path)):
        assert "is being converted right now" in library.call("rm", REPOSITORY, "--yes").err
    assert library.call("rm", REPOSITORY, "--yes").status == 0


def test_an_engine_locks_its_store_until_it_is_closed(library: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import moechat

    monkeypatch.setenv("MOECHAT_HOME", str(library.home))
    left = [models(library) / f".{STORE}{end}" for end in (".partial", ".lock")]
    left[0].mkdir()
    left[1].touch()
    engine = moechat.load(models(library) / STORE)
    assert not any(path.exists() for path in left)  # of a conversion on a disk that failed
    assert "in use" in library.call("rm", REPOSITORY, "--yes").err
    engine.close()
    assert library.call("rm", REPOSITORY, "--yes").status == 0


def test_rm_takes_damaged_stores_and_chosen_bits(library: Cli) -> None:
    other = models(library) / "tiny--moe-chat-8bit"
    other.mkdir()
    (other / "manifest.json").write_text("{")
    assert "(damaged)" in library.call("list").out.decode()
    assert library.call("show", "tiny--moe-chat-8bit").status == 6
    assert library.call("rm", REPOSITORY, "--bits", "8", "--yes").status == 3
    assert library.call("rm", "tiny--moe-chat-8bit", "--yes").status == 0
    assert not other.exists()
    assert (models(library) / STORE).exists()


def test_leftovers_are_listed_and_removed_unless_in_use(library: Cli) -> None:
    left = workspace_path(models(library) / "org--big-4bit")
    left.mkdir()
    (left / "journal.json").write_bytes(os.urandom(100_000))
    source = library.home / "data" / "sources" / f"org--big@{COMMIT[:12]}"
    source.mkdir(parents=True)
    kept = source.with_name("org--kept@0123")
    kept.mkdir()
    (kept / ".kept").touch()
    assert "unfinished downloads and conversions take" in library.call("list").err
    with exclusive_lock(models(library) / ".org--big-4bit.lock"):
        assert "a running download or conversion uses it" in library.call("rm", "--leftovers", "--yes").err
    assert left.exists()
    assert library.call("rm", "org/big", "--yes").status == 0
    assert not left.exists()
    assert not source.exists()
    assert kept.exists()
    assert "there are no leftovers" in library.call("rm", "--leftovers", "--yes").err
    assert (models(library) / STORE).exists()


def test_rm_of_an_unknown_model_removes_nothing(library: Cli, hub: Hub) -> None:
    done = library.call("rm", REPOSITORY, "org/none", "--yes")
    assert done.status == 3
    assert (models(library) / STORE).exists()
    assert library.call("rm").status == 2
    assert library.call("rm", "demo", "--yes").status == 2
    assert hub.requests == []


def test_a_converted_directory_runs_by_its_listed_name(
    library: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    import moechat

    place = tmp_path / "away" / "small"
    shutil.copytree(checkpoint, place)
    monkeypatch.setenv("MOECHAT_HOME", str(library.home))
    moechat.load(place, bits=8).close()
    shutil.rmtree(place.parent)
    (store,) = models(library).glob("small-*")
    for name in ("small", store.name, STORE):
        done = library.call("run", name, "a", "--max-tokens", "1")
        assert done.status == 0, done.err
    facts = [json.loads(library.call("show", name, "--json").out) for name in ("small", store.name)]
    assert [fact["path"] for fact in facts] == [str(store)] * 2
    refused = library.call("run", "small", "a", "--bits", "4")
    assert refused.status == 2
    assert "small is stored with 8 bits, not 4" in refused.err
    assert library.call("plan", "small").status == 0
