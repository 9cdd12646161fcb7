"""The files that bench/cpu measures: a store and GGUF files of every model, made once and kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_shapes import FORMATS, GgufPlan, plan_gguf
from llama_peer import LlamaPeer
from worker import Worker

from moechat.hub.known_shapes import shape_names, shape_values

_HERE = Path(__file__).resolve().parent
_SLACK = 2 << 30
_PIECE = 1 << 22
# Neurons of an expert in the file that shows what the rest of the model takes: a block of Q4_K.
THIN = 256

Say = Callable[[str], None]


class BenchError(Exception):
    """The comparison cannot go on; says why and what to do."""


@dataclass(frozen=True)
class Model:
    """One model to be measured.

    Attributes:
        name: For people and file names.
        config: A transformers configuration, uncut.
        layers: Decoder layers to keep.
    """

    name: str
    config: Mapping[str, Any]
    layers: int

    @property
    def cut(self) -> dict[str, Any]:
        """The configuration with these layers."""
        return {**self.config, "num_hidden_layers": self.layers}

    @property
    def label(self) -> str:
        """Name and layers, as part of file names."""
        return f"{self.name}-{self.layers}l"

    def plan(self, kind: str, neurons: int | None = None) -> GgufPlan:
        """Its GGUF file.

        Raises:
            BenchError: There is no such file for this model.
        """
        try:
            return plan_gguf(self.cut, kind, neurons=neurons)
        except (KeyError, ValueError) as error:
            raise BenchError(f"{self.name} cannot be a GGUF file: {error}; use --only moechat") from error


def parse_models(text: str) -> list[Model]:
    """``NAME[:LAYERS],...`` with names of shapes that ship with moechat, or paths of configurations.

    Raises:
        BenchError: There is no such model, or it has not so many layers.
    """
    models = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        name, colon, count = piece.rpartition(":") if ":" in piece else (piece, "", "")
        if name.endswith(".json"):
            try:
                config = json.loads(Path(name).read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise BenchError(f"{name} cannot be read as a configuration: {error}") from error
            name = Path(name).stem
        elif name in shape_names():
            config = shape_values(name)
        else:
            raise BenchError(f"there is no shape {name!r}; choose one of {', '.join(shape_names())}")
        most = config["num_hidden_layers"]
        if colon and not (count.isdigit() and 1 <= int(count) <= most):
            raise BenchError(f"{piece}: {name} has 1 to {most} layers")
        models.append(Model(name, config, int(count) if colon else most))
    if not models:
        raise BenchError("no model is named; write --models mixtral-8x7b:4")
    return models


class Files:
    """What is in the work directory.

    Attributes:
        work: The directory.
    """

    def __init__(self, work: Path) -> None:
        self.work = work
        self._stores: dict[str, Path] = {}

    def gguf(self, model: Model, kind: str, neurons: int | None = None) -> Path:
        """Path of a GGUF file; the name changes with what is in it."""
        plan = model.plan(kind, neurons)
        thin = "" if neurons is None else f"-{neurons}n"
        return self.work / f"{model.label}{thin}-{kind}-{plan.fingerprint}.gguf"

    def store(self, model: Model) -> Path:
        """Path of a model's store, once :func:`prepare` has found it."""
        return self._stores[model.label]

    @contextmanager
    def moechat_worker(self, name: str, isa: str | None = None) -> Iterator[Worker]:
        """A process for moechat, whose own files are in the work directory, too."""
        environment = {"MOECHAT_HOME": str(self.work / "home")}
        if isa is not None:
            environment["MOECHAT_ISA"] = isa
        with Worker(name, [sys.executable, str(_HERE / "moechat_worker.py")], environment) as worker:
            yield worker

    def find_store(self, worker: Worker, model: Model) -> int:
        """Ask how a model's store is called; returns its size."""
        found = worker.ask("sizes", name=model.name, config=dict(model.config), layers=model.layers)
        self._stores[model.label] = self.work / "stores" / found["name"]
        nbytes: int = found["nbytes"]
        return nbytes


