"""Load a model and run it: prefill in parts, decode with a KV cache, sample, stream text, count.

This is the stable Python API (DESIGN, section 9); the command line is built on it::

    engine = moechat.load("demo")
    for step in engine.generate("Once upon a time", max_new_tokens=64):
        print(step.text, end="", flush=True)
"""

from __future__ import annotations

import inspect
import operator
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from transformers.utils import logging as transformers_logging

from moechat import _native
from moechat.config import DEVICE, active_isa
from moechat.configurator.systems import settings_of
from moechat.errors import (
    DeviceLostError,
    DoesNotFitError,
    MoechatError,
    PromptTooLongError,
    StoreDamagedError,
    UsageError,
)
from moechat.geometry import SUPPORTED_BITS
from moechat.hardware.memory import peak_resident_bytes
from moechat.hub.names import resolve
from moechat.loading import (
    DTYPES,
    LoadedModel,
    Progress,
    dense_type,
    load_model,
    open_store,
    parse_budget,
    require_in_place,
)
from moechat.models.assets import load_generation_config, load_tokenizer, stop_tokens
from moechat.models.attention_cache import cut, lengths
from moechat.models.dense_form import check_activation_bits, check_dense_bits
from moechat.models.prompt_cache import PromptCache
from moechat.models.sampling import Sampler, SamplingSettings
from moechat.models.text import TextStream
from moechat.models.threads import steady_pass
from moechat.offload.accelerator import Accelerator
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.offload.upkeep import REPLAN_TOKENS, Replanned
from moechat.statistics import Meter, Stats
from moechat.store.store import Store
from moechat.tuner import MAPPED, Sequences, Tuner, Tuning, skipped

__all__ = ["Engine", "Message", "Progress", "Replanned", "Stats", "Step", "Tuning", "load"]

Message = dict[str, str]
FinishReason = Literal["stop", "length"]
_DEFAULT_THREADS = _native.num_threads()
# Characters of a text that are cut into tokens in one call, which takes about 0.1 s; and the tokens that
# cutting it there may have made more than there are.
_CUT_AT_ONCE = 1 << 16
_OF_A_CUT = 16
_MOST_THREADS = 1024
_TUNE_SECONDS = 5.0
# Of the pages on a card whose memory ran out.
_GIVEN_BACK = 0.1


