"""What model names mean."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moechat.config import Paths, user_paths
from moechat.errors import ModelNotFoundError, NotInLibraryError, UsageError
from moechat.hub.known_shapes import find_shape, shape_names
from moechat.hub.library import display_names, find_stores, list_stores, names_here
from moechat.hub.model_ref import ALIASES, ModelRef, at_revision, hub_model, repository_of
from moechat.hub.names import resolve


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return user_paths({"MOECHAT_HOME": str(tmp_path / "home")})


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def test_a_name_too_long_for_a_directory_is_not_found_in_the_library(paths: Paths) -> None:
    paths.models.mkdir(parents=True)
    for revision in ("@" + "a" * 40, "@" + "v" * 80):
        error = refusal(f"{'o' * 40}/{'n' * 50}{revision}:{'v' * 115}.gguf", paths)
        assert isinstance(error, NotInLibraryError)


def test_an_unreadable_store_is_found_after_the_others(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = make_store(paths.models / "org--name-4bit")
    readable = make_store(paths.models / "org--name-8bit")
    look = os.stat

    def refusing(path: str | Path, **options: object) -> os.stat_result:
        if closed in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", refusing)
    assert resolve("org/name", paths=paths).store == readable
    assert resolve("org/name", bits=4, paths=paths).store == closed


def make_checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def make_store(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text("{}")
    return directory


def refusal(model: str, paths: Paths) -> ModelNotFoundError:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(model, paths=paths)
    return caught.value


def test_every_alias_is_a_valid_repository(paths: Paths) -> None:
    for alias, repository in ALIASES.items():
        store = paths.models / f"{repository.replace('/', '--')}-4bit"
        if not store.exists():  # two aliases may name one repository
            make_store(store)
        for spelling in (alias, alias.upper()):
            assert resolve(spelling, paths=paths).repository == repository


def test_a_model_of_the_hub_is_found_in_the_library(paths: Paths) -> None:
    store = make_store(paths.models / "org--name-8bit")
    ref = resolve("org/name", paths=paths)
    assert ref.store == store
    assert ref.checkpoint is None
    assert ref.revision is None
    preferred = make_store(paths.models / "org--name-4bit")
    assert resolve("org/name", paths=paths).store == preferred
    assert resolve("org/name", bits=8, paths=paths).store == store
    with pytest.raises(ModelNotFoundError, match="with 2 bits"):
        resolve("org/name", bits=2, paths=paths)


def test_an_unfinished_store_is_not_a_model(paths: Paths) -> None:
    (paths.models / "org--name-4bit").mkdir(parents=True)
    assert "not in the library" in str(refusal("org/name", paths))


def test_the_error_for_a_model_not_downloaded_names_the_next_step(paths: Paths) -> None:
    error = refusal("mixtral", paths)
    assert error.exit_code == 3
    assert "mistralai/Mixtral-8x7B-Instruct-v0.1 is not in the library" in str(error)
    assert error.hint == "moechat download mixtral"


def test_a_store_is_found_by_its_commit(paths: Paths) -> None:
    store = make_store(paths.models / "org--name-4bit")
    commit = "0123456789abcdef0123456789abcdef01234567"
    (store / "manifest.json").write_text(json.dumps({"source": {"name": "org/name", "revision": commit}}))
    for revision in (commit, commit[:12]):
        assert resolve(f"org/name@{revision}", paths=paths).store == store
    assert "not in the library" in str(refusal("org/name@fedcba987654", paths))
    assert "not in the library" in str(refusal(f"org/name@{commit[:6]}", paths))


def test_each_revision_has_its_own_store(paths: Paths) -> None:
    revisions = ["main", "v1.0", "feature/x", "feature--x", "a" * 100, "a" * 101]
    slugs = set()
    for revision in revisions:
        ref = ModelRef(name="", slug=slug_of(f"org/name@{revision}", paths))
        slugs.add(ref.slug)
        path = make_store(ref.library_path(paths.models, 4))
        assert path.parent == paths.models
        assert resolve(f"org/name@{revision}", paths=paths).store == path
        assert resolve(f"org/name@{revision}", paths=paths).revision == revision
    assert len(slugs) == len(revisions)
    refusal("org/name", paths)


def slug_of(model: str, paths: Paths) -> str:
    """The slug of a hub model, without a store being there."""
    found: list[str] = []
    original = ModelRef.find_in_library

    def spy(self: ModelRef, models: Path, bits: int | None = None) -> Path | None:
        found.append(self.slug)
        return original(self, models, bits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRef, "find_in_library", spy)
        refusal(model, paths)
    return found[0]


@pytest.mark.parametrize(
    "model",
    [
        "org/name/more",
        "org//name",
        "-org/name",
        "org/name-",
        "org/na--me",
        "org/na..me",
        "org/name.git",
        "org/na me",
        "org/nämé",
        "org/" + "n" * 96,
        "a\x1b[31m/b",
    ],
)
def test_names_that_the_hub_refuses_are_refused(model: str, paths: Paths) -> None:
    assert "neither a directory here nor a repository name" in str(refusal(model, paths))


@pytest.mark.parametrize(
    "revision", ["", "../x", "a/../b", "/a", "a/", "a//b", "-a", "a b", "é", "r" * 201, "a@b"]
)
def test_a_revision_cannot_escape_the_library(revision: str, paths: Paths) -> None:
    assert "no valid revision" in str(refusal(f"org/name@{revision}", paths))
    assert "no valid revision" in str(refusal(f"mixtral@{revision}", paths))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("mixtrl", "mixtral"),
        ("Qwen-3", "qwen3 or qwen3.6 or qwen-moe"),
        ("gemma-4", "gemma4"),
        ("olmo", "olmoe"),
        ("dem", "demo"),
        ("./demo", "demo"),
    ],
)
def test_a_misspelt_name_is_recognised(typed: str, meant: str, paths: Paths) -> None:
    assert refusal(typed, paths).hint == f"did you mean {meant}?"


@pytest.mark.parametrize("model", ["", "  ", "nothing-like-it", "a\0b"])
def test_an_unknown_name_lists_the_known_ones(model: str, paths: Paths) -> None:
    hint = refusal(model, paths).hint or ""
    assert "demo" in hint
    assert "gpt-oss-120b" in hint


def test_a_checkpoint_directory_is_found_by_any_spelling(
    in_an_empty_directory: Path, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(in_an_empty_directory / "My Model (v2)")
    monkeypatch.setenv("HOME", str(in_an_empty_directory))
    (in_an_empty_directory / "link").symlink_to(directory)
    spellings = [
        "My Model (v2)",
        "./My Model (v2)",
        str(directory),
        f"{directory}/",
        "~/My Model (v2)",
        "./link",
    ]
    refs = {resolve(spelling, paths=paths) for spelling in spellings}
    assert len(refs) == 1
    ref = refs.pop()
    assert ref.checkpoint == directory
    assert ref.store is None
    assert ref.name == "My Model (v2)"
    assert re.fullmatch(r"My-Model-v2-[0-9a-f]{8}", ref.slug)
    assert ref.library_path(paths.models, 3) == paths.models / f"{ref.slug}-3bit"


def test_directories_of_one_name_do_not_share_a_store(in_an_empty_directory: Path, paths: Paths) -> None:
    first = make_checkpoint(in_an_empty_directory / "a" / "model")
    second = make_checkpoint(in_an_empty_directory / "b" / "model")
    assert resolve(str(first), paths=paths).slug != resolve(str(second), paths=paths).slug


def test_a_store_directory_is_a_model(in_an_empty_directory: Path, paths: Paths) -> None:
    store = make_store(in_an_empty_directory / "org" / "name")
    assert resolve("org/name", paths=paths).store == store


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "foreign", [b'{"name": "an app", "manifest_version": 3}', b"[]", b"{", b"\xff", b"[" * 100_000]
)
def test_a_checkpoint_with_a_manifest_of_something_else_stays_a_checkpoint(
    in_an_empty_directory: Path, paths: Paths, foreign: bytes, weights: str
) -> None:
    directory = make_checkpoint(in_an_empty_directory / "exported")
    (directory / "manifest.json").write_bytes(foreign)
    (directory / weights).write_bytes(b"")
    assert resolve("./exported", paths=paths).checkpoint == directory
    (directory / "manifest.json").write_text('{"format_version": 1}')
    assert resolve("./exported", paths=paths).store == directory


def test_a_directory_with_a_damaged_manifest_is_still_a_store(
    in_an_empty_directory: Path, paths: Paths
) -> None:
    directory = make_store(in_an_empty_directory / "store")
    (directory / "config.json").write_text("{}")
    (directory / "manifest.json").write_bytes(b"\0")
    assert resolve("./store", paths=paths).store == directory


def test_an_alias_wins_over_a_directory_of_its_name(in_an_empty_directory: Path, paths: Paths) -> None:
    directory = make_checkpoint(in_an_empty_directory / "mixtral")
    assert "not in the library" in str(refusal("mixtral", paths))
    assert resolve("./mixtral", paths=paths).checkpoint == directory


def test_directories_without_a_model_and_files_are_refused(in_an_empty_directory: Path, paths: Paths) -> None:
    (in_an_empty_directory / "empty").mkdir()
    (in_an_empty_directory / "file.bin").write_text("")
    (in_an_empty_directory / "loop").symlink_to("loop")
    assert "holds no model" in str(refusal("./empty", paths))
    assert "is neither a directory nor a .gguf file" in str(refusal("file.bin", paths))
    assert "no directory" in str(refusal("./missing", paths))
    assert "no file" in str(refusal("./missing.gguf", paths))
    for bad in ("./loop", "~no-such-user-here/x", "/" + "x" * 5000):
        assert refusal(bad, paths).exit_code == 3


def test_a_gguf_file_is_a_model_and_so_is_a_directory_with_one(
    in_an_empty_directory: Path, paths: Paths
) -> None:
    directory = in_an_empty_directory / "files"
    directory.mkdir()
    names = ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]
    for name in names:
        (directory / name).touch()
    refs = [resolve(f"./files{name}", paths=paths) for name in ("", *(f"/{name}" for name in names))]
    assert {ref.checkpoint for ref in refs} == {directory / names[0]}
    assert len({ref.slug for ref in refs}) == 1
    (directory / "A.GGUF").touch()
    several = refusal("./files", paths)
    assert "holds 2 GGUF models" in str(several)
    assert several.hint == f"name one of them: {directory}/A.GGUF, {directory}/{names[0]}"
    (directory / "config.json").write_text("{}")
    assert resolve("./files", paths=paths).checkpoint == directory


def test_the_demo_is_inside_the_package(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moechat.hub.names._DEMO_STORE", tmp_path / "demo")
    assert "lacks the demo" in str(refusal("demo", paths))
    make_store(tmp_path / "demo")
    assert resolve("demo", paths=paths).store == tmp_path / "demo"
    assert resolve("Demo", paths=paths).name == "demo"


@given(model=st.text(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_a_model_or_not_found(model: str, paths: Paths) -> None:
    try:
        ref = resolve(model, paths=paths)
    except ModelNotFoundError:
        return
    assert ref.checkpoint or ref.store


@given(
    org=st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True),
    name=st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_slug_is_a_single_path_component(org: str, name: str, paths: Paths) -> None:
    try:
        slug = slug_of(f"{org}/{name}", paths)
    except IndexError:  # refused before the library was asked
        return
    assert slug.split("--") == [org, name]
    assert (paths.models / slug).parent == paths.models


def test_a_gguf_file_of_a_repository_is_named_after_a_colon(paths: Paths) -> None:
    refs = {name: hub_model(name) for name in ("a/b:q4_k_m", "a/b@main:Q4_K_M", "a/b:m-q4.gguf", "a/b")}
    assert [ref.name for ref in refs.values()] == ["a/b:Q4_K_M", "a/b@main:Q4_K_M", "a/b:m-q4.gguf", "a/b"]
    assert {(ref.repository, ref.revision, ref.variant) for ref in refs.values()} == {
        ("a/b", None, "Q4_K_M"),
        ("a/b", "main", "Q4_K_M"),
        ("a/b", None, "m-q4.gguf"),
        ("a/b", None, None),
    }
    assert [ref.slug for ref in refs.values()] == [
        "a--b+Q4_K_M",
        "a--b@main+Q4_K_M",
        "a--b+m-q4.gguf",
        "a--b",
    ]
    for bad in ("a/b:", "a/b:../x", "a/b:q4/x", "a/b:q 4", "a:q4/b"):
        assert refusal(bad, paths).exit_code == 3


def test_a_gguf_model_of_the_default_branch_is_found_by_its_commit(paths: Paths) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    store = make_store(hub_model("a/b:Q8_0").library_path(paths.models, 4))
    (store / "manifest.json").write_text(json.dumps({"source": {"name": "a/b:Q8_0", "revision": commit}}))
    name = at_revision("a/b:Q8_0", commit[:12])
    assert name == f"a/b@{commit[:12]}:Q8_0"
    assert resolve(name, paths=paths).store == store
    assert "not in the library" in str(refusal(f"a/b@{commit[:12]}", paths))
    assert repository_of(name) == "a/b"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/org/name", "org/name"),
        ("https://huggingface.co/org/name/", "org/name"),
        ("HTTP://HuggingFace.co/org/Name", "org/Name"),
        ("huggingface.co/org/name", "org/name"),
        ("hf.co/org/name@v1", "org/name@v1"),
        ("https://huggingface.co/org/name/tree/v1", "org/name@v1"),
        ("https://huggingface.co/org/name/tree/main/sub/dir", "org/name@main"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1", "org/name@refs/pr/1"),
        ("https://huggingface.co/org/name/tree/refs/pr/1", "org/name@refs/pr/1"),
        ("https://huggingface.co/org/name/blob/main/config.json?download=true#L3", "org/name@main"),
        ("https://huggingface.co/org/name/discussions/4", "org/name"),
        ("https://mirror.example:8443/hub/org/name/tree/v1", "org/name@v1"),
        ("mirror.example:8443/hub/org/name", "org/name"),
    ],
)
def test_the_url_of_a_model_page_is_a_name(
    address: str, name: str, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8443/hub/")
    assert hub_model(address).name == name
    assert f"{name} is not in the library" in str(refusal(address, paths))


@pytest.mark.parametrize(
    "address",
    [
        "https://example.com/org/name",
        "https://huggingface.co/datasets/org/name",
        "https://huggingface.co/org/name/tree/..%2F..%2Fx",
        "https://huggingface.co/org/..",
    ],
)
def test_other_urls_are_refused(address: str, paths: Paths) -> None:
    assert not isinstance(refusal(address, paths), NotInLibraryError)


def test_a_shape_has_the_name_of_its_model(in_an_empty_directory: Path, paths: Paths) -> None:
    for shape in shape_names():
        assert find_shape(str(hub_model(shape.upper()).repository)) == shape
    assert hub_model("Mixtral-8x7B@v1").name == "mistralai/Mixtral-8x7B-Instruct-v0.1@v1"
    make_store(paths.models / "Qwen--Qwen3-30B-A3B-4bit")
    assert resolve("Qwen3-30B-A3B", paths=paths).repository == "Qwen/Qwen3-30B-A3B"
    assert find_shape("https://huggingface.co/Qwen/Qwen3-30B-A3B") == "qwen3-30b-a3b"
    directory = make_checkpoint(in_an_empty_directory / "olmoe-1b-7b")
    assert resolve("olmoe-1b-7b", paths=paths).checkpoint == directory


def test_a_local_path_wins_over_a_url(in_an_empty_directory: Path, paths: Paths) -> None:
    directory = make_checkpoint(in_an_empty_directory / "hf.co" / "org" / "name")
    assert resolve("hf.co/org/name", paths=paths).checkpoint == directory


def make_listed_store(
    paths: Paths, directory: str, name: str, bits: int = 4, commit: str | None = None
) -> Path:
    store = make_store(paths.models / directory)
    content = {
        "source": {"name": name, "revision": commit},
        "model_type": "olmoe",
        "geometry": {"bits": bits},
        "files": {},
    }
    (store / "manifest.json").write_text(json.dumps(content))
    return store


def test_a_converted_directory_is_found_by_its_name_or_store_name(paths: Paths) -> None:
    store = make_listed_store(paths, "tiny-9285d10a-4bit", "tiny")
    for spelling in ("tiny", "Tiny", "tiny-9285d10a-4bit"):
        ref = resolve(spelling, paths=paths)
        assert (ref.store, ref.name, ref.slug) == (store, "tiny", "tiny-9285d10a")
        # What the store has instead is said where it is opened; a plan can do without.
        assert resolve(spelling, bits=8, paths=paths).store == store


def test_a_model_of_the_hub_is_found_by_its_store_name(paths: Paths) -> None:
    store = make_listed_store(paths, "org--name@v1-8bit", "org/name@v1", 8, "0123456789abcdef")
    ref = resolve("org--name@v1-8bit", paths=paths)
    assert (ref.store, ref.name, ref.repository, ref.revision) == (store, "org/name@v1", "org/name", "v1")
    assert ref.slug == "org--name@v1"


def test_bits_choose_between_stores_of_one_name_and_default_to_4(paths: Paths) -> None:
    eight = make_listed_store(paths, "tiny-11111111-8bit", "tiny", 8)
    three = make_listed_store(paths, "tiny-11111111-3bit", "tiny", 3)
    with pytest.raises(UsageError, match="several stores: tiny-11111111-3bit, tiny-11111111-8bit"):
        resolve("tiny", paths=paths)
    four = make_listed_store(paths, "tiny-11111111-4bit", "tiny")
    assert resolve("tiny", paths=paths).store == four
    assert resolve("tiny", bits=8, paths=paths).store == eight
    assert resolve("tiny", bits=3, paths=paths).store == three


def test_an_ambiguous_name_is_refused_with_the_store_names(paths: Paths) -> None:
    stores = [make_listed_store(paths, f"tiny-{digit * 8}-4bit", "tiny") for digit in "12"]
    for bits in (None, 4):
        with pytest.raises(UsageError, match="tiny-11111111-4bit, tiny-22222222-4bit") as caught:
            resolve("tiny", bits=bits, paths=paths)
        assert caught.value.hint == "use one of these names"
    for store in stores:
        assert resolve(store.name, paths=paths).store == store


def test_names_that_differ_only_in_case_are_distinguished(paths: Paths) -> None:
    small = make_listed_store(paths, "tiny-11111111-4bit", "tiny")
    large = make_listed_store(paths, "Tiny-22222222-4bit", "Tiny")
    assert resolve("tiny", paths=paths).store == small
    assert resolve("Tiny", paths=paths).store == large
    with pytest.raises(UsageError):
        resolve("TINY", paths=paths)


def test_other_meanings_of_a_name_come_before_the_library(in_an_empty_directory: Path, paths: Paths) -> None:
    for name in ("tiny", "demo", "files", "hollow"):
        make_listed_store(paths, f"{name}-11111111-4bit", name)
    checkpoint = make_checkpoint(in_an_empty_directory / "tiny")
    assert resolve("tiny", paths=paths).checkpoint == checkpoint
    assert resolve("demo", paths=paths).slug == "demo"
    (in_an_empty_directory / "files").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (in_an_empty_directory / "files" / name).touch()
    assert "holds 2 GGUF models" in str(refusal("files", paths))
    (in_an_empty_directory / "hollow").mkdir()
    assert resolve("hollow", paths=paths).store == paths.models / "hollow-11111111-4bit"
    for path in ("./hollow", "hollow/"):
        assert "holds no model" in str(refusal(path, paths))


@pytest.mark.parametrize("name", ["mixtral", "Mixtral-8x7B"])
@pytest.mark.parametrize("downloaded", [False, True])
def test_a_converted_directory_with_the_name_of_an_alias_runs_by_it(
    paths: Paths, name: str, downloaded: bool
) -> None:
    store = make_listed_store(paths, f"{name}-11111111-4bit", name)
    repository, commit = ALIASES["mixtral"], "0123456789abcdef"
    title = f"{repository}@{commit[:12]}"
    if downloaded:
        make_listed_store(paths, f"{repository.replace('/', '--')}-4bit", repository, commit=commit)
    assert set(names_here(paths)) == {"demo", name, *([title] if downloaded else [])}
    for spelling in (name, name.lower(), store.name):
        assert resolve(spelling, paths=paths).store == store
        assert [entry.path for entry in find_stores(spelling, None, paths)] == [store]
    for spelling in ("mixtral@main", repository):
        if downloaded and "@" not in spelling:
            assert resolve(spelling, paths=paths).repository == repository
        else:
            assert isinstance(refusal(spelling, paths), NotInLibraryError)


def test_every_listed_name_finds_its_store(paths: Paths) -> None:
    for directory, name, bits in (
        ("demo-11111111-4bit", "demo", 4),
        ("Demo-22222222-4bit", "Demo", 4),
        ("qwen3-11111111-4bit", "qwen3", 4),
        ("tiny-11111111-4bit", "tiny", 4),
        ("tiny-22222222-4bit", "tiny", 4),
    ):
        make_listed_store(paths, directory, name, bits)
    make_listed_store(paths, "org--name-8bit", "org/name", 8, commit="0123456789abcdef")
    entries = list_stores(paths)
    for entry, shown in zip(entries, display_names(entries), strict=True):
        assert resolve(shown, paths=paths).store == entry.path
        assert find_stores(shown, None, paths) == [entry]


def test_the_hint_for_an_unknown_name_lists_the_library(paths: Paths) -> None:
    make_listed_store(paths, "Story-Teller-11111111-4bit", "Story-Teller")
    assert refusal("story-tellr", paths).hint == "did you mean Story-Teller?"
    assert "known names: demo, Story-Teller, qwen3.6" in (refusal("zzzzz", paths).hint or "")


def test_the_library_is_searched_last(
    in_an_empty_directory: Path, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.hub import library

    def unexpected(paths: Paths) -> list[object]:
        raise AssertionError

    monkeypatch.setattr(library, "list_stores", unexpected)
    make_store(paths.models / "org--name-4bit")
    make_checkpoint(in_an_empty_directory / "tiny")
    for model in ("demo", "org/name", "tiny", "./tiny"):
        resolve(model, paths=paths)
