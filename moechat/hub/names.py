"""What a model's name means: an alias, a hub repository, a directory, or the demo inside the package.

Nothing here needs torch or the network.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moechat.config import Paths, user_paths
from moechat.errors import ModelNotFoundError, NotInLibraryError, UsageError
from moechat.hub.addresses import plain_name

ALIASES: dict[str, str] = {
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen-moe": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
    "qwen3": "Qwen/Qwen3-30B-A3B",
    "olmoe": "allenai/OLMoE-1B-7B-0125-Instruct",
    "phi-moe": "microsoft/Phi-3.5-MoE-instruct",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
DEMO = "demo"

_DEMO_STORE = Path(__file__).parent / "demo"
MANIFEST = "manifest.json"  # written last: a directory that has it is a complete block store
_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # no store has files of these names
MAX_MANIFEST_BYTES = 16 << 20
GGUF_SUFFIX = ".gguf"
_PREFERRED_BITS = (4, 8, 16, 3, 2)
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

# The hub's own rules: 96 characters in all; letters, digits, "-", "_", "." with no "--" or "..", and no "-"
# or "." at either end. So "--" can join the two parts in a directory name without ambiguity.
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", re.ASCII)
_GGUF_PART = re.compile(
    r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<end>\.gguf)", re.IGNORECASE
)  # of gguf-split
_MAX_PARTS = 1000
_VARIANT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")  # in full, or as its beginning
_MAX_REPOSITORY = 96
_MAX_REVISION = 200


@dataclass(frozen=True)
class ModelRef:
    """What a name stands for. At most one of ``store`` and ``checkpoint`` is set.

    Attributes:
        name: The name to show: what the user wrote, aliases spelt out.
        slug: File-system safe name; different models have different ones.
        store: A finished block store.
        checkpoint: A local directory or GGUF file to convert.
        repository: Hub repository, ``org/name``.
        revision: Branch, tag or commit asked for; ``None`` is the repository's default.
        variant: Which GGUF file of the repository: its name, or the type in it, as ``Q4_K_M``; ``None``: the
            repository's safetensors, or its only GGUF file.
    """

    name: str
    slug: str
    store: Path | None = None
    checkpoint: Path | None = None
    repository: str | None = None
    revision: str | None = None
    variant: str | None = None

    def library_path(self, models: Path, bits: int) -> Path:
        """Where the library directory ``models`` keeps this model with so many bits a weight."""
        return models / f"{self.slug}-{bits}bit"

    def find_in_library(self, models: Path, bits: int | None = None) -> Path | None:
        """The finished store in the library with these bits, or with any, 4 bits first; ``None`` if none.

        One that cannot be looked into comes last: whoever opens it says why.
        """
        unreadable = None
        for candidate in _PREFERRED_BITS if bits is None else (bits,):
            path = self.library_path(models, candidate)
            try:
                if holds_manifest(path):
                    return path
            except OSError as error:
                # No directory can have a name that is too long, so none has this one.
                if error.errno != errno.ENAMETOOLONG:
                    unreadable = unreadable or path
        return unreadable


def holds_manifest(directory: Path) -> bool:
    """Whether a directory, or what a link leads to, has the manifest of a finished store.

    Raises:
        OSError: It cannot be looked into, so nobody knows.
    """
    try:
        return stat.S_ISREG(os.stat(directory / MANIFEST).st_mode)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return False
        raise


class _NothingHereError(ModelNotFoundError):
    """A name that is not written as a path means nothing, or something that exists but holds no model."""


def resolve(model: str, *, bits: int | None = None, paths: Paths | None = None) -> ModelRef:
    """Find out what a name stands for, and that it is here.

    ``demo`` and the aliases come first (a directory of that name is written ``./demo``), then existing paths
    and everything that starts with ``.``, ``/`` or ``~``, then hub repositories ``org/name[@revision]``, or
    ``org/name[@revision]:VARIANT`` for one GGUF file of several; other ways to write a name are those of
    :func:`moechat.hub.addresses.plain_name`. A name that means none of these, or a path that holds no model,
    is looked up among the names that ``moechat list`` shows and those of the stores' directories.

    Args:
        model: The name.
        bits: Bits a weight wanted of a model in the library; ``None`` takes what is there, 4 bits first.
        paths: The user's directories; ``None`` asks the environment.

    Raises:
        NotInLibraryError: It names a hub repository that has no store in the library.
        ModelNotFoundError: The name means nothing, or what it means is not on this machine.
        UsageError: It stands for several stores of the library.
    """
    try:
        return resolve_apart(model, bits=bits, paths=paths)
    except _NothingHereError as error:
        paths = paths or user_paths()
        ref = _of_library(model, bits, paths)
        if ref is not None:
            return ref
        if not os.path.exists(model):
            error.hint = _hint(model, paths)
        raise


def resolve_apart(model: str, *, bits: int | None = None, paths: Paths | None = None) -> ModelRef:
    """What :func:`resolve` finds without the names that ``moechat list`` shows.

    Raises:
        NotInLibraryError: It names a hub repository that has no store in the library.
        ModelNotFoundError: The name means nothing else, or what it means is not on this machine.
    """
    if not model.strip() or "\0" in model:
        raise ModelNotFoundError(f"{model!r} is not a model name", hint=_hint_names())
    model = plain_name(model)
    if model.lower() == DEMO:
        return _demo()
    alias, at, revision = model.partition("@")
    if alias.lower() in ALIASES:
        return _hub(ALIASES[alias.lower()] + at + revision, bits, paths or user_paths())
    if model.startswith((".", "/", "~")):
        return _directory(model)
    if os.path.exists(model):
        return _directory(model, none_here=ModelNotFoundError if "/" in model else _NothingHereError)
    if "/" in model:
        return _hub(model, bits, paths or user_paths())
    raise _NothingHereError(f"there is no model {model!r}", hint=_did_you_mean(model) or _hint_names())


def hub_model(model: str) -> ModelRef:
    """The hub repository that a name stands for, whether or not it is in the library.

    Raises:
        UsageError: The name means something on this machine, which cannot be downloaded.
        ModelNotFoundError: The name means nothing.
    """
    if not model.strip() or "\0" in model:
        raise ModelNotFoundError(f"{model!r} is not a model name", hint=_hint_names())
    model = plain_name(model)
    if model.lower() == DEMO:
        raise UsageError("demo ships inside moechat", hint="moechat run demo")
    alias, at, revision = model.partition("@")
    if alias.lower() in ALIASES:
        return _hub_ref(ALIASES[alias.lower()] + at + revision)
    if model.startswith((".", "/", "~")) or os.path.exists(model):
        raise UsageError(f"{model} is a path on this machine", hint=f"moechat run {model}")
    if "/" in model:
        return _hub_ref(model)
    raise ModelNotFoundError(f"there is no model {model!r}", hint=_did_you_mean(model) or _hint_names())


def _demo() -> ModelRef:
    if not (_DEMO_STORE / MANIFEST).is_file():
        raise ModelNotFoundError(
            "this installation lacks the demo model", hint="install moechat again, or name a model directory"
        )
    return ModelRef(name=DEMO, slug=DEMO, store=_DEMO_STORE)


def _of_library(model: str, bits: int | None, paths: Paths) -> ModelRef | None:
    """The store that a name shown by ``moechat list``, or a store's directory name, means."""
    from moechat.hub.library import find_store_to_run  # that module imports this one

    entry = find_store_to_run(model, bits, paths)
    if entry is None:
        return None
    ref = ModelRef(name=entry.name, slug=entry.path.name.rpartition("-")[0], store=entry.path)
    if entry.commit is None:
        return ref
    try:
        return replace(_hub_ref(entry.name), store=entry.path)
    except ModelNotFoundError:  # manifests may have been written by others
        return ref


