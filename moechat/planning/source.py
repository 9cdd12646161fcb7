"""Finds the configuration of a model to plan for; the weights need not be present."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moechat.config import user_paths
from moechat.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, UsageError
from moechat.geometry import DEFAULT_BITS, KEEP, ExpertGeometry, nominal_bits
from moechat.hub.known_shapes import find_shape, shape_names
from moechat.hub.library import names_here
from moechat.hub.model_ref import ALIASES, ModelRef
from moechat.hub.names import resolve
from moechat.outline.config_source import ConfigSource, config_in, known_shape, read_now
from moechat.store.tensor_headers import HeaderTable

if TYPE_CHECKING:
    from moechat.sizes.model_outline import ModelOutline
    from moechat.store.checkpoint import Checkpoint
    from moechat.store.expert_refs import CheckpointPlan
    from moechat.store.store import Store


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
        name: Name to show.
        config: Its configuration.
        bits: Bits of an expert weight; of kept encodings those of :class:`moechat.geometry.ExpertGeometry`.
        weights: ``store`` (converted, ready to run), ``checkpoint`` (to be converted), or ``none``: only the
            configuration is here.
        store: The finished store, if one was named.
        headers: Names, types and shapes of its dense weights, where store or checkpoint are here.
        note: A remark for the user, or empty.
        source_format: The format of the checkpoint's quantised weights, for people; ``None``: they are plain.
        experts: The experts of a checkpoint, if a store can keep their encodings or they are quantised anew,
            and the user has not chosen the bits.
    """

    name: str
    config: ConfigSource
    bits: int
    weights: str
    store: Store | None = None
    headers: HeaderTable | None = None
    note: str = ""
    source_format: str | None = None
    experts: CheckpointPlan | None = None

    def geometry(self, outline: ModelOutline) -> tuple[ExpertGeometry, str]:
        """Shape and encoding of the experts, as loading finds or makes them, and a remark or nothing.

        Args:
            outline: Sizes of the model.
        """
        from moechat.store.kept import choose_bits

        lost = ""
        if self.store is not None:
            geometry = self.store.geometry
        elif self.experts is None:
            geometry = outline.geometry(self.bits)
        else:
            bits, lost = choose_bits(None, self.experts)
            kept = self.experts.kept if bits == KEEP else ()
            gated = outline.experts.gate.gated
            geometry = replace(outline.geometry(nominal_bits(kept, gated=gated) if kept else bits), kept=kept)
        return geometry, lost


def find_model(model: str | Path, bits: int | None) -> PlannedModel:
    """Find a model by its name.

    In this order: a file like a ``config.json``; everything that ``moechat run`` takes (the demo, an alias
    or a repository in the library, a checkpoint, a store, a name that ``moechat list`` shows); a directory
    with nothing but a ``config.json``; the shapes of known models.

    Args:
        model: The name.
        bits: Bits of an expert weight wanted; ``None`` takes the store's, else 4.

    Raises:
        ModelNotFoundError: There is no such model.
        MoechatError: Its files cannot be read. Whether moechat can run it is found when it is counted.
    """
    text = str(model)
    if _is_file(text):
        path = Path(text).expanduser().resolve()
        name = path.parent.name or path.name if path.name == "config.json" else path.name
        return PlannedModel(name, config_in(path), bits or DEFAULT_BITS, "none")
    try:
        ref = resolve(text, bits=bits)
    except ModelNotFoundError as error:
        shape = find_shape(text)
        if shape is None:
            raise _with_shapes(error, text) from error
        return PlannedModel(shape, known_shape(shape), bits or DEFAULT_BITS, "none")
    return _here(ref, bits)


def _is_file(text: str) -> bool:
    try:
        return text.lower().endswith(".json") and Path(text).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # resolve() has a better message for such names
        return False


