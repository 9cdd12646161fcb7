from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_support import mixtral_plan, tree, write_mixtral

import moechat
from moechat.errors import StoreDamagedError
from moechat.store import manifest as manifest_module
from moechat.store import store as store_module
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.manifest import MANIFEST_NAME, Manifest
from moechat.store.store import Store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("store")
    source = write_mixtral(base / "source", layers=2, experts=3, hidden=64, intermediate=128, dtype="F16")
    checkpoint = Checkpoint.open(source)
    convert(checkpoint, mixtral_plan(checkpoint), base / "made", bits=4, source_name="tiny")
    return base / "made"


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def files_of(path: Path) -> list[str]:
    return sorted(tree(path))


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def test_a_store_gives_its_experts_and_dense_tensors(path: Path) -> None:
    store = Store.open(path)
    store.verify()
    assert [item.layer for item in store.layers] == [0, 1]
    layer = store.expert_layer(1)
    assert layer.shape == (3, 2, store.geometry.record_bytes)
    assert layer.dtype == np.uint8
    assert not layer.flags.writeable
    assert layer.ctypes.data % 4096 == 0
    assert store.expert_layer(1) is layer
    extent = store.expert_extent(1)
    assert extent.offset % 4096 == 0
    assert extent.path.read_bytes()[extent.offset : extent.offset + extent.nbytes] == layer.tobytes()
    with pytest.raises(KeyError):
        store.expert_layer(2)
    assert store.dense.info("lm_head.weight") == ("F16", (32, 64))
    with pytest.raises(StoreDamagedError, match="ghost"):
        store.dense.array("ghost")