def _directory(model: str, none_here: type[ModelNotFoundError] = ModelNotFoundError) -> ModelRef:
    try:
        path = Path(model).expanduser().resolve()
        is_directory, exists = path.is_dir(), path.exists()
        is_store, has_config = _is_store(path), (path / _CONFIG).is_file()
        models = [] if is_store or has_config else _gguf_models(path)
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long, no such user's home
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(f"the directory {model} cannot be opened: {reason}") from error
    if not exists:
        kind = "file" if path.suffix.lower() == GGUF_SUFFIX else "directory"
        raise ModelNotFoundError(f"there is no {kind} {path}", hint=_did_you_mean(model))
    if not is_directory and not models:
        raise none_here(
            f"{path} is neither a directory nor a .gguf file",
            hint="name the directory that holds config.json and the .safetensors files",
        )
    if len(models) > 1:
        raise ModelNotFoundError(
            f"{path} holds {len(models)} GGUF models",
            hint=f"name one of them: {', '.join(map(str, models[:8]))}",
        )
    if models:
        path = models[0]
    name = (path.stem if models else path.name) or "root"
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    slug = f"{_safe(name)}-{digest}"
    if is_store:
        return ModelRef(name=name, slug=slug, store=path)
    if not has_config and not models:
        raise none_here(
            f"{path} holds no model: there is neither {_CONFIG} nor {MANIFEST} nor a .gguf file",
            hint="name the directory that holds config.json and the .safetensors files",
        )
    return ModelRef(name=name, slug=slug, checkpoint=path)


