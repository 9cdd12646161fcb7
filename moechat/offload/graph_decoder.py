"""Decode a token on a card by replaying graphs of everything but its experts.

Between two expert layers a card is given some forty kernels (norms, attention, router), each by a call of
Python and torch that takes longer than most of the kernels. Here one pass is recorded by letting the model's
own forward run: every expert layer, where the host has to decide, ends a graph and begins the next. A token
is then graph 0, experts 0, graph 1, experts 1, ..., the last graph, and the logits. Nothing is known of the
model's family.

The recorded attention sees a bucket of the cache, a power of two of slots, with a mask made on the card from
the position; each bucket has graphs of its own, recorded when it is first needed. The cache itself is in
memory that all caches use after one another (:class:`moechat.models.cache_memory.CacheMemory`), so that
recordings serve from answer to answer; recording costs two passes, as much as some tokens do. Between two
passes the layers of the cache are what a pass of the model would have left: replays and passes alternate
freely.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from moechat.models.attention_cache import ReservedLayer, WindowLayer
from moechat.models.bucket_cache import BucketCache, BucketLayer
from moechat.models.cache_memory import CacheMemory, Place
from moechat.models.skeleton import EXPERTS_RUNNER
from moechat.offload.graphs import Graph, Graphs
from moechat.offload.on_device import Asked, Capture, DeviceExpertLayer, DeviceTier

LEAST_BUCKET = 256
# Longer ones are left to passes of the model: torch's attention with a mask walks a head's keys from first to
# last with one block of threads, while the one without a mask divides them. An estimate.
MOST_BUCKET = 2048
# How far experts' inputs and logits of a replay may be from those of a pass, as a share of their length,
# after two layers; it grows with the root of the layers. They are products of the same numbers, but attention
# adds up in another order, which is a rounding a layer. Measured for random weights: after two layers at most
# 1e-6 in float32, 8e-4 in float16, 6e-3 in bfloat16; after 48 in bfloat16 at most 0.09. With a position or a
# mask that stands still the first layers are off by 0.25 and more.
_TOLERANCE = {torch.float32: 1e-4}
_TOLERANCE_16 = 5e-2
# Replays of a recording that are compared: the first is of the token that was recorded, so that what should
# not have stood still shows in the second.
_CHECKED = 2
# Arguments of a pass besides its tokens that a replay is right for.
_ARGUMENTS = frozenset({"past_key_values", "use_cache", "logits_to_keep"})


@dataclass
class _Recording:
    """One pass, and the pass as a :class:`moechat.offload.on_device.Capture`.

    Invariant: tensors that experts read or write, and the logits, are referred to from here, so that graphs
    that share the memory do not use theirs for anything else.
    """

    new: Callable[[], Graph] | None
    graphs: list[Graph] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)
    ordinals: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None
    unchecked: int = _CHECKED
    _open: Graph | None = None

    def cut(self, ordinal: int, asked: Asked) -> torch.Tensor:
        """End the graph at the experts of a layer, and begin the next."""
        # Of the first run finite, since the next layers keep what they make of it until it is written again.
        total = torch.zeros_like(asked.x) if self.new is None else torch.empty_like(asked.x)
        self.asked.append(asked)
        self.sums.append(total)
        self.ordinals.append(ordinal)
        self.end()
        self.begin()
        return total

    def begin(self) -> None:
        if self.new is not None:
            # Known before it begins, so that it is abandoned whenever Ctrl-C comes.
            self._open = self.new()
            self._open.begin()

    def end(self) -> None:
        graph = self._open
        if graph is not None:
            graph.end()
            self._open = None
            self.graphs.append(graph)

    def abandon(self) -> None:
        graph, self._open = self._open, None
        if graph is not None:
            graph.abandon()


@dataclass
class _Comparison:
    """What experts were asked and answered in a replay, for a pass that is to give the same.

    The pass is handed the answers, so that it does not matter which of two experts that nearly tie its own
    routers choose, nor are experts computed, or counted, twice.
    """

    answers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    off: list[torch.Tensor] = field(default_factory=list)

    def cut(self, ordinal: int, asked: Asked) -> torch.Tensor:
        x, answer = self.answers[ordinal]
        self.off.append(_distance(x, asked.x))
        return answer


class GraphDecoder:
    """Calls a model, by replaying graphs where that gives the same.

    A call is replayed that gives one token to a cache whose memory is lent by this; every other one goes to
    the model. When a recording fails, or one of its first replays differs from the model's pass by more
    than rounding, the graphs are dropped for good, and that is told.

    Args:
        model: The whole model, on the card.
        parts: Its experts modules, in order.
        graphs: Begins graphs of the card.
        dtype: Of the dense part.
        tell: Takes a sentence for people.
    """

    # Invariant: recordings are of tensors at _addresses (with their slots), of experts of _asks, and of
    # _token and _numbers.
    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module],
        graphs: Callable[[], Graphs],
        *,
        dtype: torch.dtype,
        tell: Callable[[str], None],
    ) -> None:
        self.memory = CacheMemory()
        self._model = model
        self._parts = parts
        self._make = graphs
        self._graphs: Graphs | None = None
        self._tolerance = _TOLERANCE.get(dtype, _TOLERANCE_16)
        self._tell = tell
        self._recordings: dict[int, _Recording] = {}
        self._addresses: tuple[int, ...] = ()
        self._asks: tuple[Any, ...] = ()
        self._token = self._numbers = torch.empty(0)
        self.off = "position_ids" not in inspect.signature(model.forward).parameters

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """As the model's forward; in inference mode.

        Args:
            input_ids: ``[1, tokens]``, on the card.
            arguments: As of the model.

        Returns:
            What the model returns; of a replay, logits ``[1, 1, vocabulary]`` and the cache.

        Raises:
            Exception: Whatever the model's forward or an expert layer raises.
        """
        cache = arguments.get("past_key_values")
        if not self.off and cache is not None and self.memory.lend(cache):
            output = self._replayed(input_ids, cache, arguments)
            if output is not None:
                return output
        return self._model(input_ids=input_ids, **arguments)

    def _replayed(self, input_ids: torch.Tensor, cache: Any, arguments: dict[str, Any]) -> Any:
        """What a replay returns; ``None``: this is not for one."""
        if (
            input_ids.shape != (1, 1)
            or not arguments.get("use_cache")
            or not _ARGUMENTS.issuperset(arguments)
        ):
            return None
        layers: list[ReservedLayer | WindowLayer] = cache.layers
        position = layers[0].get_seq_length()
        if any(layer.get_seq_length() != position for layer in layers):
            return None
        places = [place for layer in layers if (place := layer.next_place()) is not None]
        runners = [vars(part).get(EXPERTS_RUNNER) for part in self._parts]
        if len(places) < len(layers) or not all(isinstance(runner, DeviceExpertLayer) for runner in runners):
            return None
        bucket = _bucket(position, layers, places)
        if bucket is None:
            return None
        experts: list[DeviceExpertLayer] = runners  # type: ignore[assignment]
        self._keep_only(places, experts)
        self._set(input_ids, position, places)
        recording = self._recordings.get(bucket)
        if recording is None:
            try:
                recording = self._record(bucket, layers, places, experts, arguments)
            except torch.OutOfMemoryError:
                # Experts may give pages back; later it is tried again.
                self._forget()
                raise
            except Exception as error:  # whatever a family does that cannot be recorded
                self._drop(f"this model's passes cannot be recorded ({_in_short(error)})")
                return None
            except BaseException:
                self._forget()
                raise
            self._recordings[bucket] = recording
        if recording.unchecked:
            return self._compared(recording, experts, places, input_ids, cache, arguments)
        logits = self._replay(recording, experts)
        for layer in layers:
            layer.advance()
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _compared(
        self,
        recording: _Recording,
        experts: Sequence[DeviceExpertLayer],
        places: Sequence[Place],
        input_ids: torch.Tensor,
        cache: Any,
        arguments: dict[str, Any],
    ) -> Any:
        """What a replay returns that gives nearly the same as a pass; ``None``: it does not."""
        # The replay does not advance the cache: the pass writes the same token to the same place.
        comparison = _Comparison()
        logits = self._replay(recording, experts, comparison)
        written = [
            (slot, slot.clone())
            for place in places
            for slot in (tensor.narrow(-2, place.slot, 1) for tensor in (place.keys, place.values))
        ]
        before = [dict(vars(layer)) for layer in cache.layers]
        with _handing(experts, comparison):
            output = self._model(input_ids=input_ids, **arguments)
        comparison.off.append(_distance(logits, output.logits[:, -1:]))
        distances = torch.stack(comparison.off).tolist()
        # Written so that NaN is too far.
        if all(off <= self._allowed(place) for place, off in enumerate(distances)):
            recording.unchecked -= 1
            # The replay's keys and values, and its logits, as of every token after these: what an answer is
            # does not depend on what was recorded before it.
            for slot, value in written:
                slot.copy_(value)
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        for layer, state in zip(cache.layers, before, strict=True):
            vars(layer).update(state)
        worst = max(range(len(distances)), key=lambda place: _or_far(distances[place]) / self._allowed(place))
        self._drop(
            f"a replay differed from the model's own pass by {distances[worst]:.2g} of its size, more than "
            f"{self._allowed(worst):.2g}, after {worst + 1} of {len(distances)} parts"
        )
        return None

    def _allowed(self, place: int) -> float:
        """How far what comes after ``place + 1`` layers may be off."""
        return self._tolerance * math.sqrt(max(1.0, (place + 1) / 2))

    def _keep_only(self, places: Sequence[Place], experts: Sequence[DeviceExpertLayer]) -> None:
        """Forget recordings of other memory, or of what other expert layers ask."""
        addresses = tuple(
            number
            for keys, values, _ in places
            for number in (keys.data_ptr(), values.data_ptr(), keys.shape[-2])
        )
        near: DeviceTier = experts[0].near
        if addresses == self._addresses and self._asks == (near, near.settings):
            return
        self._forget()
        self._addresses, self._asks = addresses, (near, near.settings)

    def _set(self, input_ids: torch.Tensor, position: int, places: Sequence[Place]) -> None:
        """Put the token, the tokens before it and the slot in each layer where the graphs read them."""
        numbers = torch.tensor([position, *(place.slot for place in places)])
        if self._token.device != input_ids.device or self._numbers.shape != numbers.shape:
            self._forget()
            self._token = torch.empty_like(input_ids)
            self._numbers = torch.empty_like(numbers, device=input_ids.device)
        self._token.copy_(input_ids)
        self._numbers.copy_(numbers)

    def _record(
        self,
        bucket: int,
        layers: Sequence[ReservedLayer | WindowLayer],
        places: Sequence[Place],
        experts: Sequence[DeviceExpertLayer],
        arguments: dict[str, Any],
    ) -> _Recording:
        graphs = self._graphs = self._make() if self._graphs is None else self._graphs
        position, slots = self._numbers[0], self._numbers[1:]
        cache = BucketCache(
            [
                BucketLayer(
                    place,
                    bucket if isinstance(layer, ReservedLayer) else place.keys.shape[-2],
                    position,
                    slot,
                    sliding=isinstance(layer, WindowLayer),
                )
                for layer, place, slot in zip(layers, places, slots.unbind(), strict=True)
            ]
        )

        def run(recording: _Recording) -> None:
            try:
                with _handing(experts, recording):
                    recording.begin()
                    output = self._model(
                        input_ids=self._token,
                        position_ids=position.view(1, 1),
                        **{**arguments, "past_key_values": cache},
                    )
                    recording.logits = output.logits[:, -1:]
                    recording.end()
            except BaseException:
                recording.abandon()
                raise

        with graphs.aside():
            # Libraries set themselves up at first use, which cannot be recorded. Experts are left out, so
            # what this writes for the token means nothing; the replay or pass after it writes it again.
            run(_Recording(None))
            graphs.make_room()
            recording = _Recording(graphs.new)
            run(recording)
        if recording.ordinals != list(range(len(experts))):
            raise RuntimeError(f"the expert layers ran in the order {recording.ordinals}")
        return recording

    def _replay(
        self,
        recording: _Recording,
        experts: Sequence[DeviceExpertLayer],
        comparison: _Comparison | None = None,
    ) -> torch.Tensor:
        first, *rest = recording.graphs
        first.replay()
        for layer, asked, total, graph in zip(experts, recording.asked, recording.sums, rest, strict=True):
            layer.answer(asked, total)
            if comparison is not None:
                comparison.answers.append((asked.x.clone(), total.clone()))
            graph.replay()
        assert recording.logits is not None
        return recording.logits.clone()  # the next replay writes others there

    def _forget(self) -> None:
        # The shared memory ends with the last graph in it, and cannot be begun again.
        self._recordings.clear()
        self._graphs = None

    def _drop(self, why: str) -> None:
        self.off = True
        self._forget()
        self.memory = CacheMemory()
        self._tell(f"tokens are decoded without CUDA graphs, which would be faster: {why}")


@contextmanager
def _handing(experts: Sequence[DeviceExpertLayer], capture: Capture) -> Iterator[None]:
    """Lets expert layers hand what they are asked to somebody else."""
    try:
        for layer in experts:
            layer.capture = capture
        yield
    finally:
        for layer in experts:
            layer.capture = None


def _or_far(distance: float) -> float:
    return distance if math.isfinite(distance) else math.inf


def _distance(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Length of the difference relative to that of what was expected; no dimension."""
    expected = expected.float()
    distance: torch.Tensor = (found.float() - expected).norm() / expected.norm()
    return distance


def _bucket(
    position: int, layers: Sequence[ReservedLayer | WindowLayer], places: Sequence[Place]
) -> int | None:
    """Slots that attention sees where it sees all tokens; 0 where no layer does. ``None``: attention, or that
    over the memory of a window, would see too many.
    """
    slots: dict[bool, list[int]] = {True: [], False: []}
    for layer, place in zip(layers, places, strict=True):
        slots[isinstance(layer, ReservedLayer)].append(place.keys.shape[-2])
    bucket = 0
    if slots[True]:
        bucket = min(max(LEAST_BUCKET, 1 << position.bit_length()), *slots[True])
    return None if max(bucket, *slots[False], 0) > MOST_BUCKET else bucket


def _in_short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
