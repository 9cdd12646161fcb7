"""Computes a prompt layer by layer, so that the experts of a layer see all its tokens at once.

A prompt is cut into chunks, because attention and dense products need memory for every token. Passes of one
chunk each go through all layers, so each of them moves every layer's missing experts again. A wave takes
several chunks through one layer before the next:

1. each chunk goes through the layer up to its experts: norms, attention over what earlier chunks have left in
   the cache, router;
2. the experts of the layer compute all tokens in one call, which moves each missing expert once;
3. each chunk goes through the rest of the layer.

The modules of transformers stay as they are. The model's own forward is called for each chunk with layers
that only note their arguments, so masks and positions are the family's. In step 1 a layer is called and left
by an exception at its experts. In step 3 it is called again: modules with weight matrices return what they
returned in step 1, norms are computed again, and the experts return their part of the sum. So each chunk has
the operations of a pass of its own, on the same shapes, and the same bits.

A model is recognised by a trial: :meth:`Waves.usable` compares waves with passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from moechat.models.cache_argument import CACHE
from moechat.models.cache_states import tensors_of
from moechat.models.decode.layer_check import stub_experts
from moechat.models.decode.layer_kind import layer_kind
from moechat.models.decode.probe import close
from moechat.models.skeleton import EXPERTS_RUNNER
from moechat.models.threads import thread_invariant_pass
from moechat.models.wave_chunks import (
    Chunk,
    ExpertInputs,
    HandedOn,
    NotInWavesError,
    cache_ahead,
    share_masks,
)
from moechat.models.wave_modules import AtExperts, Step, WaveModules, counted_results

# Chunks of the trial. Of several tokens, because a single one is computed by other code.
_TRIAL_CHUNKS = 3
_TRIAL_TOKENS = 5

Tick = Callable[[float], None]
Take = Callable[[int, Any], None]
Passed = Callable[[int, int], None]


class _Captured(Exception):  # noqa: N818 - no error
    """Ends a pass whose arguments have been noted."""


class Waves:
    """Runs prompts through a model in waves. REQUIRES: inference mode, one thread at a time.

    Args:
        model: A causal language model of transformers, with its weights.
        layers_name: Name of the list of its decoder layers.
        experts: Its experts modules.
    """

    # Invariant: between calls _modules.step is None, so that every module behaves as before. An interrupt can
    # break it; every pass calls reset() first.
    def __init__(self, model: Any, layers_name: str, experts: Sequence[nn.Module]) -> None:
        self._model = model
        self._layers_name = layers_name
        self._layers = list(model.get_submodule(layers_name))
        wanted = set(experts)
        self._experts: list[Any] = [
            next((part for part in layer.modules() if part in wanted), None) for layer in self._layers
        ]
        self._modules = WaveModules(self._layers, self._experts)
        self._usable: bool | None = None
        self._results = 0  # of a layer, if it returns a tuple; 0: it returns a tensor

    def reset(self) -> None:
        """Forget a wave that was interrupted."""
        self._modules.step = None

    def disable(self) -> None:
        """Compute no more waves."""
        self._usable = False

    def usable(self, cache: Callable[[int], Any], device: torch.device) -> bool:
        """Whether waves have the results of passes; the first call tries it, with a few tokens.

        Args:
            cache: Makes an attention cache for a number of tokens.
            device: The model's.

        Raises:
            torch.OutOfMemoryError: The GPU has no memory for the trial; it can be tried again.
        """
        if self._usable is None:
            try:
                if self._experts.count(None) == len(self._experts):
                    raise NotInWavesError("no layer has experts")
                self._modules.wrap()
                self._usable = self._agrees(cache, device)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a family's code can fail in many ways when it is called in another order
                self._usable = False
            finally:
                self.reset()
        return self._usable

    def run(
        self,
        chunks: Sequence[torch.Tensor],
        cache: Any,
        *,
        tick: Tick = lambda _: None,
        each: Take | None = None,
        passed: Passed | None = None,
        **arguments: Any,
    ) -> Any:
        """Compute chunks of a prompt behind the tokens in a cache.

        Args:
            chunks: Token ids, int64 ``[1, tokens]`` each, at least two tokens.
            cache: Of keys and values, with or without windows, and states; changed in place.
            tick: Called with the share of the work that is done.
            each: Called for each chunk in order with the number of its first token and its output; ``None``:
                only the last chunk's output is computed.
            passed: Called when a chunk has changed a layer of the cache, with the layer's number and the
                number of tokens of the wave that it has seen.
            arguments: Of the model's ``forward``, such as ``logits_to_keep``.

        Returns:
            Output of the model for the last chunk.

        Raises:
            NotInWavesError: The model, or the cache, cannot be computed in waves.
            Exception: Any error of the model's forward or of an expert layer.
        """
        self.reset()
        parts, begin = [], 0
        for ids in chunks:
            parts.append(Chunk(ids, begin, cache_ahead(cache, begin)))
            begin += ids.shape[1]
        try:
            # Masks of the last chunk contain those of the others, so it goes first.
            last = max(parts, key=lambda part: (part.tokens, part.begin))
            self._capture(last, cache, arguments)
            for part in parts:
                if part is not last:
                    self._capture(part, cache, arguments)
                    share_masks(part, last)
            done, total = 0, len(self._layers) * len(parts)
            inputs = ExpertInputs(begin)
            for number, layer in enumerate(self._layers):
                for part in parts:
                    self._reach(number, layer, part, inputs)
                    if passed is not None:
                        passed(number, part.end)
                    done += 1
                    if self._experts[number] is None or part is not parts[-1]:
                        tick(done / total)
                if self._experts[number] is not None:
                    self._compute(number, layer, parts, inputs)
                    tick(done / total)
            for part in parts if each is not None else parts[-1:]:
                output = self._finish(part, cache, arguments)
                if each is not None:
                    each(part.begin, output)
            return output
        finally:
            self.reset()

    # ---- the steps

    def _capture(self, part: Chunk, cache: Any, arguments: dict[str, Any]) -> None:
        """Note the arguments of every layer, as the model's forward makes them for a chunk."""
        ahead = part.ahead

        def note(number: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if number != len(part.calls) or not args or not isinstance(args[0], torch.Tensor):
                raise NotInWavesError(f"layer {number} is called in another order, or by other arguments")
            if number == 0:
                part.hidden = args[0]
            elif args[0] is not part.hidden:
                raise NotInWavesError(f"something is computed before layer {number}")
            earlier = [item for item in (*args, *named.values()) if isinstance(item, HandedOn)]
            if any(item.layer != number - 1 for item in earlier):
                raise NotInWavesError(f"layer {number} reads results of earlier layers than the last")
            own = tuple(cache if item is ahead else item for item in args[1:])
            part.calls.append((own, {key: cache if item is ahead else item for key, item in named.items()}))
            if number == len(self._layers) - 1:
                raise _Captured
            return self._returned(number, args[0])

        self._modules.step = Step(part, note)
        try:
            self._model(input_ids=part.ids, use_cache=True, **{CACHE: ahead}, **arguments)
        except _Captured:
            return
        raise NotInWavesError("the pass ended before its last layer")

    def _reach(self, number: int, layer: nn.Module, part: Chunk, inputs: ExpertInputs) -> None:
        """Take a chunk through a layer, or up to its experts."""
        out = self._call(Step(part), number, layer)
        if self._experts[number] is None:
            self._take(part, out)
            return
        if part.request is None:
            raise NotInWavesError(f"layer {number} did not call its experts")
        inputs.keep(part)

    def _compute(self, number: int, layer: nn.Module, parts: Sequence[Chunk], inputs: ExpertInputs) -> None:
        """The experts of a layer for all chunks, and the rest of the layer."""
        runner = vars(self._experts[number])[EXPERTS_RUNNER]
        self._modules.step = None
        out = runner.forward(inputs.x, *inputs.choices(parts))
        for part in parts:
            part.answer = out[part.begin : part.end]
            self._take(part, self._call(Step(part, resumes=True), number, layer))
            if part.outputs or part.answer is not None:
                raise NotInWavesError(f"layer {number} did not do the same again")

    def _call(self, step: Step, number: int, layer: nn.Module) -> Any:
        part = step.chunk
        args, named = part.arguments(number)
        if step.resumes or self._experts[number] is None:
            part.calls[number] = ((), {})  # frees masks after the last layer that uses them
        self._modules.step = step
        with _threads(part):
            try:
                return layer(part.hidden, *args, **named)
            except AtExperts:
                return None
            finally:
                self._modules.step = None

    def _returned(self, number: int, hidden: torch.Tensor) -> Any:
        """A result of a layer that is not computed: the hidden states, and what stands for the rest."""
        if not self._results:
            return hidden
        return (hidden, *(HandedOn(number, place) for place in range(1, self._results)))

    def _take(self, part: Chunk, out: Any) -> None:
        """Keep the result of a layer for the next one."""
        results = out if self._results else (out,)
        if not isinstance(results, tuple) or not isinstance(results[0], torch.Tensor):
            raise NotInWavesError(f"a layer returns a {type(out).__name__}")
        part.hidden, part.handed_on = results[0], results

    def _finish(self, part: Chunk, cache: Any, arguments: dict[str, Any]) -> Any:
        """The model's output for the last layer's result."""

        def give(number: int, args: tuple[Any, ...], _named: dict[str, Any]) -> Any:
            return self._returned(number, part.hidden if number == len(self._layers) - 1 else args[0])

        self._modules.step = Step(part, give)
        with _threads(part):
            output = self._model(input_ids=part.ids, use_cache=True, **{CACHE: part.ahead}, **arguments)
        self._modules.step = None
        setattr(output, CACHE, cache)
        return output

    # ---- the trial

    def _agrees(self, cache: Callable[[int], Any], device: torch.device) -> bool:
        """Whether waves and passes over random tokens give the same results, with stub experts and the first
        layers: so many that each kind of layer is among them.
        """
        kinds = [layer_kind(layer) for layer in self._layers]
        count = max(max(map(kinds.index, kinds)) + 1, min(2, len(kinds)))
        tokens = _TRIAL_CHUNKS * _TRIAL_TOKENS
        ids = torch.randint(
            self._model.get_input_embeddings().num_embeddings,
            (1, tokens),
            generator=torch.Generator().manual_seed(4099),
        ).to(device)
        chunks = torch.split(ids, _TRIAL_TOKENS, dim=1)
        whole, place = self._layers, self._layers_name.rpartition(".")
        holder = self._model.get_submodule(place[0])
        before = getattr(holder, place[2])
        caches = [cache(tokens), cache(tokens)]
        try:
            self._layers = whole[:count]
            setattr(holder, place[2], nn.ModuleList(self._layers))
            with stub_experts(self._model):
                theirs = []
                with counted_results(self._layers) as counts:
                    for chunk in chunks:
                        with thread_invariant_pass(_TRIAL_TOKENS):
                            theirs.append(self._model(input_ids=chunk, use_cache=True, **{CACHE: caches[0]}))
                if len(counts) != 1:
                    raise NotInWavesError(f"its layers return {sorted(counts)} results")
                self._results = counts.pop()
                ours: list[Any] = []
                self.run(chunks, caches[1], each=lambda _, output: ours.append(output))
        finally:
            self._layers = whole
            setattr(holder, place[2], before)
        same = torch.equal if device.type == "cpu" else close
        pairs = [(one.logits, other.logits) for one, other in zip(theirs, ours, strict=True)]
        for one, other in zip(caches[0].layers[:count], caches[1].layers[:count], strict=True):
            pairs += zip(tensors_of(one), tensors_of(other), strict=True)
        return all(same(one, other) for one, other in pairs)


def _threads(part: Chunk) -> AbstractContextManager[Any]:
    # Of a pass of the chunk alone.
    threads: AbstractContextManager[Any] = thread_invariant_pass(part.tokens)
    return threads