def _gguf_models(path: Path) -> list[Path]:
    """A GGUF file, or those in a directory; of a model in parts the first."""
    if path.is_file():
        found = [path] if path.suffix.lower() == GGUF_SUFFIX else []
    else:
        found = sorted(entry for entry in path.glob("*") if entry.suffix.lower() == GGUF_SUFFIX)
    first = {first_gguf_part(entry.name): entry for entry in reversed(found)}
    return [entry.with_name(name) for name, entry in sorted(first.items())]


def gguf_parts(name: str) -> list[str]:
    """Names of all files of the GGUF model that a file of this name is, or is a part of, in order.

    A repository may name its files as it likes: a part 5 of 3, or 1 of 0, is a model in one file.
    """
    match = _gguf_part(name)
    return [name] if match is None else [_part_name(match, n) for n in range(1, int(match["count"]) + 1)]


def first_gguf_part(name: str) -> str:
    """The first of :func:`gguf_parts`, by which the files of many models are told apart in one pass."""
    match = _gguf_part(name)
    return name if match is None else _part_name(match, 1)


def _gguf_part(name: str) -> re.Match[str] | None:
    match = _GGUF_PART.fullmatch(name)
    return match if match and 1 <= int(match["number"]) <= int(match["count"]) <= _MAX_PARTS else None


def _part_name(match: re.Match[str], number: int) -> str:
    return f"{match['stem']}-{number:05d}-of-{match['count']}{match['end']}"


def _is_store(path: Path) -> bool:
    """Whether a directory is, or was before some damage, a block store.

    Exports for the web have a ``manifest.json`` too, so beside a checkpoint's weights it has to look like
    ours.
    """
    manifest = path / MANIFEST
    if not manifest.is_file():
        return False
    if not any((path / name).exists() for name in _WEIGHTS):
        return True
    try:
        with open(manifest, "rb") as file:
            content = json.loads(file.read(MAX_MANIFEST_BYTES + 1))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "format_version" in content


def _hub(model: str, bits: int | None, paths: Paths) -> ModelRef:
    ref = _hub_ref(model)
    store = ref.find_in_library(paths.models, bits) or _find_commit(ref, paths.models, bits)
    if store is None:
        wanted = "" if bits is None else f" with {bits} bits"
        option = "" if bits is None else f" --bits {bits}"
        raise NotInLibraryError(
            f"{model}{wanted} is not in the library", hint=f"moechat download {model}{option}"
        )
    return replace(ref, store=store)


def _find_commit(ref: ModelRef, models: Path, bits: int | None) -> Path | None:
    """The store of the repository's default branch, if it was made of the commit that is asked for."""
    if ref.revision is None or not _COMMIT.fullmatch(ref.revision):
        return None
    assert ref.repository is not None
    default = replace(ref, slug=_slug(ref.repository, "", ref.variant or ""), revision=None)
    for candidate in _PREFERRED_BITS if bits is None else (bits,):
        path = default.find_in_library(models, candidate)
        if path is not None and (stored_commit(path) or "").startswith(ref.revision):
            return path
    return None