@dataclass(frozen=True)
class Step:
    """One generated token.

    Attributes:
        text: Text that became complete; may be empty while a multi-byte character is not.
        token_id: The token.
        finish_reason: ``None`` but for the last step: ``stop`` (the model ended) or ``length`` (a limit was
            reached).
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None = None


def load(
    model: str | Path,
    *,
    device: str | None = None,
    vram: str | int | None = None,
    ram: str | int | None = None,
    bits: int | None = None,
    dtype: str = "auto",
    dense_bits: int = 16,
    activation_bits: int = 16,
    system: str = "auto",
    threads: int | None = None,
    ctx: int | None = None,
    deterministic: bool = False,
    tune: bool = False,
    replan_tokens: int = REPLAN_TOKENS,
    offload: OffloadOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Engine:
    """Load a model; a checkpoint directory is converted to a block store on first use and kept in the
    library.

    Args:
        model: ``demo``, or a directory with a block store or with a transformers checkpoint.
        device: ``cpu``, or a CUDA card: ``cuda``, ``cuda:1``; ``None``: a card if ``vram`` is given.
        vram: With a card: budget of its memory for everything, ``"12G"`` or a number of bytes; ``None`` takes
            what is free, less a twentieth. Experts that do not fit beside the rest are copied there when they
            are needed.
        ram: Memory budget of the whole process, ``"2G"`` or a number of bytes; ``None`` takes what is
            available, less a reserve. Experts that do not fit beside the rest are read from the store when
            they are needed. With a card: what the experts may take of the host's memory.
        bits: 2, 3, 4, 8 or 16 bits an expert weight; ``None`` takes 4, or what a finished store holds.
        dtype: Type that the dense part computes in: ``float32``, ``bfloat16``, ``float16`` or ``auto``
            (bfloat16 where the device multiplies it natively, else float32, on a card float16).
        dense_bits: Bits of a dense weight (attention, shared experts, head): 16 keeps those of a bf16 or fp16
            checkpoint as they are, whatever ``dtype`` is (on a card in ``dtype``); 8 and 4 pack them like the
            experts, but for embeddings and routers.
        activation_bits: How inputs meet quantised weights: as integers of 16 or 8 bits with a scale for every
            64 columns, or 32: as float32.
        system: How experts are kept and fetched ahead: a name in
            ``moechat.configurator.systems.SYSTEMS``. The answer is the same for all, on a card within
            rounding (see ``deterministic``).
        threads: CPU threads; ``None`` takes the physical cores this process may use.
        ctx: Context length in tokens; ``None`` takes the model's own, or what the memory allows.
        deterministic: Bit by bit the same logits at every run and budget on a graphics card too: the CPU
            then computes none of the experts that are missing there, and no graphs are replayed. Without a
            card they are anyway.
        tune: Time a few plans and keep the fastest, as :meth:`Engine.tune` does, or take what was remembered.
        replan_tokens: Decoded tokens after which :meth:`Engine.idle` makes a new plan; 0: never.
        offload: For tests and measurements.
        progress: Called now and then while converting, verifying and loading.

    Raises:
        DoesNotFitError: The budget is too small; ``least_bytes`` is one that works.
        MoechatError: See :mod:`moechat.errors`; the subclass says what is wrong.
    """
    active_isa()  # before anything is read
    budget = parse_budget(ram)
    offload = offload or OffloadOptions()
    card = _card(device, offload, vram)
    settings = offload.cache or settings_of(system)
    if deterministic:
        settings = replace(settings, miss="fetch")
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown", hint=f"choose one of auto, {', '.join(DTYPES)}")
    check_dense_bits(dense_bits)
    check_activation_bits(activation_bits)
    if bits is not None and (not isinstance(bits, int) or bits not in SUPPORTED_BITS):
        raise UsageError(f"bits is {bits!r}", hint=f"choose one of {', '.join(map(str, SUPPORTED_BITS))}")
    if threads is not None:
        threads = _whole("threads", threads)
        if threads > _MOST_THREADS:
            raise UsageError(f"threads is {threads}; it must be between 1 and {_MOST_THREADS}")
    if ctx is not None:
        ctx = _whole("ctx", ctx, least=2)
    replan_tokens = _whole("replan_tokens", replan_tokens, least=0)
    if offload.pages is not None:
        offload = replace(offload, pages=_whole("pages", offload.pages, least=0))
    if not isinstance(model, str | Path):
        raise UsageError(
            f"the model is of type {type(model).__name__}", hint="give a name, or the path of a directory"
        )
    started = time.perf_counter()
    report = progress or (lambda _: None)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    _native.set_num_threads(threads or _DEFAULT_THREADS)
    torch.set_num_threads(_native.num_threads())

    # A Path has lost its "./", so that it could be taken for the name of the demo or of an alias.
    name = str(model.expanduser().absolute()) if isinstance(model, Path) else model
    ref = resolve(name, bits=bits)
    store = open_store(ref, bits, report)
    if card is None:
        loaded = load_model(
            store,
            dtype=dense_type(dtype),
            ctx=ctx,
            budget=budget,
            settings=settings,
            offload=offload,
            report=report,
            replan_tokens=replan_tokens,
            dense_bits=dense_bits,
            activation_bits=activation_bits,
        )
    else:
        loaded = _load_on(
            card,
            store,
            dtype=card.dtype if dtype == "auto" else dense_type(dtype),
            ctx=ctx,
            vram=parse_budget(vram, "vram"),
            ram=budget,
            settings=settings,
            offload=offload,
            report=report,
            replan_tokens=replan_tokens,
            activation_bits=activation_bits,
            dense_bits=dense_bits,
            deterministic=deterministic,
        )
    engine = Engine(
        loaded,
        name=ref.name,
        system="custom" if offload.cache else system,
        started=started,
        link=offload.link,
    )
    try:
        require_in_place(store)
    except StoreDamagedError:
        engine.close()
        raise
    if tune:
        engine.tune(progress=report)
    report(Progress("load", 1, 1, "ready"))
    return engine


def _card(device: str | None, offload: OffloadOptions, vram: str | int | None) -> Accelerator | None:
    """The card that a device names; ``None``: the CPU."""
    if device is None:
        device = "cpu" if vram is None else "cuda"
    named = re.fullmatch(DEVICE, device)
    if named is None:
        raise UsageError(f"device {device!r} is unknown", hint="choose 'cpu', 'cuda', or 'cuda:1'")
    if device == "cpu":
        if vram is not None:
            raise UsageError(
                "a budget of graphics memory (vram=) needs a graphics card",
                hint="leave device= out, or say 'cuda'; ram= limits the memory of the process",
            )
        return None
    parse_budget(vram, "vram")
    card: Accelerator = offload.accelerator or Accelerator(int(named[1] or 0))
    return card


def _load_on(
    card: Accelerator, store: Store, *, vram: int | None, ram: int | None, **arguments: Any
) -> LoadedModel:
    # Triton is imported with it, which machines without a card need not have.
    from moechat.loading.on_device import DeviceOptions, load_on_device

    with card.active():
        return load_on_device(store, DeviceOptions(card, vram, ram), **arguments)


class Engine:
    """A loaded model. Not safe for use by two threads at once; make one engine a thread.

    A context manager: at its end the memory of experts and conversation is given back.

    Attributes:
        name: What the user called the model.
        context_length: Most tokens of prompt and answer together.
    """

    def __init__(
        self, loaded: LoadedModel, *, name: str, system: str, started: float, link: LinkSettings
    ) -> None:
        """Use :func:`load`."""
        self.name = name
        self.context_length = loaded.plan.context
        self._system = system
        self._loaded = loaded
        self._store: Store = loaded.store
        self._model: Any = loaded.model
        self._process = os.getpid()
        self._near = loaded.near
        self._link = link
        self._upkeep = loaded.upkeep
        self._tuning: Tuning | None = None
        self._counters = loaded.counters
        self._device = loaded.device
        self._keeps_last = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._tokenizer = load_tokenizer(loaded.store.path)
        self._generation_config = load_generation_config(loaded.store.path)
        self._stop_tokens = stop_tokens(self._generation_config, loaded.config, self._tokenizer)
        self._prompt_cache = PromptCache()
        self._held = 0  # tokens that it may hold
        self._notes: list[str] = []
        self._meter = Meter(loaded.near, loaded.counters)
        plan = loaded.plan
        self._stats = Stats(
            load_s=time.perf_counter() - started,
            pages=plan.pages,
            page_bytes=plan.page_bytes,
            budget_bytes=plan.budget,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # An engine whose making failed has no parts yet.
        if "_prompt_cache" in self.__dict__:
            self.close()

    def close(self) -> None:
        """Give back what the experts, the weights and the conversation take; harmless when repeated.

        Answers under way and later calls that compute end with :class:`MoechatError`.
        """
        if self._upkeep is not None:
            self._upkeep.close()
            self._upkeep = None
        near, self._near, self._model = self._near, None, None
        self._store.release()
        self._meter.close()
        self._prompt_cache.drop()
        self._loaded = replace(self._loaded, model=None, near=None, parts=(), upkeep=None, decoder=None)
        if near is None:
            return
        near.close()
        if self._loaded.accelerator is not None:
            with suppress(RuntimeError):  # a card that has failed refuses this too, and has said so
                self._loaded.accelerator.release()

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be given to :meth:`generate`."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def stats(self) -> Stats:
        """Measurements of the last answer."""
        upkeep, tuning = self._upkeep, self._tuning
        stats = replace(
            self._stats,
            peak_rss_bytes=peak_resident_bytes(),
            tuned="" if tuning is None or tuning.state == "skipped" else tuning.winner,
            tuning=None if tuning is None else tuning.to_json(),
        )
        if self._near is not None:
            stats = replace(stats, plan=self._near.plan.method)
            if self._loaded.accelerator is not None:
                stats = replace(stats, pages=self._near.pages)
        if upkeep is None:
            return stats
        last = None if upkeep.last is None else upkeep.last.to_json()
        return replace(stats, replans=upkeep.replans, replan=last)

    @property
    def tuning(self) -> Tuning | None:
        """What :meth:`tune` did last; ``None`` before."""
        return self._tuning

    def idle(self) -> Replanned | None:
        """Use the time while nobody waits for a token: before reading what the user types, say.

        Routing statistics go to the user's directory, and after every ``replan_tokens`` decoded tokens a new
        plan for the experts is made, as :meth:`replan` does. Takes milliseconds, mostly none.

        Returns:
            The new plan, if one was made.

        Raises:
            MoechatError: Another thread closes the engine meanwhile.
        """
        upkeep = self._upkeep
        if upkeep is None:
            return None
        with self._told():
            return upkeep.idle()

    def replan(self) -> Replanned | None:
        """Divide the pages among the layers anew, from all that is known now; at once, and no block moves.

        Returns:
            What has changed; ``None`` where experts are mapped.

        Raises:
            MoechatError: Another thread closes the engine meanwhile, or this process is a forked one.
        """
        upkeep = self._upkeep
        if upkeep is None:
            return None
        with self._told():
            return upkeep.replan()

    def notices(self) -> list[str]:
        """What a user may want to know since the last call, such as files that could not be used or written;
        sentences for people.
        """
        notes, self._notes = self._notes, []
        return notes if self._upkeep is None else notes + self._upkeep.take_notes()

    def tune(
        self,
        *,
        limit_s: float = _TUNE_SECONDS,
        again: bool = False,
        may_map: bool | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Tuning:
        """Time a few plans on this machine and keep the fastest, for this and later starts.

        Text is decoded for a few seconds, with an attention cache of its own: the conversation stays as it
        is, and so do its statistics. The tokens are the same with every plan.

        Args:
            limit_s: Seconds after which no more tokens are begun; 0: only what is remembered.
            again: Time also where a choice is remembered.
            may_map: Whether mapping the store may win; ``None``: where no memory budget was given.
            progress: Told how far it is, in milliseconds.

        Returns:
            What was done and why; see also :attr:`stats`.

        Raises:
            MoechatError: Experts cannot be read, or the engine is closed.
            KeyboardInterrupt: Ctrl-C; the computed plan is in effect again.
        """
        model = self._usable_model()
        if self._loaded.accelerator is not None:
            self._tuning = skipped("plans are not timed on graphics cards in this version")
            return self._tuning
        if self._near is None:
            if self._tuning is None or self._tuning.winner != MAPPED:
                self._tuning = skipped("all experts are in memory, so there is nothing to choose")
            return self._tuning
        tuner = Tuner(self._loaded, self._link, lambda: self._sequences(model), may_map=may_map)
        found = None if again else tuner.recall()
        if found is None:
            if self._held + Sequences.MOST_TOKENS > self.context_length and self._held:
                self._tuning = skipped("the conversation takes the memory of the attention cache")
                return self._tuning
            if limit_s <= 0:
                self._tuning = skipped("nothing is remembered for this model and budget")
                return self._tuning
            self._tuning = skipped("it was interrupted")
            try:
                with self._told():
                    found = self._timed(tuner, limit_s, progress)
            finally:
                if self._near is not None:
                    self._meter.restart()
        self._tuning = found
        if found.winner == MAPPED:
            self._leave_pages()
        return found

    def _timed(self, tuner: Tuner, limit_s: float, progress: Callable[[Progress], None] | None) -> Tuning:
        if progress is None:
            return tuner.run(limit_s)
        report, total = progress, round(1000 * limit_s)
        return tuner.run(limit_s, lambda share: report(Progress("tune", round(share * total), total)))

    def _leave_pages(self) -> None:
        """Experts are mapped from now on: what the pages held is the page cache's."""
        near, self._near = self._near, None
        self._meter.close()
        if self._upkeep is not None:
            self._upkeep.close()
        self._upkeep = None
        self._loaded = replace(self._loaded, near=None, upkeep=None)
        self._stats = replace(self._stats, pages=0)
        if near is not None:
            near.close()

    def _sequences(self, model: Any) -> Sequences:
        arguments: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_last else {}

        def forward(ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
            output = self._forward(ids, past_key_values=cache, use_cache=True, **arguments)
            return output.logits[0, -1], output.past_key_values

        return Sequences(
            forward,
            self._new_cache,
            None if self._tokenizer is None else self.encode,
            vocabulary=int(model.get_input_embeddings().num_embeddings),
            stop=frozenset(self._stop_tokens),
            most_tokens=self.context_length,
        )

    @property
    def sampling(self) -> SamplingSettings:
        """The model's own sampling settings, before any override."""
        return SamplingSettings.from_generation_config(self._generation_config)

    def describe(self) -> dict[str, Any]:
        """Facts about the loaded model, for people and programs."""
        geometry = self._store.geometry
        plan = self._loaded.plan
        return {
            "name": self.name,
            "model_type": self._store.manifest.model_type,
            "source": self._store.manifest.source.name,
            "source_weight_type": self._store.manifest.source.weight_type.value,
            "bits": geometry.bits,
            "expert_layers": len(self._store.manifest.layers),
            "experts_per_layer": geometry.num_experts,
            "blocks_per_expert": geometry.blocks_per_expert,
            "expert_bytes": len(self._store.manifest.layers) * geometry.layer_bytes,
            "dense_dtype": str(self._loaded.dtype).removeprefix("torch."),
            "dense_bits": self._loaded.form.bits,
            "activation_bits": self._loaded.form.activation_bits,
            "device": str(self._device),
            "context_length": self.context_length,
            "context_limited_by_memory": plan.context_limited,
            "threads": _native.num_threads(),
            "isa": active_isa(),
            "memory_budget_bytes": plan.budget,
            "memory_budget_given": plan.given,
            "memory_process_bytes": plan.base,
            "memory_dense_bytes": plan.dense,
            "memory_attention_cache_bytes": plan.kv,
            "memory_attention_cache_exact": self._loaded.cache.exact,
            "memory_workspace_bytes": plan.workspace,
            "memory_scratch_bytes": plan.scratch,
            "memory_margin_bytes": plan.margin,
            "memory_experts_bytes": plan.expert_bytes,
            "experts": self._how_experts_are_held(),
            "pages": plan.pages,
            "page_bytes": plan.page_bytes,
            "blocks": len(self._store.layers) * geometry.num_experts * geometry.blocks_per_expert,
            "system": self._system,
            **self._meter.describe(),
        }

    def _how_experts_are_held(self) -> str:
        if self._loaded.accelerator is not None:
            return "in pages on the card, " + (
                "all of them" if self._loaded.plan.mapped else "the rest copied"
            )
        if self._loaded.plan.mapped:
            return "mapped: all of them fit"
        if self._tuning is not None and self._tuning.winner == MAPPED:
            return "mapped: the page cache was faster than pages"
        return "in pages, the rest read when needed"

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Tokens of a text, or of chat messages through the model's chat template.

        Raises:
            UsageError: The model has no tokenizer or no chat template, or the prompt is empty.
            PromptTooLongError: A text alone is far longer than the context. Cutting all of it into tokens
                would take minutes and gigabytes, and nothing could interrupt it.
        """
        if self._tokenizer is None:
            raise UsageError(
                f"{self.name} has no tokenizer", hint="put the model's tokenizer files beside its weights"
            )
        for part in [prompt] if isinstance(prompt, str) else prompt:
            text = part.get("content") if isinstance(part, Mapping) else part
            if isinstance(text, str) and len(text) > _CUT_AT_ONCE:
                self._refuse_what_is_far_too_long(text)
        if isinstance(prompt, str):
            try:
                tokens = list(self._tokenizer(prompt)["input_ids"])
            except (TypeError, UnicodeError) as error:
                raise UsageError(f"the prompt is not Unicode text: {error}") from error
        else:
            if not self.has_chat_template:
                raise UsageError(
                    f"{self.name} has no chat template", hint="give a plain text to continue instead"
                )
            try:
                encoded = self._tokenizer.apply_chat_template(
                    list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
                )
            except Exception as error:
                raise UsageError(
                    f"the chat template of {self.name} refuses these messages: {error}"
                ) from error
            tokens = list(encoded["input_ids"])
        if not tokens:
            raise UsageError("the prompt is empty")
        return tokens

    def _refuse_what_is_far_too_long(self, text: str) -> None:
        tokens = 0
        for begin in range(0, len(text), _CUT_AT_ONCE):
            try:
                piece = self._tokenizer(text[begin : begin + _CUT_AT_ONCE], add_special_tokens=False)
            except (TypeError, UnicodeError) as error:
                raise UsageError(f"the prompt is not Unicode text: {error}") from error
            tokens += max(0, len(piece["input_ids"]) - _OF_A_CUT)
            if tokens > self.context_length:
                raise PromptTooLongError(
                    f"the prompt has {len(text):,} characters, the first {begin + _CUT_AT_ONCE:,} of them "
                    f"more than {tokens:,} tokens; the context holds {self.context_length}",
                    hint="shorten the prompt, or raise the context with --ctx where the model allows it",
                )

    def token_text(self, token: int) -> str:
        """One token as text, special ones too, which steps leave out; empty without a tokenizer.

        A token may be a part of a character; then it is a replacement character.
        """
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of one teacher-forced pass.

        Args:
            tokens: Token ids, at least one.

        Returns:
            float32 ``[tokens, vocab]``.

        Raises:
            UsageError: No token, or an id outside the vocabulary.
            PromptTooLongError: More tokens than the context holds.
        """
        ids = self._check(tokens, room=0)
        parts = self._parts(ids, ids.shape[1])
        if len(parts) == 1:
            result: torch.Tensor = self._forward(ids, use_cache=False).logits[0].cpu().float()
            return result
        if self._loaded.accelerator is not None:
            self._prompt_cache.drop()  # a card's memory is for one cache
        cache, done = self._new_cache(), 0
        for part in parts:
            output = self._forward(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            if done == 0:
                result = torch.empty((ids.shape[1], output.logits.shape[-1]), dtype=torch.float32)
            result[done : done + part.shape[1]] = output.logits[0]
            done += part.shape[1]
        return result

    def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        reserve: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Step]:
        """Generate an answer, token by token.

        Args:
            prompt: A text to continue, a list of chat messages (``{"role": …, "content": …}``), or token ids.
            max_new_tokens: Most tokens to draw; ``None`` takes the model's own limit, or all that the context
                holds.
            temperature: 0 is greedy; ``None`` takes the model's own, as for the next four.
            top_p: Nucleus probability.
            top_k: Candidates kept; 0 keeps all.
            min_p: Least probability relative to the likeliest token.
            repetition_penalty: Above 1 discourages tokens already seen.
            seed: Repeats a draw; ``None`` takes a fresh one, found in :attr:`stats`.
            reserve: Tokens of the context that the prompt must leave for the answer.
            progress: Told before the first and after each part of the prompt how many of its tokens are
                computed (or known from before), and how many there are; its own time counts too.

        Returns:
            An iterator of steps. Closing it, or a KeyboardInterrupt inside it, leaves the engine usable.

        Raises:
            PromptTooLongError: Before any work, when the prompt leaves less room than ``reserve``.
            UsageError: A setting is out of range.
        """
        started = time.perf_counter()
        settings = self.sampling.override(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        if max_new_tokens is not None:
            max_new_tokens = _whole("max_new_tokens", max_new_tokens)
        reserve = _whole("reserve", reserve)
        if not isinstance(prompt, Sized):
            raise UsageError(
                f"the prompt is of type {type(prompt).__name__}",
                hint="give a text, messages or token ids",
            )
        messages = not isinstance(prompt, str | torch.Tensor) and any(
            isinstance(item, dict) for item in prompt
        )
        tokens = self.encode(prompt) if messages or isinstance(prompt, str) else prompt  # type: ignore[arg-type]
        ids = self._check(tokens, room=reserve)  # type: ignore[arg-type]
        room = self.context_length - ids.shape[1]
        shipped = getattr(self._generation_config, "max_new_tokens", None)
        limit = max_new_tokens or (shipped if isinstance(shipped, int) and shipped > 0 else room)
        draw_seed = secrets.randbits(63) if seed is None else _whole("seed", seed, least=0)
        if draw_seed >= 1 << 63:
            raise UsageError(f"seed is {draw_seed}; it must be between 0 and {(1 << 63) - 1}")
        before = self._stats
        stats = Stats(
            load_s=before.load_s,
            prompt_tokens=ids.shape[1],
            seed=draw_seed,
            pages=before.pages,
            page_bytes=before.page_bytes,
            budget_bytes=before.budget_bytes,
        )
        sampler = Sampler(settings, draw_seed)
        return self._decode(ids, min(limit, room), sampler, stats, started, progress)

    def _decode(
        self,
        ids: torch.Tensor,
        limit: int,
        sampler: Sampler,
        stats: Stats,
        started: float,
        progress: Callable[[int, int], None] | None,
    ) -> Iterator[Step]:
        prompt = ids.shape[1]
        known: list[int] = ids[0].tolist()
        cache, reused = self._prompt_cache.take(known)
        if cache is None:
            cache = self._new_cache()
        self._stats = stats = replace(stats, reused_tokens=reused)
        stream = TextStream(self._tokenizer) if self._tokenizer is not None else None
        history, parts = ids, self._parts(ids[:, reused:], prompt)
        first = 0.0
        computed = reused
        upkeep = self._upkeep
        self._meter.start()
        try:
            if progress is not None:
                progress(reused, prompt)
            for count in range(1, limit + 1):
                begun = time.perf_counter()
                for part in parts:
                    arguments: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_last else {}
                    output = self._forward(part, past_key_values=cache, use_cache=True, **arguments)
                    cache = output.past_key_values
                    computed += part.shape[1]
                    if progress is not None and computed <= prompt:
                        progress(computed, prompt)
                token = sampler.draw(history, output.logits[0, -1].cpu())
                now = time.perf_counter()
                first = first or now
                if upkeep is not None:
                    upkeep.step(now - begun)
                self._stats = stats = replace(
                    self._meter.add(stats),
                    output_tokens=count,
                    ttft_s=first - started,
                    tpot_s=(now - first) / (count - 1) if count > 1 else 0.0,
                    busy_s=now - started,
                )
                reason: FinishReason | None = None
                if token in self._stop_tokens:
                    reason = "stop"
                elif count == limit:
                    reason = "length"
                text = ""
                if stream is not None:
                    text = "" if reason == "stop" else stream.push(token)
                    text += stream.flush() if reason else ""
                yield Step(text, token, reason)
                self._meter.start()
                if reason:
                    return
                parts = [torch.tensor([[token]])]
                history = torch.cat([history, parts[0]], dim=1)
                known.append(token)
        finally:
            if upkeep is not None and upkeep is self._upkeep:
                upkeep.answer_done()
            if cache is not None and self._model is not None:
                # An interrupted pass leaves layers of different lengths: what it added is cut off again.
                self._prompt_cache.keep(cache, known[:computed], prompt)
                self._held = computed

    def _new_cache(self) -> Any:
        """An empty attention cache; ``None`` where the model makes its own."""
        model = self._model
        if model is None:
            return None
        return self._loaded.cache.new(model.config, self.context_length)

    def _parts(self, ids: torch.Tensor, prompt: int) -> list[torch.Tensor]:
        """The tokens still to be computed of a prompt of ``prompt`` tokens, in the parts of its passes."""
        if prompt > self._loaded.cache.appendable:
            return [ids]
        return list(torch.split(ids, self._loaded.chunk, dim=1))

    def _usable_model(self) -> Any:
        """The model, if this engine can still compute.

        Raises:
            MoechatError: The engine was closed, or belongs to the process that this one was forked from.
        """
        # Once: another thread may close the engine at any time.
        model = self._model
        if model is None:
            raise self._was_closed()
        if os.getpid() != self._process:
            # Their threads are not in this process; torch would wait for its own without end.
            raise MoechatError(
                f"a forked child cannot use {self.name}, which its parent loaded",
                hint="start the child with multiprocessing's 'spawn' method, and load the model there",
            )
        return model

    def _was_closed(self) -> MoechatError:
        return MoechatError(f"{self.name} was closed", hint="load it again")

    def _forward(self, ids: torch.Tensor, **arguments: Any) -> Any:
        """One pass.

        Raises:
            StoreDamagedError: Experts cannot be read because a file of the store is no longer what it was.
            MoechatError: Experts cannot be read for another reason, or the engine is closed, or this process
                is a forked one.
        """
        cache = arguments.get("past_key_values")
        held = lengths(cache)
        result = self._pass(ids, arguments)
        if result is None:
            # A card's memory was too small for this pass; what it had appended to the cache goes again.
            freed = 0 if not cut(cache, held) else self._give_back()
            result = None if freed == 0 else self._pass(ids, arguments)
            if result is None:
                raise DoesNotFitError(
                    f"the graphics memory is too small for a pass of {ids.shape[1]} tokens",
                    hint="load the model with a smaller --vram (vram=), which leaves more beside the "
                    "experts, or with a shorter context (--ctx, ctx=)",
                )
            self._notes.append(
                f"the graphics memory ran out: {freed >> 20} MiB of experts were given back, and fewer are "
                "kept there from now on"
            )
        return result

    def _pass(self, ids: torch.Tensor, arguments: dict[str, Any]) -> Any:
        """What the model returns; ``None`` if a card's memory ran out."""
        model = self._usable_model()
        call = self._loaded.decoder or model
        card = self._loaded.accelerator
        try:
            with (
                self._told(),
                nullcontext() if card is None else card.active(),
                torch.inference_mode(),
                steady_pass(ids.shape[1]),
            ):
                return call(input_ids=ids.to(self._device), **arguments)
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            if card is None or not _is_out_of_memory(error):
                raise
            return None

    def _give_back(self) -> int:
        """Bytes of a card's memory that the experts gave back."""
        near = self._loaded.near
        accelerator = self._loaded.accelerator
        if accelerator is None or near is None:
            return 0
        if self._upkeep is not None:
            self._upkeep.save()
        freed = near.shrink(_GIVEN_BACK)
        self._meter.restart()
        return freed

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What the native code refuses is told as an error with a next step; raises as :meth:`_forward`."""
        try:
            yield
        except RuntimeError as error:
            # Closed by another thread, so that pages and link are gone; or this is a forked child.
            try:
                self._usable_model()
            except MoechatError as reason:
                raise reason from error
            card = self._loaded.accelerator
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or _is_out_of_memory(error)
            if isinstance(error, _native.DeviceLostError) or (
                card is not None and not out_of_memory and not card.alive()
            ):
                raise DeviceLostError(
                    f"the graphics card has failed: {error}",
                    hint="start again; if it fails again, the driver's log (dmesg) may say why",
                ) from error
            if not isinstance(error, _native.LinkError):
                raise
            Store.open(self._store.path)  # raises if a file is missing or has another size
            raise MoechatError(
                f"experts of {self.name} cannot be read: {error}",
                hint="the model is still loaded: try again; if it stays so, check the disk",
            ) from error

    def _check(self, tokens: Sequence[int], room: int) -> torch.Tensor:
        if isinstance(tokens, torch.Tensor):
            tokens = tokens.flatten().tolist()
        try:
            tokens = [operator.index(token) for token in tokens]
        except TypeError as error:
            raise UsageError(f"token ids must be integers: {error}") from error
        if not tokens:
            raise UsageError("the prompt is empty")
        if len(tokens) + room > self.context_length:
            hint = "shorten the prompt, or raise the context with --ctx where the model allows it"
            if self._loaded.plan.context_limited:
                flag = "--ram" if self._loaded.accelerator is None else "--vram"
                hint = (
                    f"memory made the context shorter than the model allows: give more with {flag}, or say "
                    "with --ctx how many tokens are wanted, at the price of room for experts"
                )
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens; the context holds {self.context_length}"
                + (f", of which {room} for the answer" if room else ""),
                hint=hint,
            )
        vocabulary: int = self._usable_model().get_input_embeddings().num_embeddings
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            raise UsageError(f"token ids must lie between 0 and {vocabulary - 1}")
        return torch.tensor([tokens], dtype=torch.int64)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Memory that a library wanted for itself, past torch's allocator."""
    return getattr(error, "error_code", None) == 2 or "ALLOC_FAILED" in str(error)


def _whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least ``least``; numpy's count too, booleans do not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return number
