"""From a name to the configuration that a plan needs: nothing more of a model has to be here."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.config import user_paths
from moechat.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from moechat.hub.known_shapes import find_shape, shape_names
from moechat.hub.library import names_here
from moechat.hub.names import ALIASES, ModelRef, resolve

if TYPE_CHECKING:
    from moechat.store.store import Store

_DEFAULT_BITS = 4


@dataclass(frozen=True)
class PlannedModel:
    """A model by what is known of it.

    Attributes:
        name: To show.
        config: transformers' configuration.
        bits: Of an expert weight.
        weights: ``store`` (converted, ready to run), ``checkpoint`` (to be converted), or ``none``: only the
            configuration is here.
        store: The finished store, if that is what was named.
        note: What the user may not expect, or empty.
    """

    name: str
    config: Any
    bits: int
    weights: str
    store: Store | None = None
    note: str = ""


def find_model(model: str | Path, bits: int | None) -> PlannedModel:
    """What a name stands for.

    In this order: a file like a ``config.json``; whatever ``moechat run`` takes (the demo, an alias or a
    repository in the library, a checkpoint, a store, a name that ``moechat list`` shows); a directory with
    nothing but a ``config.json``; the shapes of known models.

    Args:
        model: The name.
        bits: Bits of an expert weight wanted; ``None`` takes the store's, else 4.

    Raises:
        ModelNotFoundError: The name means nothing.
        MoechatError: What it means cannot be read or run.
    """
    # Imported here: these bring torch and transformers.
    from moechat.models.shape import known_config, read_config

    text = str(model)
    if _is_file(text):
        path = Path(text).expanduser().resolve()
        name = path.parent.name or path.name if path.name == "config.json" else path.name
        with refusals_with_hint(name):
            return PlannedModel(name, read_config(path), bits or _DEFAULT_BITS, "none")
    try:
        ref = resolve(text, bits=bits)
    except ModelNotFoundError as error:
        shape = find_shape(text)
        if shape is None:
            raise _with_shapes(error, text) from error
        return PlannedModel(shape, known_config(shape), bits or _DEFAULT_BITS, "none")
    return _here(ref, bits)


def _is_file(text: str) -> bool:
    try:
        return text.lower().endswith(".json") and Path(text).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # what resolve() says of such names is better
        return False


def _here(ref: ModelRef, bits: int | None) -> PlannedModel:
    from moechat.models.shape import read_config
    from moechat.store.store import Store

    if ref.store is None:
        assert ref.checkpoint is not None
        if ref.checkpoint.is_file():
            from moechat.models.gguf_source import opened_gguf

            with opened_gguf(ref.checkpoint) as opened, refusals_with_hint(ref.name):
                config = read_config(opened.path)
            return PlannedModel(ref.name, config, bits or _DEFAULT_BITS, "checkpoint")
        has_weights = any(ref.checkpoint.glob("*.safetensors"))
        weights = "checkpoint" if has_weights else "none"
        with refusals_with_hint(ref.name):
            config = read_config(ref.checkpoint)
        return PlannedModel(ref.name, config, bits or _DEFAULT_BITS, weights)
    store = Store.open(ref.store)
    found = PlannedModel(ref.name, read_config(store.path), store.geometry.bits, "store", store)
    if bits is None or bits == store.geometry.bits:
        return found
    note = f"{ref.name} is stored with {store.geometry.bits} bits; this is what {bits} would take"
    return replace(found, bits=bits, weights="none", store=None, note=note)


@contextmanager
def refusals_with_hint(name: str) -> Iterator[None]:
    """While a configuration is read and its model built: what refuses it says what to do next.

    Args:
        name: Of the model, to show.

    Raises:
        UnsupportedModelError: In place of every refusal of a value.
    """
    hint = (
        f"compare the configuration of {name} with the config.json in the model's own repository, and fetch "
        f"that one if they differ; if they do not, this version cannot run the model. "
        f"Shapes known without a file: {', '.join(shape_names())}"
    )
    try:
        with warnings.catch_warnings():
            # Of torch, about sizes of nothing: the refusal that follows says more.
            warnings.simplefilter("ignore", UserWarning)
            yield
    except UnsupportedModelError as error:
        error.hint = error.hint or hint
        raise
    except UsageError as error:  # a size of the experts
        reason = f"the configuration of {name} cannot be used: {error}"
        raise UnsupportedModelError(reason, hint=error.hint or hint) from error


def _with_shapes(error: ModelNotFoundError, text: str) -> ModelNotFoundError:
    """The same, with what a plan knows besides what can be run."""
    known = [*names_here(user_paths()), *ALIASES, *shape_names()]
    close = difflib.get_close_matches(text.lower(), known, n=2, cutoff=0.6)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = (
            f"a plan needs no weights: name a directory with a config.json, such a file, "
            f"or one of: {', '.join(dict.fromkeys(known))}"
        )
    if "not in the library" in str(error):
        return ModelNotFoundError(
            f"{text} is not in the library, and its shape is not among the known ones",
            hint="fetch its config.json and name that file or its directory: a plan needs no weights",
        )
    return ModelNotFoundError(str(error), hint=hint)