def _here(ref: ModelRef, bits: int | None) -> PlannedModel:
    from moechat.store.checkpoint import Checkpoint
    from moechat.store.quantised.schemes import source_format_of
    from moechat.store.store import Store

    if ref.store is not None:
        store = Store.open(ref.store)
        config, headers = config_in(store.path), HeaderTable.of(store.dense)
        found = PlannedModel(
            ref.name,
            config,
            store.geometry.bits,
            "store",
            store,
            headers,
            source_format=source_format_of(store.path),
        )
        if bits is None or bits == store.geometry.wanted:
            return found
        note = f"{ref.name} is stored with {store.geometry.title}; this is the plan for {bits} bits"
        return replace(found, bits=bits, weights="none", store=None, note=note)
    assert ref.checkpoint is not None
    free, bits = bits is None, bits or DEFAULT_BITS
    with refusals_with_hint(ref.name):
        if ref.checkpoint.is_file():
            from moechat.models.gguf_source import opened_gguf

            with opened_gguf(ref.checkpoint) as opened:
                return PlannedModel(
                    ref.name,
                    read_now(config_in(opened.path)),
                    bits,
                    "checkpoint",
                    headers=HeaderTable.of(opened),
                    experts=_encoded(opened) if free else None,
                )
        config = config_in(ref.checkpoint)
        if not any(ref.checkpoint.glob("*.safetensors")):
            return PlannedModel(ref.name, config, bits, "none")
        try:
            checkpoint = Checkpoint.open(ref.checkpoint)
            headers = HeaderTable.of(checkpoint)
            experts = _encoded(checkpoint) if free else None
        except CheckpointError as error:  # a plan needs only the configuration
            note = f"the weights cannot be loaded: {error}"
            return PlannedModel(ref.name, config, bits, "checkpoint", note=note)
        return PlannedModel(
            ref.name,
            config,
            bits,
            "checkpoint",
            headers=headers,
            source_format=checkpoint.source_format,
            experts=experts,
        )


def _encoded(checkpoint: Checkpoint) -> CheckpointPlan | None:
    """The experts of a checkpoint, if a store may keep their encoding."""
    from moechat.models.checkpoint_mapping import plan_checkpoint
    from moechat.store.kept import may_be_kept

    return plan_checkpoint(checkpoint) if may_be_kept(checkpoint) else None


@contextmanager
def refusals_with_hint(name: str) -> Iterator[None]:
    """Add a hint to errors while a configuration is read and its model built.

    Args:
        name: Name of the model, to show.

    Raises:
        UnsupportedModelError: The configuration cannot be used; replaces a ``UsageError``.
    """
    hint = (
        f"compare the configuration of {name} with the config.json in the model's own repository, and fetch "
        f"that one if they differ; if they do not, this version cannot run the model. "
        f"Shapes known without a file: {', '.join(shape_names())}"
    )
    try:
        with warnings.catch_warnings():
            # Torch warns of sizes of 0; the error that follows is clearer.
            warnings.simplefilter("ignore", UserWarning)
            yield
    except UnsupportedModelError as error:
        error.hint = error.hint or hint
        raise
    except UsageError as error:  # an expert size is out of range
        reason = f"the configuration of {name} cannot be used: {error}"
        raise UnsupportedModelError(reason, hint=error.hint or hint) from error


def _with_shapes(error: ModelNotFoundError, text: str) -> ModelNotFoundError:
    """The same error, with the known shapes among the suggestions."""
    known = list(dict.fromkeys([*names_here(user_paths()), *ALIASES, *shape_names()]))
    close = difflib.get_close_matches(text.lower(), known, n=2, cutoff=0.6)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = (
            f"a plan needs no weights: name a directory with a config.json, such a file, "
            f"or one of: {', '.join(known)}"
        )
    if "not in the library" in str(error):
        return ModelNotFoundError(
            f"{text} is not in the library, and its shape is not among the known ones",
            hint="fetch its config.json and name that file or its directory: a plan needs no weights",
        )
    return ModelNotFoundError(str(error), hint=hint)
