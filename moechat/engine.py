"""Load a model and run it: prefill in one pass, decode with a KV cache, sample, stream text, count.

This is the stable Python API (DESIGN, section 9); the command line is built on it::

    engine = moechat.load("demo")
    for step in engine.generate("Once upon a time", max_new_tokens=64):
        print(step.text, end="", flush=True)
"""

from __future__ import annotations

import inspect
import operator
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from transformers.utils import logging as transformers_logging

from moechat import _native
from moechat.config import user_paths
from moechat.errors import PromptTooLongError, UnsupportedModelError, UsageError
from moechat.geometry import SUPPORTED_BITS
from moechat.hub.names import ModelRef, resolve
from moechat.models.assets import context_length, load_generation_config, load_tokenizer, stop_tokens
from moechat.models.dense import load_dense
from moechat.models.mapping import plan_checkpoint
from moechat.models.prompt_cache import PromptCache
from moechat.models.sampling import Sampler, SamplingSettings
from moechat.models.skeleton import build_skeleton, load_config
from moechat.models.text import TextStream
from moechat.offload.experts import IMPLEMENTATION, ExpertCounters, ExpertLayer, attach, register
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import ConvertProgress, convert
from moechat.store.manifest import MANIFEST_NAME, Manifest
from moechat.store.store import Store