def stored_commit(store: Path) -> str | None:
    """The commit that a store's manifest says it was made of; ``None`` if it says none or cannot be read."""
    try:
        with open(store / MANIFEST, "rb") as file:
            commit = json.loads(file.read(MAX_MANIFEST_BYTES + 1))["source"]["revision"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return commit if isinstance(commit, str) else None


def _hub_ref(model: str) -> ModelRef:
    place, colon, variant = model.partition(":")
    repository, at, revision = place.partition("@")
    require_repository(repository, model)
    if at:
        _check_revision(model, revision)
    if colon:
        if not _VARIANT.fullmatch(variant):
            raise ModelNotFoundError(
                f"{model!r} has no name of a GGUF file after the colon",
                hint="write a type or a file: org/name:Q4_K_M or org/name:model.gguf",
            )
        # Types are spelt in either case; a name of a file says which one it is only as it stands.
        variant = variant if variant.lower().endswith(GGUF_SUFFIX) else variant.upper()
    return ModelRef(
        name=f"{place}{colon}{variant}",
        slug=_slug(repository, revision, variant),
        repository=repository,
        revision=revision or None,
        variant=variant or None,
    )


def _slug(repository: str, revision: str, variant: str) -> str:
    slug = repository.replace("/", "--")
    if revision:
        # Revisions may hold "/" and "--": the digest keeps those apart that look alike as file names.
        plain = revision.replace("/", "--")
        slug += f"@{plain[:60]}"
        if plain != revision or "--" in revision or len(plain) > 60:
            slug += "-" + hashlib.sha256(revision.encode()).hexdigest()[:8]
    return f"{slug}+{variant}" if variant else slug


def at_revision(name: str, revision: str) -> str:
    """The name of a hub model, ``org/name[:VARIANT]``, with a revision in it."""
    place, colon, variant = name.partition(":")
    if not _VARIANT.fullmatch(variant):
        return f"{name}@{revision}"
    return f"{place}@{revision}{colon}{variant}"


def repository_of(name: str) -> str:
    """``org/name`` of a hub model's name."""
    return re.split("[@:]", name, maxsplit=1)[0]


def variant_of(name: str) -> str | None:
    """The GGUF model in the name of a hub model, ``org/name[@revision][:VARIANT]``."""
    return name.partition(":")[2] or None


def require_repository(repository: str, model: str | None = None) -> None:
    """Check that a name can be one of a repository, ``org/name``, by the hub's own rules.

    Args:
        repository: The name.
        model: What the user wrote, for the message.

    Raises:
        ModelNotFoundError: It cannot.
    """
    parts = repository.split("/")
    good = (
        len(parts) == 2
        and len(repository) <= _MAX_REPOSITORY
        and all(_PART.fullmatch(part) and "--" not in part and ".." not in part for part in parts)
        and not repository.endswith(".git")
    )
    if not good:
        raise ModelNotFoundError(
            f"{model or repository!r} is neither a directory here nor a repository name",
            hint="write org/name or org/name@revision, or ./path for a directory",
        )


def _check_revision(model: str, revision: str) -> None:
    # Git's own rules forbid more; what matters here is that nothing climbs out of a directory.
    if len(revision) > _MAX_REVISION or not _REVISION.fullmatch(revision) or ".." in revision:
        raise ModelNotFoundError(
            f"{model!r} has no valid revision after the @",
            hint="write a branch, a tag or a commit: org/name@main",
        )


def _safe(name: str) -> str:
    """A part of a file name: ASCII letters, digits and single dashes, so never the ``--`` of a hub name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:60].rstrip("-.") or "model"


def _hint(model: str, paths: Paths) -> str:
    """What to write instead of a name that means nothing: the models that are here are known names too."""
    from moechat.hub.library import names_here  # that module imports this one

    here = [name for name in names_here(paths) if name != DEMO]
    return _did_you_mean(model, here) or _hint_names(here)


def _hint_names(here: Sequence[str] = ()) -> str:
    return f"known names: {', '.join([DEMO, *here, *ALIASES])}; or org/name, or a directory"


def _did_you_mean(model: str, here: Sequence[str] = ()) -> str | None:
    known = {name.lower(): name for name in (*here, DEMO, *ALIASES)}
    close = difflib.get_close_matches(model.lower().strip("./~"), known, n=1, cutoff=0.6)
    return f"did you mean {known[close[0]]}?" if close else None
