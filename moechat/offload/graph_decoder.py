"""Decodes a token on a GPU by replaying CUDA graphs of everything except its experts.

Between two expert layers a GPU runs some forty kernels (norms, attention, router); launching one from Python
and torch takes longer than most of them run. Here the model's own forward is recorded once: every expert
layer, where the host has to decide, ends a graph and begins the next. A token is then graph 0, experts 0,
graph 1, experts 1, ..., the last graph, and the logits. This works for any family.

The recorded attention is our own (:mod:`moechat.offload.replay_attention`): it reads the cache in place and
the number of tokens from the GPU's memory, so one recording serves every context. Layers of known parts are
ours too, in a few launches (:mod:`moechat.offload.fused_layers`), else norms, rotary embedding and routers,
in one each (:mod:`moechat.offload.fused_steps`). All caches use the same memory, one after the other
(:class:`moechat.models.cache_memory.CacheMemory`), so that the recording stays valid from answer to answer.
Replays leave the layers of the cache as a pass does, so both can alternate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from moechat.configurator.gpu_pattern import runs_ahead
from moechat.configurator.systems import RequestForm
from moechat.models.cache_argument import CACHE
from moechat.models.cache_memory import CacheMemory
from moechat.models.skeleton import EXPERTS_RUNNER
from moechat.offload.crossing import Crossing
from moechat.offload.fused_steps import FusedSteps
from moechat.offload.gpu_clocks import GpuClocks
from moechat.offload.gpu_layer import GpuExpertLayer
from moechat.offload.graphs import Graphs
from moechat.offload.launched_layers import LaunchedLayers
from moechat.offload.next_token import NextToken
from moechat.offload.recordings import (
    Comparison,
    CompleteRecording,
    Recording,
    captured,
    distance,
    or_far,
)
from moechat.offload.replay_attention import NotSupportedError, ReplayAttention
from moechat.offload.replay_cache import ReplayCache
from moechat.offload.run_ahead import RunAhead, can_run_ahead
from moechat.offload.tier import ExpertTier

# Largest relative distance between experts' inputs, or logits, of a replay and of a pass after two layers; it
# grows with the square root of the layers. Both compute the same products, but attention adds up in another
# order, which rounds differently in each layer. Measured for random weights: after two layers at most 1e-6 in
# float32, 8e-4 in float16, 6e-3 in bfloat16; after 48 in bfloat16 at most 0.09. A position or a mask that was
# recorded as a constant gives 0.25 and more in the first layers.
_TOLERANCE = {torch.float32: 1e-4}
_TOLERANCE_16 = 5e-2
# A replay is compared with a pass whenever the context has grown by this factor: a window that the recording
# leaves out, say, shows only in contexts longer than the window.
_CHECKED_AGAIN = 4
_NO_MEMORY = "the graphics memory does not suffice for copies of this model's states"
_ARGUMENTS = frozenset({CACHE, "use_cache", "logits_to_keep"})


class GraphDecoder:
    """Calls a model, or replays its graphs where the result is the same.

    Calls with one token and a cache in this object's memory are replayed; all others go to the model. When a
    recording fails, or one of its first replays differs from the model's pass by more than rounding, the
    graphs are dropped for good, and the user is notified.

    Args:
        model: The whole model, on the GPU.
        parts: Its experts modules, in order.
        graphs: Makes graphs of the GPU.
        dtype: Type of the dense part.
        clocks: Times some of the tokens.
        notify: Takes a sentence for the user.
        run_ahead: Where the GPU looks up the experts, see :mod:`moechat.offload.run_ahead`: ``None``: where
            every block has a page; ``True``: also where one may be missing; ``False``: nowhere.
        steps: Modules and layers of the model that recordings compute in one launch each, or a few.
        launched: Launches the expert layers of replayed tokens.
    """

    # Invariant: recordings read tensors at _addresses (with their slots), _token and _numbers, and make
    # requests of the form _form to the tier _tier. That is the form of the settings that the tier was planned
    # for, so that ways to load that need no more can take turns.
    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module],
        graphs: Callable[[], Graphs],
        *,
        dtype: torch.dtype,
        clocks: GpuClocks,
        notify: Callable[[str], None],
        run_ahead: bool | None = None,
        steps: FusedSteps | None = None,
        launched: type[LaunchedLayers] = LaunchedLayers,
    ) -> None:
        self.memory = CacheMemory()
        self._model = model
        self._parts = parts
        self._make = graphs
        self._graphs: Graphs | None = None
        self._tolerance = _TOLERANCE.get(dtype, _TOLERANCE_16)
        self._clocks = clocks
        self._notify = notify
        self._recording: Recording | None = None
        self._attention: ReplayAttention | None = None
        self._addresses: tuple[int, ...] = ()
        self._tier: ExpertTier | None = None
        self._form = RequestForm(0, False)
        self._token = self._numbers = torch.empty(0)
        self._wanted_ahead = run_ahead
        self._steps = FusedSteps() if steps is None else steps
        self._launched_layers = launched
        self._why_left = ""
        self.off = "position_ids" not in inspect.signature(model.forward).parameters

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """Call the model; REQUIRES: inference mode.

        Args:
            input_ids: ``[1, tokens]``, on the GPU.
            arguments: Arguments of the model's forward.

        Returns:
            Output of the model; of a replay, logits ``[1, 1, vocabulary]`` and the cache.

        Raises:
            Exception: Any error of the model's forward or of an expert layer.
        """
        with self._clocks.token(input_ids.shape[1]):
            return self._called(input_ids, arguments)

    def _called(self, input_ids: torch.Tensor, arguments: dict[str, Any]) -> Any:
        cache = arguments.get(CACHE)
        if not self.off and cache is not None and self.memory.lend(cache):
            output = self._replayed(input_ids, cache, arguments)
            if output is not None:
                return output
        return self._model(input_ids=input_ids, **arguments)

    def lend(self, cache: Any) -> None:
        """Let a cache that a prompt is about to fill use the memory that recordings read, if it can."""
        if not self.off:
            self.memory.lend(cache)

    def _replayed(self, input_ids: torch.Tensor, cache: Any, arguments: dict[str, Any]) -> Any:
        """Output of a replay; ``None``: replays do not support this call."""
        if (
            input_ids.shape != (1, 1)
            or not arguments.get("use_cache")
            or not _ARGUMENTS.issuperset(arguments)
        ):
            return None
        token = NextToken.of(cache)
        runners = [vars(part).get(EXPERTS_RUNNER) for part in self._parts]
        if token is None or not all(isinstance(runner, GpuExpertLayer) for runner in runners):
            return None
        experts: list[GpuExpertLayer] = runners  # type: ignore[assignment]
        self._keep_only(token, experts)
        self._set(input_ids, token)
        recording = self._recording
        if recording is None:
            try:
                recording = self._record(token, experts, arguments)
            except torch.OutOfMemoryError:
                # The tier may give pages back; recording is tried again later. Not with states: the engine
                # cannot tell that they are as they were, and would not try the token again.
                self._forget()
                if not token.states:
                    raise
                self._drop(_NO_MEMORY)
                return None
            except NotSupportedError as error:
                self._drop(f"its attention kernel does not serve this model ({error})")
                return None
            except Exception as error:  # some families do what cannot be recorded, in many ways
                why = f"this model's passes cannot be recorded ({_in_short(error)})"
                if not self._left_steps(why):
                    self._drop(why)
                return None
            except BaseException:
                self._forget()
                raise
            self._recording = recording
        if recording.unchecked or token.position >= recording.checked_again_at:
            return self._compared(recording, experts, token, input_ids, cache, arguments)
        logits = self._replay(recording, experts, token)
        token.advance()
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})

    def _compared(
        self,
        recording: Recording,
        experts: Sequence[GpuExpertLayer],
        token: NextToken,
        input_ids: torch.Tensor,
        cache: Any,
        arguments: dict[str, Any],
    ) -> Any:
        """Output of a replay after comparison with a pass; ``None``: they differ."""
        self._clocks.drop()
        # The replay does not advance the cache: the pass writes the same token to the same place, and goes on
        # from the same states.
        comparison, states = Comparison(recording.form), token.copies_or_none()
        if states is None:
            self._drop(_NO_MEMORY)
            return None
        logits = self._replay_behind(recording, experts, self._ahead_of(recording, experts), comparison)
        written = [
            (slot, slot.clone())
            for place in token.places
            for slot in (tensor.narrow(-2, place.slot, 1) for tensor in (place.keys, place.values))
        ]
        made = token.copies_or_none()
        token.restore(states)
        if made is None:
            self._drop(_NO_MEMORY)
            return None
        before = [dict(vars(layer)) for layer in cache.layers]
        with captured(experts, comparison):
            output = self._model(input_ids=input_ids, **arguments)
        comparison.off.append(distance(logits, output.logits[:, -1:]))
        comparison.off += [distance(ours, state) for ours, state in zip(made, token.tensors, strict=True)]
        distances = torch.stack(comparison.off).tolist()
        # NaN compares as too far.
        if all(off <= self._allowed(place) for place, off in enumerate(distances)):
            recording.unchecked = max(0, recording.unchecked - 1)
            if self._why_left and not recording.unchecked:
                what = (
                    "layers are computed step by step"
                    if self._steps
                    else "torch computes norms, rotary embedding and routers"
                )
                self._notify(f"{what}, which is slower: {self._why_left}")
                self._why_left = ""
            recording.checked_again_at = _CHECKED_AGAIN * token.position
            # The replay's keys, values, states and logits, as for every later token: so an answer does not
            # depend on which replays are compared.
            for slot, value in written:
                slot.copy_(value)
            token.restore(made)
            return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
        for layer, state in zip(cache.layers, before, strict=True):
            vars(layer).update(state)
        token.restore(states)
        worst = max(range(len(distances)), key=lambda place: or_far(distances[place]) / self._allowed(place))
        why = (
            f"a replay differed from the model's own pass by {distances[worst]:.2g} of its size, more than "
            f"{self._allowed(worst):.2g}, after {worst + 1} of {len(distances)} parts"
        )
        if not self._left_steps(why):
            self._drop(why)
        return None

    def _allowed(self, place: int) -> float:
        """Largest distance after ``place + 1`` layers."""
        return self._tolerance * math.sqrt(max(1.0, (place + 1) / 2))

    def _keep_only(self, token: NextToken, experts: Sequence[GpuExpertLayer]) -> None:
        """Forget recordings of other memory, or whose requests do not serve the tier."""
        addresses = token.addresses()
        tier, pages = experts[0].tier, experts[0].pages
        all_fit = tier.pages >= tier.blocks
        form = pages.recorded_form(tier.planned_settings, tier.settings, all_fit=all_fit)
        if addresses == self._addresses and self._tier is tier and self._form == form:
            return
        self._forget()
        self._addresses, self._tier, self._form = addresses, tier, form

    def _set(self, input_ids: torch.Tensor, token: NextToken) -> None:
        """Write the token, its position and its slot in each layer to the memory that the graphs read."""
        numbers = torch.tensor(token.numbers())
        if self._token.device != input_ids.device or self._numbers.shape != numbers.shape:
            self._forget()
            self._token = torch.empty_like(input_ids)
            self._numbers = torch.empty_like(numbers, device=input_ids.device)
        self._token.copy_(input_ids)
        self._numbers.copy_(numbers)

    def _record(
        self,
        token: NextToken,
        experts: Sequence[GpuExpertLayer],
        arguments: dict[str, Any],
    ) -> Recording:
        self._clocks.drop()
        graphs = self._graphs = self._make() if self._graphs is None else self._graphs
        crossing = Crossing()
        # What lives from one graph to another needs memory for itself only where graphs are replayed again.
        watch: AbstractContextManager[object] = crossing if self._wanted_ahead else nullcontext()
        if self._attention is None:
            self._attention = ReplayAttention(self._model)
        attention, steps, position = self._attention, self._steps, self._numbers[0]
        cache = ReplayCache(token, self._numbers)

        memory = experts[0].pages.accelerator.host_memory

        def landing(words: int) -> torch.Tensor:
            return memory(1, words)[0].view(torch.int32)

        # A recording may keep `run`, and must not keep the caller's cache alive: its memory would not be lent
        # to the next one, which would then be decoded without graphs.
        others = {name: value for name, value in arguments.items() if name != CACHE}

        def run(recording: Recording) -> None:
            try:
                with captured(experts, recording), attention.over(cache), steps.over(), _as_recorded():
                    recording.begin()
                    output = self._model(
                        input_ids=self._token,
                        position_ids=position.view(1, 1),
                        **{**others, CACHE: cache},
                    )
                    recording.logits = output.logits[:, -1:]
                    recording.end()
            except BaseException:
                recording.abandon()
                raise

        with graphs.aside(), token.states_kept():
            # Libraries initialise at first use, which cannot be recorded. This run leaves the experts out, so
            # the keys and values that it writes mean nothing; the next replay or pass overwrites them.
            with watch:
                run(Recording(None, self._form, landing, bool(steps), crossing=crossing))
            graphs.make_room()
            recording = Recording(
                graphs.new,
                self._form,
                landing,
                bool(steps),
                repeatable=not token.states,
                crossing=crossing,
                again=run,
            )
            crossing.second_pass()
            with watch:
                run(recording)
        cache.require_states_in_place()
        if recording.ordinals != list(range(len(experts))):
            raise RuntimeError(f"the expert layers ran in the order {recording.ordinals}")
        return recording

    def _replay(
        self, recording: Recording, experts: Sequence[GpuExpertLayer], token: NextToken
    ) -> torch.Tensor:
        ahead = self._ahead_of(recording, experts)
        if ahead is None:
            return self._replay_behind(recording, experts)
        return self._replay_ahead(recording, ahead, experts, token)

    def _replay_behind(
        self,
        recording: Recording,
        experts: Sequence[GpuExpertLayer],
        ahead: RunAhead | None = None,
        comparison: Comparison | None = None,
    ) -> torch.Tensor:
        """Logits of a token whose expert layers the host launches; ``ahead`` is compared with them."""
        first, *rest = recording.graphs
        requests, sums = recording.requests, recording.sums
        launched = self._launched(recording, experts) if comparison is None else None
        first.replay()
        if launched is not None:
            for layer, graph in zip(experts, rest, strict=True):
                launched.answer(layer.ordinal)
                graph.replay()
            return recording.result()
        for layer, request, total, graph in zip(experts, requests, sums, rest, strict=True):
            layer.answer(request, total)
            if comparison is not None:
                comparison.answers.append((request.x.clone(), total.clone()))
                if ahead is not None and not ahead.repeats(layer.ordinal):
                    self._stay_behind("a layer's sum differed")
                    ahead = None
            graph.replay()
        return recording.result()

    def _launched(self, recording: Recording, experts: Sequence[GpuExpertLayer]) -> LaunchedLayers | None:
        """The layers of the next token for native code; ``None``: Python launches them."""
        launched = recording.launched
        if launched is None or not launched.serves():
            launched = self._launched_layers.of(experts, recording.requests, recording.sums)
            recording.launched = launched
        return launched if launched is not None and launched.begin_token() else None

    def _ahead_of(self, recording: Recording, experts: Sequence[GpuExpertLayer]) -> RunAhead | None:
        """Expert layers that the GPU computes without the host, recorded anew for other pages; ``None``: it
        cannot.
        """
        tier, wanted = experts[0].tier, self._wanted_ahead
        if not (
            (wanted and recording.repeatable)
            or runs_ahead(tier.pages, tier.blocks, graphs=True, wanted=wanted)
        ):
            recording.ahead = recording.complete = None
            return None
        if recording.ahead is not None and recording.ahead.serves():
            return recording.ahead
        recording.ahead = recording.complete = None
        if self._graphs is None or not can_run_ahead(experts, recording.requests):
            return None
        if not recording.crossing.alike:
            self._stay_behind("what lives from one layer to the next cannot be told")
            return None
        self._clocks.drop()
        # Memory of its own: these graphs are replayed between those of the pass, whose memory holds what
        # lives from one of them to the next.
        apart = self._make()
        try:
            with apart.aside():
                recording.ahead = RunAhead(experts, recording.requests, recording.sums, apart)
        except Exception as error:  # Triton and its compiler raise many kinds
            self._cannot_record_ahead(error)
        return recording.ahead

    def _replay_ahead(
        self, recording: Recording, ahead: RunAhead, experts: Sequence[GpuExpertLayer], token: NextToken
    ) -> torch.Tensor:
        """Logits of a token whose experts the GPU computes as far as it has them.

        Raises:
            RuntimeError: An expert is missing that was there, and the states of the token are overwritten.
        """
        checked = None
        if ahead.complete():
            # There are no layers to time, and where all is there, nothing to plan.
            self._clocks.drop()
            complete = recording.complete or self._record_complete(recording, token)
            if complete is not None and not complete.unchecked:
                if ahead.replay_complete(*complete.graphs, counted=True):
                    return complete.result()
                if token.states:
                    raise RuntimeError("an expert was not found on the GPU, which has all of them")
            elif complete is not None:
                checked = self._tried(complete, ahead, token)
        # All marks of a token that is timed stand where the host launches its layers.
        if (
            self._wanted_ahead
            and recording.repeatable
            and recording.ahead is ahead
            and not self._clocks.timing
        ):
            ahead.replay(recording.graphs)
            logits = recording.result()
        else:
            logits = self._replay_behind(recording, experts)
        if checked is not None and recording.complete is not None:
            pairs = zip(checked, (logits, *token.tensors), strict=True)
            off = max(or_far(float(distance(found, wanted))) for found, wanted in pairs)
            if off <= self._allowed(len(recording.ordinals)):
                recording.complete.unchecked -= 1
            else:
                self._stay_behind("the logits or states of a whole token differed")
        return logits

    def _tried(
        self, complete: CompleteRecording, ahead: RunAhead, token: NextToken
    ) -> list[torch.Tensor] | None:
        """Logits and states of a whole token, after which the states are as before.

        ``None``: it has not found all experts, or there is no memory for copies.
        """
        before = token.copies_or_none()
        if before is None:
            self._stay_behind(_NO_MEMORY)
            return None
        made = None
        try:
            if ahead.replay_complete(*complete.graphs, counted=False):
                made = token.copies_or_none()
                if made is None:
                    self._stay_behind(_NO_MEMORY)
        finally:
            token.restore(before)
        return None if made is None else [complete.result(), *made]

    def _record_complete(self, recording: Recording, token: NextToken) -> CompleteRecording | None:
        graphs = self._graphs
        if graphs is None or recording.again is None:
            return None
        form, landing, fused = recording.form, recording.landing, recording.fused
        complete = CompleteRecording(graphs.new, form, landing, fused, pieces=recording)
        try:
            with graphs.aside(), token.states_kept():
                graphs.make_room()
                recording.again(complete)
        except Exception as error:
            self._cannot_record_ahead(error)
            return None
        recording.complete = complete
        return complete

    def _cannot_record_ahead(self, error: Exception) -> None:
        """Stay behind, or free pages for the recording where blocks may be missing anyway.

        Where they may not be, pages are worth more: without one of them, nothing could run ahead.
        """
        states = self._recording is not None and not self._recording.repeatable
        if isinstance(error, torch.OutOfMemoryError) and self._wanted_ahead and not states:
            raise error
        self._stay_behind(_in_short(error))

    def _stay_behind(self, why: str) -> None:
        """Let the host launch every expert layer from now on."""
        self._wanted_ahead = False
        if self._recording is not None:
            self._recording.ahead = self._recording.complete = None
        self._notify(f"the GPU waits for the host at every expert layer, which is slower than need be: {why}")

    def _forget(self) -> None:
        # The shared memory is freed with its last graph, and cannot be used again.
        self._recording = None
        self._graphs = None

    def _left_steps(self, why: str) -> bool:
        """Record the next token with fewer of our kernels, if it was with any: first without whole layers,
        then without norms and the like.

        The user hears of it once that has helped.
        """
        if not self._steps:
            return False
        self._steps, self._why_left = self._steps.fewer(), why
        self._forget()
        return True

    def _drop(self, why: str) -> None:
        self.off = True
        self._forget()
        self.memory = CacheMemory()
        self._notify(f"tokens are decoded without CUDA graphs, which would be faster: {why}")


@contextmanager
def _as_recorded() -> Iterator[None]:
    """Let the pass that is not recorded take the same branches as the one that is: transformers asks torch
    whether the stream is recorded before it looks at values, for which it would wait.
    """
    own = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = own


def _in_short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
