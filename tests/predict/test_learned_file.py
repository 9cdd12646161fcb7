"""What predictors have learned, kept across runs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from moechat.predict import learned_file
from moechat.predict.eamc import EamcPredictor
from moechat.predict.learned_file import keep_learned, learned_path, load_learned


def learned(requests: int = 3) -> EamcPredictor:
    predictor = EamcPredictor(2, 4)
    for request in range(requests):
        for token in range(4):
            predictor.begin_pass(request, -1)
            for layer in range(2):
                predictor.observe(layer, np.array([(request + token + layer) % 4], np.int32), None)
        predictor.end_request(request)
    return predictor


def test_a_predictor_goes_on_with_what_was_kept(tmp_path: Path) -> None:
    path = learned_path("eamc", "key", tmp_path)
    assert not load_learned(path, EamcPredictor(2, 4), pytest.fail)  # no file is no fault
    first = learned()
    keep_learned(path, first)
    second = EamcPredictor(2, 4)
    assert load_learned(path, second, pytest.fail)
    assert second.entries == 3
    assert np.array_equal(second.arrays()["matrices"], first.arrays()["matrices"])
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_nothing_learned_is_not_kept(tmp_path: Path) -> None:
    path = learned_path("eamc", "key", tmp_path / "new")
    keep_learned(path, EamcPredictor(2, 4))
    assert not path.parent.exists()


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "other sizes", "other format", "no array"])
def test_a_damaged_file_counts_as_missing_and_is_replaced(tmp_path: Path, damage: str) -> None:
    path = learned_path("eamc", "key", tmp_path)
    keep_learned(path, learned())
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "noise":
        path.write_bytes(os.urandom(len(whole)))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other sizes":
        np.savez(path, format=np.int64(1), **EamcPredictor(3, 4).arrays())
        keep_learned(path, three_layers())
    elif damage == "other format":
        np.savez(path, format=np.int64(99), **learned().arrays())
    else:
        np.savez(path, format=np.int64(1), scale=np.ones(1, np.float32))
    found = EamcPredictor(2, 4)
    warnings: list[str] = []
    assert not load_learned(path, found, warnings.append)
    assert found.entries == 0
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    keep_learned(path, learned())
    assert load_learned(path, found, pytest.fail)


def three_layers() -> EamcPredictor:
    predictor = EamcPredictor(3, 4)
    predictor.add(np.ones((3, 4), np.float32))
    return predictor


@pytest.mark.parametrize("byte", range(0, 600, 37))
def test_a_flipped_bit_never_raises(tmp_path: Path, byte: int) -> None:
    path = learned_path("eamc", "key", tmp_path)
    keep_learned(path, learned())
    whole = bytearray(path.read_bytes())
    whole[byte % len(whole)] ^= 0x10
    path.write_bytes(whole)
    load_learned(path, EamcPredictor(2, 4), lambda _: None)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = learned_path("eamc", "key", tmp_path)
    np.savez(path, format=np.int64(1), matrices=np.array([{}], dtype=object), scale=np.ones(1))
    warnings: list[str] = []
    assert not load_learned(path, EamcPredictor(2, 4), warnings.append)
    assert "allow_pickle" in warnings[0]


def test_old_files_of_other_models_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_file, "MOST_FILES", 3)
    for number in range(5):
        path = learned_path("eamc", f"model{number}", tmp_path)
        keep_learned(path, learned())
        os.utime(path, (number, number))
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"eamc-model{n}.npz" for n in (2, 3, 4)]