Message = dict[str, str]
FinishReason = Literal["stop", "length"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_BITS = 4
_DEFAULT_THREADS = _native.num_threads()


@dataclass(frozen=True)
class Progress:
    """How far loading has come.

    Attributes:
        stage: ``convert``, ``wait``, ``verify`` or ``load``.
        done: Bytes done.
        total: Bytes in all, or ``None`` where unknown.
        detail: What is being worked on.
    """

    stage: str
    done: int
    total: int | None
    detail: str = ""


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


@dataclass(frozen=True)
class Stats:
    """Measurements of the last answer (or of the one under way).

    Attributes:
        load_s: Seconds that loading the model took, conversion and verification included.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Tokens of the prompt that were already in the attention cache from the answer before.
        output_tokens: Tokens drawn so far.
        ttft_s: Seconds from the call of ``generate`` to the first token; 0 before it.
        tpot_s: Mean seconds for each token after the first; 0 before the second.
        expert_activations: (token, layer, expert) triples computed.
        expert_bytes: Bytes of expert blocks walked by the kernels.
        peak_rss_bytes: Largest resident set of the process so far, mapped files included.
        seed: What makes the same draw again.
    """

    load_s: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    expert_activations: int = 0
    expert_bytes: int = 0
    peak_rss_bytes: int = 0
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def load(
    model: str | Path,
    *,
    device: str = "cpu",
    vram: str | int | None = None,
    ram: str | int | None = None,
    bits: int | None = None,
    dtype: str = "auto",
    system: str = "auto",
    threads: int | None = None,
    ctx: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Engine:
    """Load a model; a checkpoint directory is converted to a block store on first use and kept in the
    library.

    Args:
        model: ``demo``, or a directory with a block store or with a transformers checkpoint.
        device: ``cpu``.
        vram: Reserved for the GPU cache; only ``None`` works so far.
        ram: Reserved for the near-tier budget; only ``None`` works so far.
        bits: 2, 3, 4, 8 or 16 bits an expert weight; ``None`` takes 4, or what a finished store holds.
        dtype: Type of the dense part: ``float32``, ``bfloat16``, ``float16`` or ``auto`` (bfloat16 where the
            CPU multiplies it natively, else float32).
        system: ``auto``.
        threads: CPU threads; ``None`` takes the physical cores this process may use.
        ctx: Context length in tokens; ``None`` takes the model's own.
        progress: Called now and then while converting, verifying and loading.

    Raises:
        MoechatError: See :mod:`moechat.errors`; the subclass says what is wrong.
    """
    if device != "cpu":
        raise UsageError(
            f"device {device!r} is not available", hint="this version computes on the CPU: use 'cpu'"
        )
    if vram is not None or ram is not None:
        raise UsageError(
            "memory budgets (vram=, ram=) are not available in this version",
            hint="expert blocks are mapped from the store; the system's page cache keeps what fits",
        )
    if system != "auto":
        raise UsageError(f"system {system!r} is not available", hint="this version knows 'auto' only")
    if dtype != "auto" and dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown", hint=f"choose one of auto, {', '.join(_DTYPES)}")
    if bits is not None and bits not in SUPPORTED_BITS:
        raise UsageError(f"bits is {bits!r}", hint=f"choose one of {', '.join(map(str, SUPPORTED_BITS))}")
    if threads is not None and not 1 <= threads <= 1024:
        raise UsageError(f"threads is {threads}; it must be between 1 and 1024")
    started = time.perf_counter()
    report = progress or (lambda _: None)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    _native.set_num_threads(threads or _DEFAULT_THREADS)
    torch.set_num_threads(_native.num_threads())

    # A Path has lost its "./", so that it could be taken for the name of the demo or of an alias.
    name = str(model.expanduser().absolute()) if isinstance(model, Path) else model
    ref = resolve(name, bits=bits)
    store = _open_store(ref, bits, report)
    store.ensure_verified(
        user_paths().state,
        lambda done, total, name: report(Progress("verify", done, total, name)),
    )
    return Engine(store, name=ref.name, dtype=_dense_type(dtype), ctx=ctx, started=started, report=report)


def _open_store(ref: ModelRef, bits: int | None, report: Callable[[Progress], None]) -> Store:
    if ref.store is not None:
        store = Store.open(ref.store)
        if bits is not None and bits != store.geometry.bits:
            raise UsageError(
                f"{ref.name} is stored with {store.geometry.bits} bits, not {bits}",
                hint="name the checkpoint that it was made from to convert it anew",
            )
        return store
    assert ref.checkpoint is not None
    wanted = _DEFAULT_BITS if bits is None else bits
    destination = ref.library_path(user_paths().models, wanted)
    checkpoint = Checkpoint.open(ref.checkpoint)
    manifest = destination / MANIFEST_NAME
    # When the checkpoint has changed since, the conversion below replaces the store once it is complete.
    if manifest.exists() and Manifest.read(manifest).source.fingerprint == checkpoint.fingerprint():
        return Store.open(destination)
    plan = plan_checkpoint(checkpoint)

    def on_convert(event: ConvertProgress) -> None:
        stage = "wait" if event.stage == "waiting" else "convert"
        report(Progress(stage, event.done_bytes, event.total_bytes, event.detail))

    return convert(checkpoint, plan, destination, bits=wanted, source_name=ref.name, progress=on_convert)


def _dense_type(dtype: str) -> torch.dtype:
    if dtype != "auto":
        return _DTYPES[dtype]
    # Without native support torch multiplies bf16 on a CPU several times slower than float32.
    features = _native.cpu_features()
    native_bf16 = features.get("avx512_bf16", False) or features.get("amx_bf16", False)
    return torch.bfloat16 if native_bf16 else torch.float32


class Engine:
    """A loaded model. Not safe for use by two threads at once; make one engine a thread.

    Attributes:
        name: What the user called the model.
        context_length: Most tokens of prompt and answer together.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        dtype: torch.dtype,
        ctx: int | None,
        started: float,
        report: Callable[[Progress], None],
    ) -> None:
        self.name = name
        self._store = store
        self._counters = ExpertCounters()
        report(Progress("load", 0, None, "dense weights"))
        register()
        config = load_config(store.path)
        self.context_length = context_length(config, ctx)
        skeleton = build_skeleton(config, dtype, IMPLEMENTATION)
        _check_same_experts(skeleton.experts, store)
        load_dense(skeleton, store.dense)
        for entry in skeleton.experts:
            attach(entry.module, ExpertLayer(store.geometry, store.expert_layer(entry.layer), self._counters))
        self._model = skeleton.model
        self._dtype = dtype
        self._keeps_last = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._tokenizer = load_tokenizer(store.path)
        self._generation_config = load_generation_config(store.path)
        self._stop_tokens = stop_tokens(self._generation_config, config, self._tokenizer)
        self._prompt_cache = PromptCache()
        self._stats = Stats(load_s=time.perf_counter() - started)
        report(Progress("load", 1, 1, "ready"))

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be given to :meth:`generate`."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def stats(self) -> Stats:
        """Measurements of the last answer."""
        return replace(self._stats, peak_rss_bytes=_peak_rss())

    @property
    def sampling(self) -> SamplingSettings:
        """The model's own sampling settings, before any override."""
        return SamplingSettings.from_generation_config(self._generation_config)

    def describe(self) -> dict[str, Any]:
        """Facts about the loaded model, for people and programs."""
        geometry = self._store.geometry
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
            "dense_dtype": str(self._dtype).removeprefix("torch."),
            "context_length": self.context_length,
            "threads": _native.num_threads(),
            "isa": _native.active_isa(),
        }

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Tokens of a text, or of chat messages through the model's chat template.

        Raises:
            UsageError: The model has no tokenizer or no chat template, or the prompt is empty.
        """
        if self._tokenizer is None:
            raise UsageError(
                f"{self.name} has no tokenizer", hint="put the model's tokenizer files beside its weights"
            )
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
        with torch.inference_mode():
            output = self._model(input_ids=ids, use_cache=False)
        result: torch.Tensor = output.logits[0].float()
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
        stats = Stats(load_s=self._stats.load_s, prompt_tokens=ids.shape[1], seed=draw_seed)
        return self._decode(ids, min(limit, room), Sampler(settings, draw_seed), stats, started)

    def _decode(
        self, ids: torch.Tensor, limit: int, sampler: Sampler, stats: Stats, started: float
    ) -> Iterator[Step]:
        prompt = ids.shape[1]
        known: list[int] = ids[0].tolist()
        cache, reused = self._prompt_cache.take(known)
        self._stats = stats = replace(stats, reused_tokens=reused)
        stream = TextStream(self._tokenizer) if self._tokenizer is not None else None
        history, fed = ids, ids[:, reused:]
        first = 0.0
        running = True
        try:
            for count in range(1, limit + 1):
                activations, nbytes = self._counters.activations, self._counters.bytes_read
                with torch.inference_mode():
                    arguments: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_last else {}
                    output = self._model(input_ids=fed, past_key_values=cache, use_cache=True, **arguments)
                cache = output.past_key_values
                running = False
                token = sampler.draw(history, output.logits[0, -1])
                now = time.perf_counter()
                first = first or now
                self._stats = stats = replace(
                    stats,
                    output_tokens=count,
                    ttft_s=first - started,
                    tpot_s=(now - first) / (count - 1) if count > 1 else 0.0,
                    expert_activations=stats.expert_activations + self._counters.activations - activations,
                    expert_bytes=stats.expert_bytes + self._counters.bytes_read - nbytes,
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
                if reason:
                    return
                fed = torch.tensor([[token]])
                history = torch.cat([history, fed], dim=1)
                running = True
                known.append(token)
        finally:
            if cache is not None:
                # An interrupted pass leaves layers of different lengths: what it added is cut off again.
                complete = len(known) - fed.shape[1] if running else len(known)
                self._prompt_cache.keep(cache, known[:complete], prompt)

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
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens; the context holds {self.context_length}"
                + (f", of which {room} for the answer" if room else ""),
                hint="shorten the prompt, or raise the context with --ctx where the model allows it",
            )
        vocabulary: int = self._model.get_input_embeddings().weight.shape[0]  # type: ignore[index,assignment]
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            raise UsageError(f"token ids must lie between 0 and {vocabulary - 1}")
        return torch.tensor([tokens], dtype=torch.int64)


def _whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least ``least``; numpy's count too, booleans do not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return number


def _check_same_experts(experts: Any, store: Store) -> None:
    built = [
        (entry.layer, entry.num_experts, entry.hidden_size, entry.intermediate_size) for entry in experts
    ]
    geometry = store.geometry
    shape = (geometry.num_experts, geometry.hidden_size, geometry.intermediate_size)
    stored = [(record.layer, *shape) for record in store.manifest.layers]
    if built != stored:
        raise UnsupportedModelError(
            f"{store.path} holds {len(stored)} expert layers unlike the {len(built)} of its configuration",
            hint="it was made with another version of transformers; convert the checkpoint again",
        )


def _peak_rss() -> int:
    """Peak resident set in bytes; the present one where the system keeps no peak."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(psutil.Process(os.getpid()).memory_info().rss)
