"""Runs passes of a loaded model: recovers from a full graphics memory and translates native errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from moechat import _native
from moechat.engine.stats import Meter
from moechat.errors import DeviceLostError, DoesNotFitError, MoechatError, StoreReadError
from moechat.loading import LoadedModel
from moechat.models.attention_cache import cache_lengths, restore_lengths
from moechat.models.cache_argument import CACHE
from moechat.models.cache_states import CacheCopy, can_copy, can_cut
from moechat.models.decode.together import Copies, TogetherPass
from moechat.models.threads import thread_invariant_pass
from moechat.models.wave_chunks import NotInWavesError
from moechat.models.waves import Passed, Take
from moechat.store.store import Store

# Share of the pages on a GPU that is freed after its memory ran out.
OOM_SHRINK_FRACTION = 0.1
_NOT_IN_WAVES = object()


class PassRunner:
    """Runs forward passes until the model is closed. Not safe for use by two threads at once.

    Args:
        name: Of the model, for messages.
        loaded: The model.
        meter: Restarted when experts are removed from a GPU.

    Attributes:
        loaded: The parts of the model. The engine replaces the value when it closes the model or changes how
            its experts are held; another thread may do so at any time, so read it once.
        notes: Sentences for the user about recoveries.
    """

    def __init__(self, name: str, loaded: LoadedModel, meter: Meter) -> None:
        self.loaded = loaded
        self.notes: list[str] = []
        self._name = name
        self._meter = meter
        self._process = os.getpid()
        self._waves_noted = False

    def usable_model(self) -> Any:
        """The transformers model, if it can still compute.

        Raises:
            MoechatError: The engine was closed, or this process was forked from the one that loaded it.
        """
        model = self.loaded.model
        if model is None:
            raise MoechatError(f"{self._name} was closed", hint="load it again")
        if os.getpid() != self._process:
            # The parent's threads do not exist here; torch would wait for its own forever.
            raise MoechatError(
                f"a forked child cannot use {self._name}, which its parent loaded",
                hint="start the child with multiprocessing's 'spawn' method, and load the model there",
            )
        return model

    def run(self, ids: torch.Tensor, cache: Any = None, *, use_cache: bool = True, **arguments: Any) -> Any:
        """One pass; if a GPU's memory runs out, frees pages of experts and tries once more.

        Args:
            ids: Token ids, int64 ``[1, tokens]``.
            cache: Attention cache, changed in place; ``None``: the model makes one, if ``use_cache``.
            use_cache: Whether the output has a cache.
            arguments: Of the model's ``forward``.

        Returns:
            The output of the transformers model.

        Raises:
            DoesNotFitError: The graphics memory is too small even with fewer experts.
            DeviceLostError: The GPU has failed.
            StoreDamagedError: A file of the store has changed or is damaged, or mapped bytes are lost.
            StoreReadError: Experts cannot be read for now.
            MoechatError: The engine is closed, or this process is a forked one.
        """
        arguments = {**arguments, "use_cache": use_cache}
        if use_cache:
            arguments[CACHE] = cache
        return self._with_retry(lambda loaded: self._pass(loaded, ids, arguments), cache, ids.shape[1])

    @property
    def most_together(self) -> int:
        """Most tokens of :meth:`run_together`; 0: the model cannot be computed so."""
        together = self.loaded.native_modules.together
        return 0 if together is None else together.most

    def run_together(self, tokens: Sequence[int], caches: Sequence[Any]) -> torch.Tensor | None:
        """One pass for a token of each of several attention caches.

        Args:
            tokens: Their ids, at most :attr:`most_together`.
            caches: From :meth:`moechat.engine.decoder.Decoder.new_cache`; none twice; changed in place.

        Returns:
            Logits ``[tokens, vocabulary]``, those of passes of their own; ``None``, without any change, if
            this model cannot be computed so.

        Raises:
            MoechatError: As :meth:`run`. The layers of the caches may differ in length then.
        """
        found: torch.Tensor | None = self._try_together(lambda together: together.run(tokens, caches))
        return found

    def _try_together(self, compute: Callable[[TogetherPass], Any]) -> Any:
        """Result of ``compute``; ``None`` if the model cannot be computed so."""

        def computed(loaded: LoadedModel) -> Any:
            together = loaded.native_modules.together
            if together is None:
                return None
            loaded.waves.reset()  # one that was interrupted
            return compute(together)

        return self._try(computed)

    @property
    def most_successive(self) -> int:
        """Most tokens of :meth:`run_successive`; 0: the model cannot be computed so."""
        together = self.loaded.native_modules.together
        return 0 if together is None else together.most_successive

    def try_successive(self) -> bool:
        """Whether :meth:`run_successive` gives the logits of single passes; a trial decides it once.

        Raises:
            MoechatError: As :meth:`run`.
        """
        return bool(self._try_together(lambda together: together.try_successive()))

    def run_successive(
        self, tokens: Sequence[int], cache: Any, copies: Sequence[Copies] = ()
    ) -> torch.Tensor | None:
        """One pass of successive tokens of one attention cache, whose layers have room for them.

        Args:
            tokens: Their ids, at most :attr:`most_successive`.
            cache: From :meth:`moechat.engine.decoder.Decoder.new_cache`; changed in place.
            copies: For the last tokens, where states of layers are copied before each.

        Returns:
            Logits ``[tokens, vocabulary]``, those of passes of their own; ``None``, without any change, if
            this model or cache cannot be computed so.

        Raises:
            MoechatError: As :meth:`run`. The layers of the cache may differ in length then.
        """
        found: torch.Tensor | None = self._try_together(
            lambda together: together.run_successive(tokens, cache, copies)
        )
        return found

    def run_mtp(self, compute: Callable[[], Any]) -> Any:
        """Result of a computation of the model's head for multi-token prediction.

        Raises:
            MoechatError: As :meth:`run`.
        """
        return self._try(lambda _: compute())

    def run_wave(
        self,
        chunks: Sequence[torch.Tensor],
        cache: Any,
        *,
        tick: Callable[[float], None],
        each: Take | None = None,
        passed: Passed | None = None,
        **arguments: Any,
    ) -> Any:
        """Several chunks of a prompt, layer by layer; frees pages of experts as :meth:`run` does.

        Args:
            chunks: As for :meth:`moechat.models.waves.Waves.run`, as ``cache`` and the next two.
            cache: Attention cache.
            tick: Called with the share of the work that is done.
            each: Takes the outputs of all chunks; again from the first if pages were freed.
            passed: As for :meth:`moechat.models.waves.Waves.run`.
            arguments: Of the model's ``forward``.

        Returns:
            Output of the model for the last chunk; ``None``, without any change, if prompts of this model
            cannot be computed in waves.

        Raises:
            MoechatError: As :meth:`run`.
        """
        held = cache_lengths(cache)
        before = CacheCopy.of(cache) if can_copy(cache) and not can_cut(cache) else None
        tokens = 0 if before is None else cache.get_seq_length()

        def compute(loaded: LoadedModel) -> Any:
            waves = loaded.waves
            if not waves.usable(loaded.new_cache, loaded.device):
                return _NOT_IN_WAVES
            if loaded.decoder is not None:
                loaded.decoder.lend(cache)
            there = [chunk.to(loaded.device) for chunk in chunks]
            return waves.run(there, cache, tick=tick, each=each, passed=passed, **arguments)

        try:
            output = self._with_retry(compute, cache, sum(chunk.shape[1] for chunk in chunks))
        except NotInWavesError as error:
            self.loaded.waves.disable()
            if before is not None:
                before.restore(cache, tokens)
            elif not restore_lengths(cache, held):
                raise MoechatError(f"a prompt of {self._name} could not be computed: {error}") from error
            output = _NOT_IN_WAVES
        if output is not _NOT_IN_WAVES:
            return output
        if not self._waves_noted:
            self._waves_noted = True
            cost = "moves missing experts again"
            if self.loaded.plan.mapped:
                cost = "gives each expert fewer tokens"
            self.notes.append(
                f"long prompts of {self._name} are computed in passes of {self.loaded.chunk} tokens, each of "
                f"which {cost}: its code was not recognised"
            )
        return None

    def _with_retry(self, compute: Callable[[LoadedModel], Any], cache: Any, tokens: int) -> Any:
        """Result of ``compute``; if a GPU's memory runs out, frees pages of experts and tries once more."""
        held = cache_lengths(cache)
        result = self._try(compute)
        if result is not None:
            return result
        # The failed pass may have appended to some layers of the cache.
        freed = self._shrink_experts() if restore_lengths(cache, held) else 0
        result = self._try(compute) if freed else None
        if result is None:
            raise DoesNotFitError(
                f"the graphics memory is too small for a pass of {tokens} tokens",
                hint="load the model with a smaller --vram (vram=), which leaves more beside the "
                "experts, or with a shorter context (--ctx, ctx=)",
            )
        self.notes.append(
            f"the graphics memory ran out: {freed >> 20} MiB of experts were removed from it, and fewer are "
            "kept there from now on"
        )
        return result

    @staticmethod
    def _pass(loaded: LoadedModel, ids: torch.Tensor, arguments: dict[str, Any]) -> Any:
        loaded.waves.reset()  # one that was interrupted
        with thread_invariant_pass(ids.shape[1]):
            return (loaded.decoder or loaded.model)(input_ids=ids.to(loaded.device), **arguments)

    def _try(self, compute: Callable[[LoadedModel], Any]) -> Any:
        """Result of ``compute``; ``None`` if a GPU's memory ran out."""
        self.usable_model()
        loaded = self.loaded
        gpu = loaded.accelerator
        if loaded.upkeep is not None:
            loaded.upkeep.busy()
        if loaded.check is not None:
            loaded.check.busy()
            loaded.check.require_no_damage()
        try:
            with (
                self.translate_native_errors(),
                nullcontext() if gpu is None else gpu.active(),
                torch.inference_mode(),
            ):
                result = compute(loaded)
            # Zeros in the place of bytes that are gone may be in the result.
            loaded.store.require_readable()
            return result
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            if gpu is None or not _is_out_of_memory(error):
                raise
            return None

    def _shrink_experts(self) -> int:
        """Frees pages of experts on a GPU; returns the bytes."""
        loaded = self.loaded
        if loaded.accelerator is None or loaded.near is None:
            return 0
        if loaded.upkeep is not None:
            loaded.upkeep.save()
        freed = loaded.near.shrink(OOM_SHRINK_FRACTION)
        self._meter.restart()
        return freed

    @contextmanager
    def translate_native_errors(self) -> Iterator[None]:
        """Turns errors of the native code into :class:`MoechatError` with a hint; see :meth:`run`."""
        try:
            yield
        except RuntimeError as error:
            # Another thread may have closed the pages and the link, or this is a forked child.
            try:
                self.usable_model()
            except MoechatError as reason:
                raise reason from error
            gpu = self.loaded.accelerator
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or _is_out_of_memory(error)
            if isinstance(error, _native.DeviceLostError) or (
                gpu is not None and not out_of_memory and not gpu.alive()
            ):
                raise DeviceLostError(
                    f"the GPU has failed: {error}",
                    hint="start again; if it fails again, the driver's log (dmesg) may say why",
                ) from error
            if not isinstance(error, _native.LinkError):
                raise
            store = self.loaded.store
            Store.open(store.path)  # raises if a file is missing or has another size
            if isinstance(error, _native.DamagedRecordError):
                layer = store.layers[error.layer].layer
                raise store.damaged_record(layer, error.expert, error.block) from error
            raise StoreReadError(
                f"experts of {self._name} cannot be read: {error}",
                hint="the model is still loaded: try again; if it fails again, check the disk",
            ) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a library (cuBLAS, say) could not allocate memory past torch's allocator."""
    return getattr(error, "error_code", None) == 2 or "ALLOC_FAILED" in str(error)
