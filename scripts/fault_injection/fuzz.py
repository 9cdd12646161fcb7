"""Fuzzing of every file that the program reads: the real program reads what a case's number makes."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from fault_injection import fuzz_texts, gguf_fields
from fault_injection.json_changes import changed, spelled
from fault_injection.phase import Outcome, Phase, ended_badly
from fault_injection.scene import Scene
from fault_injection.seals import MANIFEST, seal

_MOST_BYTES = 1 << 30  # beyond the undisturbed run
_SHORT = ("manifest", "gguf", "config", "template", "tokenizer", "settings")
CANARY = "canary"  # a file that a template makes if it gets code executed

# Changes the files of a case in its directory; returns the arguments of the command.
Make = Callable[["Fuzz", random.Random, Path], list[str]]


class Fuzz(Phase):
    """One kind of file.

    Args:
        scene: See there.
        part: Which; see ``MAKERS``.
    """

    kind = "fuzzing"

    def __init__(self, scene: Scene, part: str) -> None:
        self.name = f"fuzz-{part}"
        self.short = int(part in _SHORT)
        self.scene = scene
        self._make = MAKERS[part]
        self._directory = scene.work / self.name
        self._home = scene.work / f"home-{self.name}"

    def open(self) -> None:
        self._peak = self.scene.plain_peak_bytes

    def close(self) -> None:
        for directory in (self._directory, self._home):
            shutil.rmtree(directory, ignore_errors=True)

    def cases(self, seed: int) -> Iterator[str]:
        number = 0
        while True:
            yield f"{seed}:{number}"
            number += 1

    def run(self, case: str) -> Outcome:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        arguments = self._make(self, random.Random(f"{self.name}:{case}"), self._directory)
        if self.name == "fuzz-settings":
            home = self._directory
        else:
            home = self._home
            # Stores of other cases would fill the disk.
            shutil.rmtree(home / "data", ignore_errors=True)
        self.scene.control.disarm()
        ran = self.scene.programs.run(arguments, home, most_bytes=self._peak + _MOST_BYTES)
        canary = self.scene.work / CANARY
        if canary.exists():
            canary.unlink()
            return Outcome("code was executed", f"{arguments}")
        outcome = ended_badly(ran, None, self._peak)
        if outcome.fell:
            return Outcome(outcome.fell, f"{outcome.detail[-1200:]}; {_excerpt(self._directory)}")
        return Outcome(detail=f"exit {ran.status}: {ran.err[:200]}")


def _excerpt(directory: Path) -> str:
    """The small files of a case, shortened."""
    texts = []
    for path in sorted(directory.rglob("*")):
        if (path.is_file() and path.suffix in (".jinja", ".jsonl", ".toml")) or path.name == "config.json":
            texts.append(f"{path.name}: {path.read_bytes()[:1500]!r}")
    return "; ".join(texts)


def _model(fuzz: Fuzz, directory: Path, *, store: bool) -> Path:
    model = directory / "model"
    shutil.copytree(fuzz.scene.store if store else fuzz.scene.source, model)
    return model


def _changed_file(name: str) -> Make:
    """Changes a JSON file of a checkpoint, or of a store whose manifest fits."""

    def make(fuzz: Fuzz, generator: random.Random, directory: Path) -> list[str]:
        store = generator.random() < 0.5
        model = _model(fuzz, directory, store=store)
        path = model / name
        path.write_bytes(spelled(changed(json.loads(path.read_bytes()), generator), generator))
        if store:
            seal(model)
        if generator.random() < 0.1:
            return ["plan", str(model)]
        return fuzz.scene.answer(model, tokens=2)

    return make


def _tokenizer(fuzz: Fuzz, generator: random.Random, directory: Path) -> list[str]:
    model = _model(fuzz, directory, store=True)
    path = model / "tokenizer.json"
    content = json.loads(path.read_bytes())
    if generator.random() < 0.6:
        key = generator.choice(("normalizer", "pre_tokenizer"))
        content[key] = fuzz_texts.tokenizer_part(generator, key)
    else:
        content = changed(content, generator)
    path.write_bytes(spelled(content, generator))
    seal(model)
    prompt = generator.choice(
        ("Hi", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", "é\u0301 \x00 \U0001f600", "a b " * 200)
    )
    return fuzz.scene.answer(model, prompt.replace("\0", " "), tokens=2)


def _template(fuzz: Fuzz, generator: random.Random, directory: Path) -> list[str]:
    model = _model(fuzz, directory, store=True)
    text = fuzz_texts.template(generator, str(fuzz.scene.work / CANARY))
    (model / "chat_template.jinja").write_text(text)
    seal(model)
    return fuzz.scene.answer(model, tokens=2)


def _manifest(fuzz: Fuzz, generator: random.Random, directory: Path) -> list[str]:
    model = _model(fuzz, directory, store=True)
    content = changed(json.loads((model / MANIFEST).read_bytes()), generator)
    if isinstance(content, dict) and generator.random() < 0.9:
        try:
            seal(model, content)
        except UnicodeEncodeError:
            (model / MANIFEST).write_bytes(spelled(content, generator))
    else:
        (model / MANIFEST).write_bytes(spelled(content, generator))
    if generator.random() < 0.1:
        return ["show", str(model)]
    return fuzz.scene.answer(model, tokens=2)


def _safetensors(fuzz: Fuzz, generator: random.Random, directory: Path) -> list[str]:
    """Changes a header; tensors stay. Of a store, the manifest fits."""
    store = generator.random() < 0.5
    model = _model(fuzz, directory, store=store)
    path = generator.choice(sorted(model.glob("*.safetensors")))
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    text = spelled(changed(header, generator), generator)
    if store or generator.random() < 0.5:
        text += b" " * max(0, size - len(text))
    length = len(text)
    if generator.random() < 0.1:
        length = generator.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1)) % 2**64
    path.write_bytes(struct.pack("<Q", length) + text + data[8 + size :])
    if store:
        seal(model)
    return fuzz.scene.answer(model, tokens=2)


def _gguf(fuzz: Fuzz, generator: random.Random, directory: Path) -> list[str]:
    data = bytearray(gguf_fields.base_file(fuzz.scene.work).read_bytes())
    gguf_fields.change(data, generator)
    path = directory / "model.gguf"
    path.write_bytes(data)
    return fuzz.scene.answer(path, tokens=2)


def _prompts(fuzz: Fuzz, generator: random.Random, directory: Path) -> list[str]:
    path = directory / "prompts.jsonl"
    path.write_bytes(fuzz_texts.prompts(generator))
    return ["run", str(fuzz.scene.store), "--jsonl", str(path), "--max-tokens", "1", "--temperature", "0"]


def _settings(fuzz: Fuzz, generator: random.Random, directory: Path) -> list[str]:
    path = directory / "config" / "config.toml"
    path.parent.mkdir()
    path.write_bytes(fuzz_texts.settings(generator))
    commands = (
        ["config"],
        ["run", "demo", "--dry-run"],
        ["list"],
        ["config", "set", "run.top-k", "5"],
        ["plan", "demo"],
    )
    return [*generator.choice(commands)]


MAKERS: dict[str, Make] = {
    "manifest": _manifest,
    "safetensors": _safetensors,
    "gguf": _gguf,
    "config": _changed_file("config.json"),
    "generation": _changed_file("generation_config.json"),
    "template": _template,
    "tokenizer": _tokenizer,
    "prompts": _prompts,
    "settings": _settings,
}
