"""Bits of finished stores are flipped: found by verification, or by the checks of a running program."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from fault_injection.phase import Outcome, Phase, ended_badly
from fault_injection.scene import DEMO, Scene


class Flips(Phase):
    """A flipped bit is found when the store is verified.

    Args:
        scene: See there.
    """

    name = "flips"
    kind = "bit flips"
    short = 200

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._store = scene.work / "flipped"

    def open(self) -> None:
        shutil.copytree(self._scene.store, self._store)
        self._files = sorted(path for path in self._store.rglob("*") if path.is_file())

    def close(self) -> None:
        shutil.rmtree(self._store, ignore_errors=True)

    def cases(self, seed: int) -> Iterator[str]:
        return _random_places(self._files, random.Random(f"{seed}:{self.name}"))

    def run(self, case: str) -> Outcome:
        from moechat.errors import MoechatError
        from moechat.store.store import Store

        name, place, bit = case.rsplit(":", 2)
        path = self._store / name
        before = Store.open(self._store).manifest
        _flip(path, int(place), int(bit))
        try:
            store = Store.open(self._store)
            store.verify()
        except MoechatError as error:
            if error.exit_code not in (3, 6):
                return Outcome(f"exit {error.exit_code} for a flipped bit", str(error))
            return Outcome()
        except Exception as error:
            return Outcome(f"raised {type(error).__name__}", str(error))
        finally:
            _flip(path, int(place), int(bit))
        if store.manifest == before and name == "manifest.json":
            return Outcome()  # other white space
        return Outcome(f"not found in {path.suffix or path.name}", case)


class Rot(Phase):
    """A bit flips on the disk after the verification; size and times stay.

    Half of the runs map the store, half read blocks within a small budget. Each must give the right answer,
    or refuse the store.

    Args:
        scene: See there.
    """

    name = "rot"
    kind = "bit flips"
    short = 0  # its cases need runs of the demo within a budget and beyond

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._store = scene.work / "rotten"
        self._home = scene.work / "rotten-home"

    def open(self) -> None:
        shutil.copytree(DEMO, self._store)
        self._files = sorted(self._store.glob("*.safetensors"))
        self._arguments = {
            "mapped": self._scene.answer(self._store, tokens=12),
            "paged": [*self._scene.answer(self._store, tokens=12), "--ram", self._scene.small_budget],
        }
        self._references = {
            manner: self._scene.undisturbed(arguments, self._home)
            for manner, arguments in self._arguments.items()
        }

    def close(self) -> None:
        shutil.rmtree(self._store, ignore_errors=True)
        shutil.rmtree(self._home, ignore_errors=True)

    def cases(self, seed: int) -> Iterator[str]:
        generator = random.Random(f"{seed}:{self.name}")
        for place in _random_places(self._files, generator):
            yield f"{generator.choice(('mapped', 'paged'))}:{place}"

    def run(self, case: str) -> Outcome:
        from moechat.store.store import Store

        manner, name, place, bit = case.split(":")
        path = self._store / name
        # Times of change cannot be set back, so the stamp of the verification is written for the new ones.
        _flip(path, int(place), int(bit))
        Store.open(self._store).note_verified(self._home / "state")
        try:
            ran = self._scene.undisturbed(self._arguments[manner], self._home)
        finally:
            _flip(path, int(place), int(bit))
            Store.open(self._store).note_verified(self._home / "state")
        reference = self._references[manner]
        outcome = ended_badly(ran, reference.out, reference.peak_bytes)
        if outcome.fell or ran.status in (0, 6):
            return Outcome(f"{manner}: {outcome.fell}" if outcome.fell else "", outcome.detail)
        return Outcome(f"exit {ran.status} for a flipped bit", ran.err)


def _random_places(files: list[Path], generator: random.Random) -> Iterator[str]:
    """Bits of files; half of them in any file alike, so that small files have their share."""
    sizes = [file.stat().st_size for file in files]
    while True:
        number = (
            generator.randrange(len(files))
            if generator.random() < 0.5
            else generator.choices(range(len(files)), sizes)[0]
        )
        if sizes[number]:
            yield f"{files[number].name}:{generator.randrange(sizes[number])}:{generator.randrange(8)}"


def _flip(path: Path, place: int, bit: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        (value,) = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([value ^ (1 << bit)]), place)
    finally:
        os.close(descriptor)