def has_thin(model: Model) -> bool:
    """Whether experts can be told from the rest by a file with fewer neurons."""
    inner = model.config.get("moe_intermediate_size", model.config.get("intermediate_size", 0))
    return bool(inner > THIN)


def prepare(
    files: Files,
    models: Sequence[Model],
    formats: Sequence[str],
    llama: LlamaPeer | None,
    options: Mapping[str, Any],
    say: Say,
    *,
    load: bool,
    kept: bool = False,
) -> dict[str, int]:
    """Make what is missing, after a look at the disk; returns the size of every file and store by path.

    Args:
        files: The work directory.
        models: To be measured.
        formats: Of GGUF files.
        llama: Reads them; ``None``: there are none.
        options: Of :func:`moechat.load`.
        say: For people.
        load: Load stores that are there, too: they are verified, and packed dense weights are kept.
        kept: Convert the GGUF files, too.

    Raises:
        BenchError: The disk is too small, or a file cannot be written.
    """
    files.work.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[Path, GgufPlan]] = []
    if llama is not None:
        for model in models:
            kinds: list[tuple[str, int | None]] = [(kind, None) for kind in formats]
            if FORMATS[0] in formats and has_thin(model):
                kinds.append((FORMATS[0], THIN))
            wanted += [(files.gguf(model, kind, thin), model.plan(kind, thin)) for kind, thin in kinds]
    sizes: dict[str, int] = {}
    with files.moechat_worker("moechat") as worker:
        stores = [(model, files.find_store(worker, model)) for model in models]
        missing = [(model, nbytes) for model, nbytes in stores if not _is_complete(files.store(model))]
        needed = sum(nbytes for _, nbytes in missing)  # packed dense weights are within the slack
        needed += sum(plan.nbytes for path, plan in wanted if not path.exists())
        free = shutil.disk_usage(files.work).free
        if needed:
            say(f"{needed / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free in {files.work}")
        if needed and needed + _SLACK > free:
            raise BenchError(
                f"the disk of {files.work} has {free / 1e9:.1f} GB free, {(needed + _SLACK) / 1e9:.1f} GB "
                "are needed; use fewer models or layers, or another --work"
            )
        for model, nbytes in stores if load else missing:
            path = files.store(model)
            say(f"{'loading' if _is_complete(path) else 'writing'} {path.name}, {nbytes / 1e9:.2f} GB")
            worker.ask(
                "prepare",
                name=model.name,
                config=dict(model.config),
                layers=model.layers,
                path=str(path),
                options=dict(options),
            )
    for model in models:
        sizes[files.store(model).name] = sum(file.stat().st_size for file in files.store(model).iterdir())
    for path, plan in wanted:
        if not path.exists():
            say(f"writing {path.name}, {plan.nbytes / 1e9:.2f} GB")
            write_gguf(plan, path)
        sizes[path.name] = path.stat().st_size
    if load and kept:
        with files.moechat_worker("moechat") as worker:
            for path in [files.gguf(model, kind) for model in models for kind in formats]:
                made = worker.ask("convert", path=str(path), options=dict(options))
                rate = path.stat().st_size / made["seconds"] / 1e9
                say(f"{path.name} converted in {made['seconds']:.1f} s, {rate:.2f} GB/s")
    return sizes


def _is_complete(store: Path) -> bool:
    # The manifest is written last.
    return (store / "manifest.json").is_file()


def write_gguf(plan: GgufPlan, path: Path) -> None:
    """Write a GGUF file with random weights, in a process of its own.

    Raises:
        BenchError: It cannot be written.
    """
    described = path.with_suffix(".json")
    described.write_text(json.dumps(plan.to_json()), "utf-8")
    command = [sys.executable, str(_HERE / "gguf_files.py"), str(described), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        path.with_name(path.name + ".part").unlink(missing_ok=True)
        raise BenchError(f"{path} cannot be written: {done.stderr.strip()[-1000:]}")


def page_in(path: Path) -> None:
    """Read a file, or all files of a directory, so that its pages are in memory."""
    piece = bytearray(_PIECE)
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        with file.open("rb", buffering=0) as source:
            while source.readinto(piece):
                pass