def test_opening_a_store_is_fast_and_never_imports_torch(path: Path) -> None:
    code = (
        "import sys, time, moechat.store.store as s\n"
        "t = time.perf_counter(); s.Store.open(sys.argv[1]); print(time.perf_counter() - t)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 0.05


def test_every_missing_file_is_named(made: Path, tmp_path: Path) -> None:
    for number, name in enumerate(files_of(made)):
        copy = tmp_path / str(number)
        shutil.copytree(made, copy)
        (copy / name).unlink()
        with pytest.raises(StoreDamagedError, match=name):
            Store.open(copy)


def test_every_truncated_or_grown_file_is_named(made: Path, tmp_path: Path) -> None:
    for number, name in enumerate(files_of(made)):
        size = (made / name).stat().st_size
        for new_size in (size - 2, size + 1):  # the last byte of the manifest is a line end
            copy = tmp_path / f"{number}-{new_size}"
            shutil.copytree(made, copy)
            os.truncate(copy / name, max(new_size, 0))
            with pytest.raises(StoreDamagedError, match=name):
                Store.open(copy)


def test_a_flipped_bit_anywhere_is_found_by_verification_and_named(made: Path, tmp_path: Path) -> None:
    for number, name in enumerate(files_of(made)):
        size = (made / name).stat().st_size
        for place in {0, size // 2, size - 1}:
            copy = tmp_path / f"{number}-{place}"
            shutil.copytree(made, copy)
            flip(copy / name, place)
            with pytest.raises(StoreDamagedError, match=name):
                Store.open(copy).verify()


def test_a_header_that_does_not_fit_the_manifest_is_refused_even_unverified(path: Path) -> None:
    file = path / "experts-00001.safetensors"
    content = file.read_bytes()
    assert b'"shape":[3,2,' in content
    file.write_bytes(content.replace(b'"shape":[3,2,', b'"shape":[2,3,', 1))
    with pytest.raises(StoreDamagedError, match=r"experts-00001\.safetensors does not hold"):
        Store.open(path).expert_layer(1)
    file.write_bytes(content.replace(b'"experts"', b'"exports"', 1))
    with pytest.raises(StoreDamagedError, match=r"experts-00001\.safetensors"):
        Store.open(path).expert_layer(1)


def test_a_link_to_a_device_in_place_of_a_file_is_refused(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(StoreDamagedError, match=r"config\.json is not a regular file"):
        Store.open(path)


@pytest.mark.parametrize(
    "name",
    [
        "special_tokens_map.json",
        ".hidden",
        "experts-00002.safetensors",
        "extra/file",
        "additional_chat_templates/other.jinja",
        "\udcff",
    ],
)
def test_a_file_that_the_manifest_does_not_list_is_refused_and_named(
    path: Path, tmp_path: Path, name: str
) -> None:
    store = Store.open(path)
    store.ensure_verified(tmp_path / "state")
    added = path / name
    added.parent.mkdir(exist_ok=True)
    added.write_text("{}")
    entry = added if added.parent == path else added.parent
    for check in (lambda: Store.open(path), lambda: store.ensure_verified(tmp_path / "state")):
        with pytest.raises(StoreDamagedError) as caught:
            check()
        assert str(caught.value).startswith(f"{entry} does not belong to the store")
        assert f"rm -r {shlex.quote(str(entry))}" in (caught.value.hint or "")
    subprocess.run(["bash", "-c", f"rm -r {shlex.quote(str(entry))}"], check=True)
    assert Store.open(path).ensure_verified(tmp_path / "state") is False


def test_directories_and_links_that_the_manifest_does_not_list_are_refused(
    path: Path, tmp_path: Path
) -> None:
    (path / "empty").mkdir()
    with pytest.raises(StoreDamagedError, match="empty does not belong"):
        Store.open(path)
    (path / "empty").rmdir()
    (path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(StoreDamagedError, match="dangling does not belong"):
        Store.open(path)


def test_a_listed_subdirectory_holds_listed_files_only(tmp_path: Path) -> None:
    source = write_mixtral(tmp_path / "source", layers=1, experts=2, hidden=64, intermediate=64)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    checkpoint = Checkpoint.open(source)
    convert(checkpoint, mixtral_plan(checkpoint), tmp_path / "made", bits=4, source_name="tiny")
    assert "additional_chat_templates/tools.jinja" in Store.open(tmp_path / "made").manifest.files
    (tmp_path / "made" / "additional_chat_templates" / "other.jinja").write_text("")
    with pytest.raises(StoreDamagedError, match=r"other\.jinja does not belong"):
        Store.open(tmp_path / "made")


def test_the_hint_about_damage_depends_on_the_location_of_the_store(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "a home"))
    library = tmp_path / "a home" / "data" / "models"
    library.mkdir(parents=True)
    os.rename(path, library / "tiny-4bit")

    def hint(place: Path) -> str:
        with pytest.raises(StoreDamagedError) as caught:
            Store.open(place)
        return caught.value.hint or ""

    os.truncate(library / "tiny-4bit" / "config.json", 1)
    remove = f"rm -r {shlex.quote(str(library / 'tiny-4bit'))}"
    assert "run the same command again" in hint(library / "tiny-4bit")
    assert remove in hint(library / "tiny-4bit")
    (library / "tiny-4bit" / MANIFEST_NAME).write_text("{")
    assert remove in hint(library / "tiny-4bit")
    os.rename(library / "tiny-4bit", path)  # nothing would make this one again
    assert f"remove the store (rm -r {path}) and copy it here again" in hint(path)
    monkeypatch.setattr(manifest_module, "_PACKAGE", tmp_path)
    assert hint(path) == "install moechat again: this model is a part of it"


def test_the_packaged_demo_has_no_unlisted_file() -> None:
    Store.open(Path(moechat.__file__).parent / "hub" / "demo")


def test_a_directory_without_manifest_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreDamagedError, match=MANIFEST_NAME):
        Store.open(tmp_path)


def test_files_are_hashed_once_and_again_after_any_change(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert Store.open(path).ensure_verified(state) is True
    assert Store.open(path).ensure_verified(state) is False
    os.utime(path / "config.json")
    assert Store.open(path).ensure_verified(state) is True
    assert Store.open(path).ensure_verified(state) is False
    shutil.copy2(path / "tokenizer.json", path / "copy")
    os.replace(path / "copy", path / "tokenizer.json")  # the same content and time, another inode
    assert Store.open(path).ensure_verified(state) is True


def test_damage_with_restored_mtime_is_found_by_ctime(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    Store.open(path).ensure_verified(state)
    file = path / "experts-00000.safetensors"
    before = file.stat()
    flip(file, before.st_size - 5000)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    for _ in range(2):  # a failure leaves no stamp either
        with pytest.raises(StoreDamagedError, match=r"experts-00000\.safetensors"):
            Store.open(path).ensure_verified(state)


def test_the_stamp_of_one_store_is_not_valid_for_another(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    Store.open(path).ensure_verified(state)
    shutil.copytree(path, tmp_path / "other")
    assert Store.open(tmp_path / "other").ensure_verified(state) is True
    shutil.rmtree(path)
    os.rename(tmp_path / "other", path)
    assert Store.open(path).ensure_verified(state) is True


@pytest.mark.parametrize("kind", ["file in the way", "garbage stamp"])
def test_with_an_unusable_state_directory_every_start_verifies(path: Path, tmp_path: Path, kind: str) -> None:
    state = tmp_path / "state"
    store = Store.open(path)
    if kind == "file in the way":
        state.write_text("x")
        assert store.ensure_verified(state) is True
        assert store.ensure_verified(state) is True
    else:
        store.ensure_verified(state)
        [stamp] = (state / "verified").iterdir()
        stamp.write_bytes(b"\xff{")
        assert store.ensure_verified(state) is True
        assert store.ensure_verified(state) is False


def test_a_store_changed_while_it_is_verified_gets_no_stamp(path: Path, tmp_path: Path) -> None:
    store = Store.open(path)

    def touch(done: int, total: int, name: str) -> None:
        os.utime(path / "config.json")

    with pytest.raises(StoreDamagedError, match="changed while"):
        store.ensure_verified(tmp_path / "state", touch)
    assert store.ensure_verified(tmp_path / "state") is True


def other_store(directory: Path, **shape: int) -> Path:
    shape = {"layers": 2, "experts": 3, "hidden": 64, "intermediate": 128} | shape
    source = write_mixtral(directory / "source", dtype="F16", seed=7, **shape)
    checkpoint = Checkpoint.open(source)
    convert(checkpoint, mixtral_plan(checkpoint), directory / "made", bits=4, source_name="other")
    return directory / "made"


def exchange(path: Path, other: Path) -> None:
    shutil.rmtree(path)
    os.rename(other, path)


def test_a_store_replaced_between_opening_and_verifying_is_used(path: Path, tmp_path: Path) -> None:
    store = Store.open(path)
    old = store.manifest
    exchange(path, other_store(tmp_path / "other"))
    assert store.ensure_verified(tmp_path / "state") is True
    assert store.manifest == Store.open(path).manifest != old
    store.verify()


def test_the_stamp_of_a_replacement_is_not_valid_for_the_store_opened_before(
    path: Path, tmp_path: Path
) -> None:
    store = Store.open(path)
    exchange(path, other_store(tmp_path / "other"))
    Store.open(path).ensure_verified(tmp_path / "state")
    store.ensure_verified(tmp_path / "state")
    assert store.manifest.source.name == "other"


def test_a_store_replaced_during_verification_is_used(path: Path, tmp_path: Path) -> None:
    store = Store.open(path)
    other = other_store(tmp_path / "other")

    def replace(done: int, total: int, name: str) -> None:
        if other.exists():
            exchange(path, other)

    assert store.ensure_verified(tmp_path / "state", replace) is True
    assert store.manifest.source.name == "other"


def test_a_store_replaced_during_opening_is_used(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = other_store(tmp_path / "other", layers=3)
    read = Manifest.read

    def read_then_replace(file: Path) -> Manifest:
        manifest = read(file)
        if other.exists():
            exchange(path, other)
        return manifest

    monkeypatch.setattr(Manifest, "read", read_then_replace)
    assert Store.open(path).manifest.source.name == "other"


@pytest.mark.parametrize("why", ["other shape", "experts in use", "dense tensors in use"])
def test_a_replacement_is_not_mixed_with_data_read_from_the_old_store(
    path: Path, tmp_path: Path, why: str
) -> None:
    store = Store.open(path)
    if why == "experts in use":
        store.expert_layer(0)
    elif why == "dense tensors in use":
        assert store.dense.keys()
    exchange(path, other_store(tmp_path / "other", experts=4 if why == "other shape" else 3))
    with pytest.raises(StoreDamagedError):
        store.ensure_verified(tmp_path / "state")


def test_verification_reports_every_byte(path: Path) -> None:
    store = Store.open(path)
    reports: list[tuple[int, int, str]] = []
    store.verify(lambda *report: reports.append(report))
    assert reports[-1][0] == reports[-1][1] == store.total_bytes
    assert [report[0] for report in reports] == sorted(report[0] for report in reports)
    assert {report[2] for report in reports} == set(store.manifest.files)


def test_an_interrupted_removal_still_frees_the_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_module.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Store.open(path).remove()
    assert not path.exists()


def test_removing_a_store_leaves_nothing(path: Path) -> None:
    neighbours = set(path.parent.iterdir())
    Store.open(path).remove()
    assert set(path.parent.iterdir()) == neighbours - {path}
