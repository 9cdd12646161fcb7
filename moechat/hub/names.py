"""Resolves model names: the demo, aliases, paths, hub repositories, and names in the library.

Nothing here needs torch or the network.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from moechat.config import Paths, user_paths
from moechat.errors import ModelNotFoundError, NotInLibraryError
from moechat.hub.library import find_store_to_run, names_here
from moechat.hub.local_models import local_model
from moechat.hub.model_ref import (
    DEMO,
    MANIFEST,
    PREFERRED_BITS,
    ModelRef,
    UnknownNameError,
    expand_alias,
    is_explicit_path,
    list_known_names,
    normalised,
    parse_hub_name,
    repository_slug,
    stored_commit,
    suggest_name,
)
from moechat.hub.sources import find_in_other_source

_DEMO_STORE = Path(__file__).parent / "demo"
_COMMIT = re.compile(r"[0-9a-f]{7,40}")  # in full or abbreviated


def resolve(model: str, *, bits: int | None = None, paths: Paths | None = None) -> ModelRef:
    """Resolve a name to a model on this machine.

    ``demo`` and the aliases come first (a directory of that name is written ``./demo``), then existing paths
    and everything that starts with ``.``, ``/`` or ``~``, then hub repositories ``org/name[@revision]``, or
    ``org/name[@revision]:VARIANT`` for one GGUF file of several;
    :func:`moechat.hub.name_forms.normalise_name` converts other spellings. Other names, and names of
    directories without a model, are looked up in the library: the names that ``moechat list`` shows, and
    those of the stores' directories. An alias that ``list`` shows as the name of a converted directory is
    that directory's store.

    Args:
        model: The name.
        bits: Bits per weight of the store to look for; ``None`` takes any, 4 bits first.
        paths: The user's directories; ``None`` takes those of the environment.

    Raises:
        NotInLibraryError: The name is a hub repository that has no store in the library.
        ModelNotFoundError: The name is unknown, or there is no model at the path.
        UsageError: The name matches several stores of the library.
    """
    try:
        return resolve_path_or_repository(model, bits=bits, paths=paths)
    except UnknownNameError as error:
        paths = paths or user_paths()
        ref = _find_by_shown_name(model, bits, paths)
        if ref is not None:
            return ref
        hint = error.hint
        if not os.path.exists(model):
            present = [name for name in names_here(paths) if name != DEMO]
            hint = suggest_name(model, present) or list_known_names(present)
        raise ModelNotFoundError(str(error), hint=hint) from None


def resolve_path_or_repository(
    model: str, *, bits: int | None = None, paths: Paths | None = None
) -> ModelRef:
    """Like :func:`resolve`, without looking up the names that ``moechat list`` shows, but for aliases.

    Raises:
        NotInLibraryError: The name is a hub repository that has no store in the library.
        ModelNotFoundError: The name is unknown, or there is no model at the path.
        UsageError: An alias is also the name of several stores of the library.
    """
    typed, model = model, normalised(model)
    if model.lower() == DEMO:
        return _demo()
    repository = expand_alias(model)
    if repository is not None:
        paths = paths or user_paths()
        own = _find_by_shown_name(typed, bits, paths, own_name=True)
        return own or _find_repository(repository, bits, paths, alias=model)
    if is_explicit_path(model):
        return local_model(model)
    if os.path.exists(model):
        return local_model(model, empty_error=ModelNotFoundError if "/" in model else UnknownNameError)
    if "/" in model:
        return _find_repository(model, bits, paths or user_paths())
    raise UnknownNameError(f"there is no model {model!r}", hint=suggest_name(model) or list_known_names())


def _demo() -> ModelRef:
    if not (_DEMO_STORE / MANIFEST).is_file():
        raise ModelNotFoundError(
            "this installation lacks the demo model", hint="install moechat again, or name a model directory"
        )
    return ModelRef(name=DEMO, slug=DEMO, store=_DEMO_STORE)


def _find_by_shown_name(
    model: str, bits: int | None, paths: Paths, *, own_name: bool = False
) -> ModelRef | None:
    entry = find_store_to_run(model, bits, paths, own_name=own_name)
    if entry is None:
        return None
    ref = ModelRef(name=entry.name, slug=entry.path.name.rpartition("-")[0], store=entry.path)
    if entry.commit is None:
        return ref
    try:
        return replace(parse_hub_name(entry.name), store=entry.path)
    except ModelNotFoundError:  # another program may have written the manifest
        return ref


def _find_repository(model: str, bits: int | None, paths: Paths, *, alias: str | None = None) -> ModelRef:
    ref = parse_hub_name(model)
    store = ref.find_in_library(paths.models, bits) or _find_commit(ref, paths.models, bits)
    if store is None and alias is not None:
        other = find_in_other_source(model, paths.models, bits)
        if other is not None:
            return other
    if store is None:
        with_bits = "" if bits is None else f" with {bits} bits"
        option = "" if bits is None else f" --bits {bits}"
        raise NotInLibraryError(
            f"{model}{with_bits} is not in the library", hint=f"moechat download {alias or model}{option}"
        )
    return replace(ref, store=store)


def _find_commit(ref: ModelRef, models: Path, bits: int | None) -> Path | None:
    """The store of the default branch, if it was made from the requested commit."""
    if ref.revision is None or not _COMMIT.fullmatch(ref.revision):
        return None
    assert ref.repository is not None
    default = replace(ref, slug=repository_slug(ref.repository, variant=ref.variant or ""), revision=None)
    for candidate in PREFERRED_BITS if bits is None else (bits,):
        path = default.find_in_library(models, candidate)
        if path is not None and (stored_commit(path) or "").startswith(ref.revision):
            return path
    return None
