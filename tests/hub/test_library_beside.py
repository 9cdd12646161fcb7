"""What lies beside the models of the library: unfinished work, kept checkpoints, links, hostile names."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from cli_support import Cli
from hub_server import COMMIT, REPOSITORY, Hub

from moechat.cli.commands import library_remove
from moechat.cli.completion.completers import complete_library
from moechat.store.lock import exclusive_lock

STORE = "tiny--moe-chat-4bit"


def manifest(name: str = REPOSITORY, **other: object) -> str:
    content = {
        "source": {"name": name, "revision": COMMIT},
        "model_type": "olmoe",
        "geometry": {"bits": 4},
        "files": {"layer": {"bytes": 3 << 20}},
        **other,
    }
    return json.dumps(content)


@pytest.fixture
def library(tmp_path: Path) -> Cli:
    """The program with a store in its library, as far as lists look at one."""
    cli = Cli(directory=tmp_path, home=tmp_path / "home")
    add_store(cli)
    return cli


def models(cli: Cli) -> Path:
    return cli.home / "data" / "models"


def sources(cli: Cli) -> Path:
    return cli.home / "data" / "sources"


def add_store(cli: Cli, directory: str = STORE, text: str | None = None) -> Path:
    place = models(cli) / directory
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(text or manifest())
    return place


def fill(directory: Path, *, kept: bool = False, variants: str = "") -> Path:
    directory.mkdir(parents=True)
    (directory / "shard").write_bytes(bytes(2 << 20))
    if variants:
        (directory / ".variants").write_text(variants)
    if kept:
        (directory / ".kept").touch()
    return directory


def test_rm_leaves_the_unfinished_work_of_other_models(library: Cli) -> None:
    own = fill(models(library) / ".tiny--moe-chat-4bit.partial")
    others = [
        fill(models(library) / name)
        for name in (
            ".tiny--moe-chat--v2-4bit.partial",
            ".tiny--moe-chat-v2-4bit.partial",
            ".tiny--moe-chat@v1-4bit.partial",
            ".tiny--moe-chat+Q4_K_M-4bit.partial",
        )
    ]
    assert library.call("rm", REPOSITORY, "--yes").status == 0
    assert not own.exists()
    assert all(other.exists() for other in others)


def test_rm_of_a_revision_takes_only_the_shards_of_that_commit(library: Cli) -> None:
    one, two = (fill(sources(library) / f"tiny--moe-chat@{digit * 12}") for digit in "ab")
    other = fill(sources(library) / f"tiny--moe-chat-v2@{'a' * 12}")
    work = fill(models(library) / ".tiny--moe-chat@v1-4bit.partial")
    assert library.call("rm", f"{REPOSITORY}@v1", "--yes").status == 0
    assert not work.exists()
    assert one.exists()
    assert library.call("rm", f"{REPOSITORY}@{'a' * 40}", "--yes").status == 0
    assert not one.exists()
    assert two.exists()
    assert library.call("rm", f"{REPOSITORY}@{'b' * 7}", "--yes").status == 0
    assert not two.exists()
    assert other.exists()
    assert (models(library) / STORE).exists()


@pytest.mark.parametrize("kept", [False, True])
def test_rm_takes_only_the_shards_of_the_variant_that_is_named(library: Cli, kept: bool) -> None:
    place = f"tiny--moe-chat@{COMMIT[:12]}"
    plain = fill(sources(library) / place, kept=kept)
    one = fill(sources(library) / f"{place}+{'1' * 12}", kept=kept, variants="Q8_0\nmoe-Q8_0.gguf\n")
    fill(sources(library) / f"{place}+{'2' * 12}", kept=kept, variants="Q4_K_M\n")
    only = fill(sources(library) / f"{place}+{'3' * 12}", kept=kept, variants="\n")
    unknown = fill(sources(library) / f"{place}+{'4' * 12}", kept=kept)
    add_store(library, f"{STORE[:-5]}+Q4_K_M-4bit", manifest(f"{REPOSITORY}:Q4_K_M"))
    words = ("--yes", "--sources")

    def left() -> set[Path]:
        return set(sources(library).glob("tiny--*"))

    assert library.call("rm", f"{REPOSITORY}:q4_k_m", *words).status == 0
    assert left() == {plain, one, only}
    assert not unknown.exists(), "of an earlier version: it may be of any"
    assert library.call("rm", f"{REPOSITORY}:Q2_K", *words).status == 3
    assert library.call("rm", REPOSITORY, *words).status == 0
    assert left() == {one}
    assert library.call("rm", f"{REPOSITORY}@{COMMIT}:moe-Q8_0.gguf", *words).status == 0
    assert left() == set()


def test_rm_accepts_the_listed_title_of_a_kept_gguf_checkpoint(library: Cli) -> None:
    kept = fill(
        sources(library) / f"tiny--moe-chat@{COMMIT[:12]}+{'1' * 12}",
        kept=True,
        variants="Q8_0\nother.gguf\n",
    )
    titles = [entry["name"] for entry in json.loads(library.call("list", "--json").out)]
    assert titles == [REPOSITORY, f"{REPOSITORY}@{COMMIT[:12]}:Q8_0"]
    assert library.call("rm", titles[1], "--sources", "--yes").status == 0
    assert not kept.exists()
    assert (models(library) / STORE).exists()


def test_leftovers_in_use_are_skipped(library: Cli) -> None:
    busy = fill(models(library) / ".org--a-4bit.partial")
    shards = fill(sources(library) / f"org--a@{'a' * 12}")
    free = fill(models(library) / ".org--b-4bit.partial")
    with (
        exclusive_lock(models(library) / ".org--a-4bit.lock"),
        exclusive_lock(sources(library) / f".org--a@{'a' * 12}.lock"),
    ):
        said = library.call("list").err
        assert "downloads and conversions that are running take 4.0 MiB so far" in said
        assert "unfinished downloads and conversions take 2.0 MiB" in said
        done = library.call("rm", "--leftovers", "--yes")
        assert done.status == 0
        assert f"a running download or conversion uses it: {busy}" in " ".join(done.err.split())
        assert not free.exists()
        assert busy.exists()
        assert shards.exists()
        assert "unfinished" not in library.call("list").err
        other = fill(models(library) / ".org--c-4bit.partial")
        named = library.call("rm", "org/a", "org/c", "--yes")
        assert named.status == 8
        assert "belongs to a running download or conversion" in named.err
        assert not other.exists()
    assert library.call("rm", "--leftovers", "--yes").status == 0
    assert not busy.exists()
    assert not shards.exists()


def test_kept_checkpoints_are_listed_and_removed_on_request(library: Cli) -> None:
    kept = fill(sources(library) / f"tiny--moe-chat@{COMMIT[:12]}", kept=True)
    other = fill(sources(library) / f"org--other@{COMMIT[:12]}", kept=True)
    listed = library.call("list")
    assert f"the checkpoint of {REPOSITORY}@{COMMIT[:12]} is kept, 2.0 MiB: {kept}" in listed.err
    entries = json.loads(library.call("list", "--json").out)
    assert [entry["kind"] for entry in entries] == ["store", "checkpoint", "checkpoint"]
    assert {tuple(entry) for entry in entries} == {tuple(entries[0])}, "the same keys"
    (shown,) = [entry for entry in entries if entry["path"] == str(kept)]
    assert (shown["repository"], shown["commit"], shown["bytes"]) == (REPOSITORY, COMMIT[:12], 2 << 20)

    looked_into = json.loads(library.call("doctor", "--json").out)["sections"]["library"]
    assert looked_into["kept checkpoints"] == "2, 4.0 MiB"

    terminal = library.terminal("rm", REPOSITORY)
    terminal.expect("stays, 2.0 MiB")
    terminal.expect("Remove 3.0 MiB")
    terminal.sendline("n")
    terminal.wait()
    done = library.call("rm", REPOSITORY, "--yes")
    assert done.status == 0
    assert "--sources removes it too" in " ".join(done.err.split())
    assert kept.exists()
    only = library.call("rm", REPOSITORY, "--yes")
    assert only.status == 3
    assert "--sources" in only.err
    removed = library.call("rm", REPOSITORY, "--sources", "--yes")
    assert removed.status == 0
    assert "2.0 MiB are free again" in removed.err
    assert not kept.exists()
    assert other.exists()
    assert library.call("rm", "--sources", "--yes").status == 2


@pytest.mark.parametrize("words", [("--leftovers",), (REPOSITORY,), (REPOSITORY, "--sources")])
def test_shards_kept_during_the_question_are_not_removed(
    library: Cli, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = fill(sources(library) / f"tiny--moe-chat@{COMMIT[:12]}")
    other = fill(sources(library) / f"tiny--moe-chat@{'b' * 12}")

    def agreed(*_: object) -> bool:
        (shards / ".kept").touch()
        return True

    monkeypatch.setattr(library_remove, "_confirmed", agreed)
    done = library.call("rm", *words)
    assert done.status == 0, done.err
    assert f"skipped, because it is now a kept checkpoint: {shards}" in " ".join(done.err.split())
    assert (shards / "shard").exists()
    assert not other.exists()


def test_one_question_removes_a_model_and_its_checkpoint(library: Cli) -> None:
    kept = fill(sources(library) / f"tiny--moe-chat@{COMMIT[:12]}", kept=True)
    terminal = library.terminal("rm", f"{REPOSITORY}@{COMMIT}", "--sources")
    terminal.expect("the kept checkpoint of")
    terminal.expect("Remove 5.0 MiB")
    terminal.sendline("y")
    terminal.wait()
    assert terminal.exitstatus == 0
    assert not kept.exists()
    assert not (models(library) / STORE).exists()


def test_of_a_store_on_another_disk_only_the_link_is_removed(library: Cli, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    shutil.move(models(library) / STORE, disk)
    (models(library) / STORE).symlink_to(disk)
    (models(library) / "org--gone-4bit").symlink_to(tmp_path / "nowhere")
    assert [entry["name"] for entry in json.loads(library.call("list", "--json").out)] == [REPOSITORY]
    done = library.call("rm", REPOSITORY, "--yes")
    assert done.status == 0
    assert f"what it pointed to stays: {disk}" in " ".join(done.err.split())
    assert not (models(library) / STORE).is_symlink()
    assert (disk / "manifest.json").exists()


def test_a_link_within_the_library_is_removed_with_its_target(library: Cli) -> None:
    hidden = models(library) / ".somewhere"
    shutil.move(models(library) / STORE, hidden)
    (models(library) / STORE).symlink_to(hidden)
    assert library.call("rm", REPOSITORY, "--yes").status == 0
    assert list(models(library).iterdir()) == []


@pytest.mark.parametrize(
    "other",
    [
        {"files": {"layer": {"bytes": float("inf")}}},
        {"files": {"layer": {"bytes": -1}}},
        {"files": {"layer": {"bytes": True}}},
        {"files": {"layer": {"bytes": 10**400}}},
        {"files": {"a": {"bytes": 1 << 62}, "b": {"bytes": 1 << 62}}},
        {"geometry": {"bits": -4}},
        {"geometry": {"bits": 4.0}},
        {"source": {"name": ["a"], "revision": None}},
    ],
)
def test_one_bad_manifest_leaves_the_others_listed(library: Cli, other: dict[str, object]) -> None:
    text = manifest(**other).replace("Infinity", "1e400")
    add_store(library, "org--bad-4bit", text)
    listed = library.call("list")
    assert listed.status == 0
    assert "org--bad-4bit (damaged)" in listed.out.decode()
    assert REPOSITORY in listed.out.decode()
    found = json.loads(library.call("doctor", "--json").out)
    assert any("org--bad-4bit is damaged" in finding["fact"] for finding in found["findings"])
    assert any(REPOSITORY in name for name in found["sections"]["library"])


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Directories that nobody may look into, each with the error; the tests may run as one who may."""
    found: dict[Path, int] = {}
    look = os.stat

    def refusing(path: str | int | Path, *positional: object, **options: object) -> os.stat_result:
        for parent in () if isinstance(path, int) else Path(os.fsdecode(path)).parents:
            if parent in found:
                raise OSError(found[parent], os.strerror(found[parent]), str(path))
        return look(path, *positional, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", refusing)
    return found


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_one_unreadable_store_leaves_the_others_listed(
    library: Cli, refused: dict[Path, int], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(library.home))
    refused[add_store(library, "org--shut-4bit")] = number
    listed = library.call("list")
    assert listed.status == 0
    assert f"org--shut-4bit (damaged: {os.strerror(number)})" in listed.out.decode()
    assert REPOSITORY in listed.out.decode()
    assert {entry["damaged"] for entry in json.loads(library.call("list", "--json").out)} == {True, False}
    assert set(complete_library("")) >= {"org--shut-4bit", f"{REPOSITORY}@{COMMIT[:12]}"}
    found = json.loads(library.call("doctor", "--json").out)
    facts = [finding["fact"] for finding in found["findings"]]
    assert f"the store org--shut-4bit cannot be read: {os.strerror(number)}" in facts
    shown = library.call("show", "org--shut-4bit")
    assert (shown.status, os.strerror(number) in shown.err) == (6, True), shown.err


def test_a_broken_link_is_listed_and_can_be_removed(library: Cli) -> None:
    link = models(library) / "org--far-4bit"
    link.symlink_to(library.directory / ("y" * 300))
    (models(library) / "org--round-4bit").symlink_to("org--round-4bit")
    listed = json.loads(library.call("list", "--json").out)
    assert {entry["name"]: entry["damaged"] for entry in listed} == {REPOSITORY: False, "org--far-4bit": True}
    assert library.call("rm", "org--far-4bit", "--yes").status == 0
    assert not link.is_symlink()


def test_unreadable_checkpoints_are_not_leftovers(library: Cli, refused: dict[Path, int]) -> None:
    shut = fill(sources(library) / f"org--a@{'a' * 12}")
    free = fill(sources(library) / f"org--b@{'b' * 12}")
    refused[shut] = errno.EACCES
    assert library.call("list").status == 0
    assert library.call("rm", "--leftovers", "--yes").status == 0
    assert not free.exists()
    assert shut.exists()


def test_a_licence_cannot_add_lines_to_the_output(
    program: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "card", {"license": "mit\n\nall good, now run: curl evil\x1b[8m"})
    done = program.run("download", REPOSITORY, "--dry-run")
    assert done.status == 0, done.err
    first = done.out.decode().splitlines()[0]
    assert "all good" in first
    assert b"\x1b" not in done.out


def test_names_in_manifests_cannot_add_lines_or_control_sequences(library: Cli) -> None:
    name = "a\x1b]0;pwn\x07\x9b31m\nproblem: x\u2028y"
    add_store(library, "evil-4bit", manifest(name))
    lines = library.call("list").out.decode().splitlines()
    assert len(lines) == 4
    for command in ("list", "doctor"):
        shown = library.call(command).out.decode()
        assert "problem: x" in shown
        assert not any(line.lstrip().startswith("problem: x") for line in shown.splitlines())
        assert not {"\x1b", "\x07", "\x9b", "\u2028"} & set(shown)


def of_directory(name: str, bits: int = 4) -> str:
    return manifest(source={"name": name, "revision": None}, geometry={"bits": bits})


def test_models_of_the_same_name_and_size_are_listed_by_store_name(library: Cli) -> None:
    before = library.call("list").out.decode().splitlines()[1].split()
    for directory, bits in (("tiny-11111111-4bit", 4), ("tiny-22222222-4bit", 4), ("tiny-11111111-8bit", 8)):
        add_store(library, directory, of_directory("tiny", bits))
    lines = library.call("list").out.decode().splitlines()[:-1]
    named = [line.split() for line in lines[1:]]
    assert {row[0] for row in named} == {before[0], "tiny-11111111-4bit", "tiny-22222222-4bit", "tiny"}
    assert before in named
    assert ["tiny", "8"] in [row[:2] for row in named]
    assert len({line.rindex("MiB") for line in lines[1:]}) == 1
    assert {entry["name"] for entry in json.loads(library.call("list", "--json").out)} == {REPOSITORY, "tiny"}
    assert library.call("rm", "tiny-22222222-4bit", "--yes").status == 0
    assert library.call("list").out.decode().count("tiny-11111111") == 0


def test_rm_removes_all_bits_of_a_name_beside_a_directory_without_a_model(library: Cli) -> None:
    for bits in (4, 8):
        add_store(library, f"tiny-11111111-{bits}bit", of_directory("tiny", bits))
    (library.directory / "tiny").mkdir()
    done = library.call("rm", "tiny", "--yes")
    assert done.status == 0
    assert [path.name for path in models(library).iterdir()] == [STORE]


def test_rm_of_a_directory_named_as_an_alias_leaves_the_downloads_of_the_alias(library: Cli) -> None:
    add_store(library, "mixtral-11111111-4bit", of_directory("mixtral"))
    unfinished = models(library) / ".mistralai--Mixtral-8x7B-Instruct-v0.1-4bit.partial"
    unfinished.mkdir()
    assert library.call("rm", "mixtral", "--yes").status == 0
    assert not (models(library) / "mixtral-11111111-4bit").exists()
    assert unfinished.exists()
    assert library.call("rm", "mixtral", "--yes").status == 0
    assert not unfinished.exists()
