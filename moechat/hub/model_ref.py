"""What a model name refers to, and the grammar of hub names: ``org/name[@revision][:VARIANT]``.

Nothing here reads the library, imports torch or uses the network.
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
from dataclasses import dataclass
from pathlib import Path

from moechat.errors import ModelNotFoundError, UsageError
from moechat.geometry import DEFAULT_BITS, KEEP
from moechat.hub.gguf_parts import GGUF_SUFFIX
from moechat.hub.name_forms import normalise_name

ALIASES: dict[str, str] = {
    "qwen3.6": "Qwen/Qwen3.6-35B-A3B",
    "gpt-oss": "openai/gpt-oss-20b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "qwen3": "Qwen/Qwen3-30B-A3B",
    "coder-next": "Qwen/Qwen3-Coder-Next",
    "glm-flash": "zai-org/GLM-4.7-Flash",
    "glm-air": "zai-org/GLM-4.5-Air",
    "gemma4": "google/gemma-4-26B-A4B-it",
    "laguna": "poolside/Laguna-XS-2.1",
    "minimax": "MiniMaxAI/MiniMax-M2.5",
    "nemotron": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
    "deepseek-v4-flash": "deepseek-ai/DeepSeek-V4-Flash",
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen-moe": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
    "olmoe": "allenai/OLMoE-1B-7B-0125-Instruct",
    "phi-moe": "microsoft/Phi-3.5-MoE-instruct",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
}
DEMO = "demo"
MANIFEST = "manifest.json"  # written last: a directory that has it is a complete block store
MAX_MANIFEST_BYTES = 16 << 20
USUAL_FORMS = (DEFAULT_BITS, KEEP)  # of the experts of a store, if the user has not chosen the bits
PREFERRED_BITS = (*USUAL_FORMS, 8, 16, 3, 2)

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
# The hub's rules: at most 96 characters; letters, digits, "-", "_" and "."; no "--" or ".."; no "-" or "." at
# either end. So "--" joins the two parts in a directory name without ambiguity.
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", re.ASCII)
_VARIANT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}", re.ASCII)
_MAX_REPOSITORY = 96
_MAX_REVISION = 200
_SLUG_REVISION = 60


@dataclass(frozen=True)
class ModelRef:
    """A resolved model name. At most one of ``store`` and ``checkpoint`` is set.

    Attributes:
        name: The name to show: the user's, with aliases expanded.
        slug: File-system safe name, unique per model.
        store: A finished block store.
        checkpoint: A local directory or GGUF file to convert.
        repository: Hub repository, ``org/name``.
        revision: Requested branch, tag or commit; ``None`` is the repository's default branch.
        variant: Requested GGUF file of the repository: its name, or its type such as ``Q4_K_M``; ``None`` for
            the repository's safetensors, or its only GGUF file.
    """

    name: str
    slug: str
    store: Path | None = None
    checkpoint: Path | None = None
    repository: str | None = None
    revision: str | None = None
    variant: str | None = None

    def library_path(self, models: Path, bits: int) -> Path:
        """The directory of this model with this many bits per weight in the library ``models``.

        Args:
            models: The library.
            bits: Bits of a weight, or :data:`moechat.geometry.KEEP`.
        """
        return models / f"{self.slug}-{'kept' if bits == KEEP else f'{bits}bit'}"

    def find_in_library(self, models: Path, bits: int | None = None) -> Path | None:
        """The finished store in the library with these bits, or with any, in the order of ``PREFERRED_BITS``.

        Returns:
            ``None`` if there is none. An unreadable directory is returned only if there is no other store:
            opening it raises the error with its reason.
        """
        unreadable = None
        for candidate in PREFERRED_BITS if bits is None else (bits,):
            path = self.library_path(models, candidate)
            try:
                if holds_manifest(path):
                    return path
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:  # no directory can have such a name
                    unreadable = unreadable or path
        return unreadable


class UnknownNameError(ModelNotFoundError):
    """A name that is no path and matches nothing, or matches a directory without a model."""


def holds_manifest(directory: Path) -> bool:
    """Whether a directory (links are followed) holds the manifest of a finished store.

    Raises:
        OSError: The directory cannot be read.
    """
    try:
        return stat.S_ISREG(os.stat(directory / MANIFEST).st_mode)
    except OSError as error:
        if error.errno in _MISSING:
            return False
        raise


def stored_commit(store: Path) -> str | None:
    """The commit in a store's manifest; ``None`` if there is none or the manifest cannot be read."""
    try:
        with open(store / MANIFEST, "rb") as file:
            commit = json.loads(file.read(MAX_MANIFEST_BYTES + 1))["source"]["revision"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return commit if isinstance(commit, str) else None


def normalised(model: str) -> str:
    """The name in the form ``org/name[@revision][:VARIANT]``, an alias, or a path.

    Raises:
        ModelNotFoundError: The name is blank or holds a null character.
    """
    if not model.strip() or "\0" in model:
        raise ModelNotFoundError(f"{model!r} is not a model name", hint=list_known_names())
    return normalise_name(model)


def expand_alias(model: str) -> str | None:
    """``org/name[@revision]`` for an alias with or without a revision; ``None`` for other names."""
    alias, at, revision = model.partition("@")
    repository = ALIASES.get(alias.lower())
    return None if repository is None else repository + at + revision


def is_explicit_path(model: str) -> bool:
    """Whether a name can only be a path."""
    return model.startswith((".", "/", "~"))


def hub_model(model: str) -> ModelRef:
    """The hub repository that a name refers to, whether or not it is in the library.

    Raises:
        UsageError: The name refers to something on this machine.
        ModelNotFoundError: The name is unknown.
    """
    model = normalised(model)
    if model.lower() == DEMO:
        raise UsageError("demo ships inside moechat", hint="moechat run demo")
    repository = expand_alias(model)
    if repository is not None:
        return parse_hub_name(repository)
    if is_explicit_path(model) or os.path.exists(model):
        raise UsageError(f"{model} is a path on this machine", hint=f"moechat run {model}")
    if "/" in model:
        return parse_hub_name(model)
    raise ModelNotFoundError(f"there is no model {model!r}", hint=suggest_name(model) or list_known_names())


def parse_hub_name(model: str) -> ModelRef:
    """Parse ``org/name[@revision][:VARIANT]``.

    Raises:
        ModelNotFoundError: A part breaks the hub's rules.
    """
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
        # Types are case-insensitive, file names are not.
        variant = variant if variant.lower().endswith(GGUF_SUFFIX) else variant.upper()
    return ModelRef(
        name=f"{place}{colon}{variant}",
        slug=repository_slug(repository, revision, variant),
        repository=repository,
        revision=revision or None,
        variant=variant or None,
    )


def repository_slug(repository: str, revision: str = "", variant: str = "") -> str:
    """The file-system safe, unique name of a repository at a revision."""
    slug = repository.replace("/", "--")
    if revision:
        # The digest separates revisions that look alike once "/" is replaced or the end is cut off.
        plain = revision.replace("/", "--")
        slug += f"@{plain[:_SLUG_REVISION]}"
        if plain != revision or "--" in revision or len(plain) > _SLUG_REVISION:
            slug += "-" + hashlib.sha256(revision.encode()).hexdigest()[:8]
    return f"{slug}+{variant}" if variant else slug


def at_revision(name: str, revision: str) -> str:
    """``org/name@revision[:VARIANT]`` from ``org/name[:VARIANT]``."""
    place, colon, variant = name.partition(":")
    if not _VARIANT.fullmatch(variant):
        return f"{name}@{revision}"
    return f"{place}@{revision}{colon}{variant}"


def repository_of(name: str) -> str:
    """``org/name`` from ``org/name[@revision][:VARIANT]``."""
    return re.split("[@:]", name, maxsplit=1)[0]


def variant_of(name: str) -> str | None:
    """``VARIANT`` from ``org/name[@revision][:VARIANT]``."""
    return name.partition(":")[2] or None


def require_repository(repository: str, model: str | None = None) -> None:
    """Check a repository name, ``org/name``, against the hub's rules.

    Args:
        repository: The name.
        model: The user's spelling, for the message.

    Raises:
        ModelNotFoundError: It breaks a rule.
    """
    parts = repository.split("/")
    valid = (
        len(parts) == 2
        and len(repository) <= _MAX_REPOSITORY
        and all(_PART.fullmatch(part) and "--" not in part and ".." not in part for part in parts)
        and not repository.endswith(".git")
    )
    if not valid:
        raise ModelNotFoundError(
            f"{model or repository!r} is neither a directory here nor a repository name",
            hint="write org/name or org/name@revision, or ./path for a directory",
        )


def _check_revision(model: str, revision: str) -> None:
    # Git forbids more; this only keeps directory names from leaving their parent.
    if len(revision) > _MAX_REVISION or not _REVISION.fullmatch(revision) or ".." in revision:
        raise ModelNotFoundError(
            f"{model!r} has no valid revision after the @",
            hint="write a branch, a tag or a commit: org/name@main",
        )


def list_known_names(present: Sequence[str] = ()) -> str:
    """A hint with all names that work: the demo, models in the library, aliases."""
    return f"known names: {', '.join([DEMO, *present, *ALIASES])}; or org/name, or a directory"


def suggest_name(model: str, present: Sequence[str] = ()) -> str | None:
    """A hint with the known names closest to a misspelt one, at most three, if any is close."""
    known = {name.lower(): name for name in (*present, DEMO, *ALIASES)}
    close = difflib.get_close_matches(model.lower().strip("./~"), known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(known[name] for name in close)}?" if close else None
