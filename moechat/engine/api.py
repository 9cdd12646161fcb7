"""The Python API: load a model, generate text, read statistics; the command line is built on it.

Example::

    engine = moechat.load("demo")
    for step in engine.generate("Once upon a time", max_new_tokens=64):
        print(step.text, end="", flush=True)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

import torch

from moechat import _native
from moechat.config import active_isa
from moechat.engine.answer import AnswerSettings, stop_texts, token_bias
from moechat.engine.decoder import Decoder
from moechat.engine.describe import Description, describe
from moechat.engine.kept_conversation import conversation_key, read_conversation, write_conversation
from moechat.engine.plans import PlanKeeper
from moechat.engine.prompt import Message, Prompt, PromptEncoder
from moechat.engine.recovery import PassRunner
from moechat.engine.running_answer import Answer
from moechat.engine.stats import Meter, Stats
from moechat.engine.together import Advanced, advance_all, compute_together
from moechat.errors import MoechatError, StoreDamagedError, UsageError
from moechat.hardware.memory import peak_resident_bytes
from moechat.hub.names import resolve
from moechat.loading import LoadedModel, Progress, load_model, open_store, require_in_place
from moechat.models.assets import load_generation_config, load_tokenizer, stop_tokens
from moechat.models.quiet import no_more_warnings
from moechat.models.sampling import SamplingSettings
from moechat.offload.accelerator import require_gpu
from moechat.offload.expert_map import ExpertMap, RecentUse, read_map
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.offload.upkeep import Replanned
from moechat.options import LoadKeywords, LoadOptions
from moechat.reply_formats.grammar import Grammar
from moechat.sampling_ranges import MOST_SEED
from moechat.steps import MOST_DRAFT, MOST_LOGPROBS, Step
from moechat.store.file_problems import failures_explained
from moechat.store.verified_inputs import verified_inputs
from moechat.tuner import Tuning
from moechat.validation import known_keywords, require_callable, require_known, require_model, require_whole

_DEFAULT_THREADS = _native.num_threads()
# Readers of JSON that know no integers lose digits of larger numbers.
_DRAWN_SEED_BITS = 53
_MOST_TOKENS = 1 << 62
_TUNE_SECONDS = 5.0


class GenerateKeywords(TypedDict, total=False):
    """The options of :meth:`Engine.generate`."""

    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    logprobs: int | None
    grammar: Grammar | None
    draft_tokens: int
    expected: str | None
    reserve: int
    progress: Callable[[int, int], None] | None


def load(
    model: str | Path,
    *,
    offload: OffloadOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
    **options: Unpack[LoadKeywords],
) -> Engine:
    """Load a model. A checkpoint directory is converted to a block store on first use and kept in the
    library.

    Args:
        model: ``demo``, a name from the library, or a directory with a block store or with a transformers
            checkpoint.
        offload: For tests and measurements.
        progress: Called now and then while converting, verifying and loading.
        options: ``bits``, ``device``, ``vram``, ``ram``, ``system``, ``ctx``, ``threads``, ``dtype``,
            ``dense_bits``, ``activation_bits``, ``kv_bits``, ``deterministic``, ``tune``, ``replan_tokens``:
            see :class:`moechat.LoadOptions`. :func:`moechat.plan` takes the same.

    Raises:
        DoesNotFitError: The budget is too small; ``least_bytes`` is one that works. Or the system refuses
            memory, threads or open files.
        MoechatError: See :mod:`moechat.errors`; the subclass tells the cause.
    """
    active_isa()  # raises for a wrong MOECHAT_ISA before anything is read
    parsed = LoadOptions.parse(options)
    offload = offload or OffloadOptions()
    require_model(model)
    require_callable("progress", progress)
    started = time.perf_counter()
    report = progress or (lambda _: None)
    no_more_warnings()
    _native.set_num_threads(parsed.threads or _DEFAULT_THREADS)
    torch.set_num_threads(_native.num_threads())

    # A Path drops "./", after which it could be the name of the demo or of an alias.
    name = str(model.expanduser().absolute()) if isinstance(model, Path) else model
    ref = resolve(name, bits=parsed.bits)
    if parsed.gpu is not None and offload.accelerator is None:
        require_gpu(parsed.gpu)  # before a conversion that may take long
    # What tests give replaces a part of the budget.
    store = open_store(ref, parsed.bits, report, parsed if offload == OffloadOptions() else None)
    with failures_explained(store.path):
        engine = Engine(
            load_model(store, parsed, offload=offload, report=report),
            name=ref.name,
            system="custom" if offload.cache else parsed.system,
            started=started,
            link=offload.link,
        )
    try:
        require_in_place(store)
    except StoreDamagedError:
        engine.close()
        raise
    if parsed.tune:
        engine.tune(progress=report)
    report(Progress("load", 1, 1, "ready"))
    return engine


class Engine:
    """A loaded model. Not safe for use by two threads at once; make one engine a thread.

    A context manager: at its end the memory of experts and conversation is freed.

    Attributes:
        name: As the user named the model.
        context_length: Most tokens of prompt and answer together.
        passes: Runs forward passes; this and the next two are for measurements and tests, and may change.
        decoder: Computes prompts and answers.
        prompts: Tokenises prompts.
    """

    def __init__(
        self, loaded: LoadedModel, *, name: str, system: str, started: float, link: LinkSettings
    ) -> None:
        """Use :func:`load`."""
        plan, path = loaded.plan, loaded.store.path
        self.name = name
        self.context_length = plan.context
        self._system = system
        self._meter = Meter(loaded.near, loaded.counters)
        with verified_inputs(loaded.store) as directory:
            self._generation_config = load_generation_config(directory)
            tokenizer = load_tokenizer(directory, named=path)
        self.passes = PassRunner(name, loaded, self._meter)
        self.decoder = Decoder(
            self.passes,
            self._meter,
            tokenizer=tokenizer,
            stop_tokens=stop_tokens(self._generation_config, loaded.config, tokenizer),
            stats=Stats(
                load_s=time.perf_counter() - started,
                pages=plan.pages,
                page_bytes=plan.page_bytes,
                budget_bytes=plan.budget,
                dense_weights=loaded.form.title,
                kv_bits=loaded.cache.bits,
                kv_bytes=plan.kv,
            ),
        )
        self.prompts = PromptEncoder(
            name,
            tokenizer,
            plan,
            vocabulary=self.decoder.vocabulary,
            on_gpu=loaded.accelerator is not None,
        )
        self._plans = PlanKeeper(self.passes, self.decoder, self.prompts, self._meter, link)

    @property
    def loaded(self) -> LoadedModel:
        """The parts of the model, for measurements and tests."""
        return self.passes.loaded

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The constructor may have failed before the last part.
        if "_plans" in self.__dict__:
            self.close()

    def close(self) -> None:
        """Free the memory of experts, weights and conversation; harmless when repeated.

        Answers under way and later calls that compute end with :class:`MoechatError`.
        """
        near, accelerator = self.loaded.near, self.loaded.accelerator
        if self.loaded.upkeep is not None:
            self.loaded.upkeep.close()
        if self.loaded.check is not None:
            self.loaded.check.close()
        # No local name keeps the model: a GPU's memory is returned only when the weights are gone.
        self.passes.loaded = replace(
            self.loaded, model=None, near=None, parts=(), upkeep=None, decoder=None, mtp=None
        )
        self.loaded.store.release()
        self._meter.close()
        self.decoder.prompt_cache.drop()
        self.decoder.grammars.close()
        if near is None:
            return
        near.close()
        if accelerator is not None:
            with suppress(RuntimeError):  # a GPU that failed before, which was reported then
                accelerator.release()

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be given to :meth:`generate`."""
        return self.prompts.has_chat_template

    @property
    def template_variables(self) -> frozenset[str] | None:
        """Variables that the chat template reads, such as ``enable_thinking``; ``None``: not known."""
        return self.prompts.template_variables

    @property
    def stats(self) -> Stats:
        """Measurements of the last answer."""
        loaded, tuning = self.loaded, self._plans.tuning
        near, upkeep = loaded.near, loaded.upkeep
        stats = replace(
            self.decoder.stats,
            peak_rss_bytes=peak_resident_bytes(),
            tuned="" if tuning is None or tuning.state == "skipped" else tuning.winner,
            tuning=tuning,
        )
        if near is not None:
            stats = replace(stats, plan=near.plan.method)
            if loaded.accelerator is not None:
                stats = replace(stats, pages=near.pages)
        return stats if upkeep is None else replace(stats, replans=upkeep.replans, replan=upkeep.last)

    @property
    def tuning(self) -> Tuning | None:
        """Result of the last :meth:`tune`; ``None`` before."""
        return self._plans.tuning

    @property
    def sampling(self) -> SamplingSettings:
        """The model's own sampling settings, before any override."""
        return SamplingSettings.from_generation_config(self._generation_config)

    def describe(self) -> Description:
        """Facts about the loaded model; ``to_json()`` gives plain values."""
        mapped = self._plans.mapped
        return describe(self.loaded, name=self.name, system=self._system, mapped_by_tuner=mapped)

    def expert_map(self) -> ExpertMap:
        """Where every expert is, and how often it was used; takes well under a millisecond.

        Raises:
            RuntimeError: The engine is closed, or this process is a forked one.
        """
        store = self.loaded.store
        layers = tuple(record.layer for record in store.manifest.layers)
        return read_map(self.loaded.near, layers, store.geometry.num_experts, RecentUse())

    def notices(self) -> list[str]:
        """Sentences for the user since the last call, such as files that could not be used or written."""
        notes, self.passes.notes = self.passes.notes, []
        upkeep, check = self.loaded.upkeep, self.loaded.check
        if check is not None:
            notes += check.take_notes()
        return notes if upkeep is None else notes + upkeep.take_notes()

    # ---- between answers

    def idle(self) -> Replanned | None:
        """Do maintenance while the program waits: before it reads what the user types, say.

        Writes routing statistics to the user's directory, and after every ``replan_tokens`` decoded tokens
        makes a new plan for the experts, as :meth:`replan` does. Takes milliseconds, mostly none. A thread
        goes on to load the experts that were used most into free pages, until the next pass; another one
        verifies files of the store that are due, see :mod:`moechat.store.background_check`.

        Returns:
            The new plan, if one was made.

        Raises:
            MoechatError: Another thread closes the engine at the same time.
        """
        if self.loaded.model is not None and self.loaded.check is not None:
            self.loaded.check.idle()
        return self._plans.maintain(lambda upkeep: upkeep.idle())

    def replan(self) -> Replanned | None:
        """Divide the pages among the layers again, from all that is known now; at once, and no block moves.

        Returns:
            The changes; ``None`` where experts are mapped.

        Raises:
            MoechatError: Another thread closes the engine at the same time, or this process is a forked one.
        """
        return self._plans.maintain(lambda upkeep: upkeep.replan())

    def drop_prompt_cache(self) -> None:
        """Forget the keys and values of the last answer, so that the next prompt is computed as a whole."""
        self.decoder.prompt_cache.drop()

    def save_conversation(self, path: str | Path) -> int:
        """Write the attention cache of the last answer's conversation to a file.

        Args:
            path: The file, which is replaced; about as large as the cache of so many tokens.

        Returns:
            Tokens that were written; 0: there is no conversation, and no file was written.

        Raises:
            UsageError: The model's attention cache has windows or states, or is on a GPU.
            MoechatError: The file cannot be written, or the engine is closed.
        """
        self.passes.usable_model()
        self._require_cache_in_memory()
        held = self.decoder.prompt_cache.latest
        if held is None:
            return 0
        write_conversation(Path(path).expanduser(), held, conversation_key(self.loaded))
        return len(held.tokens)

    def load_conversation(self, path: str | Path) -> int:
        """Read a file of :meth:`save_conversation`: a prompt that goes on from it computes only new tokens.

        Args:
            path: The file.

        Returns:
            Tokens that were read.

        Raises:
            UsageError: It is no such file, or another model or other options have made it.
            MoechatError: It cannot be read, or the engine is closed.
        """
        self.passes.usable_model()
        self._require_cache_in_memory()
        held = read_conversation(
            Path(path).expanduser(),
            self.decoder.new_cache(),
            conversation_key(self.loaded),
            vocabulary=self.decoder.vocabulary,
            context=self.context_length,
        )
        held.capacity = self.context_length
        self.decoder.prompt_cache.add(held)
        return len(held.tokens)

    def _require_cache_in_memory(self) -> None:
        if self.loaded.accelerator is not None:
            raise UsageError(
                "attention caches on a GPU cannot be kept in files", hint="run without --prompt-cache"
            )

    @known_keywords("tuning")
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
            limit_s: Seconds after which no more tokens are begun; 0: take only a remembered choice.
            again: Time even if a choice is remembered.
            may_map: Whether mapping the store may win; ``None``: where no memory budget was given.
            progress: Called with the time that has passed, in milliseconds.

        Returns:
            The choice and its reason; see also :attr:`stats`.

        Raises:
            MoechatError: Experts cannot be read, or the engine is closed.
            UsageError: An option is unknown, or has a wrong value.
            KeyboardInterrupt: Ctrl-C; the computed plan is in effect again.
        """
        return self._plans.tune(limit_s, again=again, may_map=may_map, progress=progress)

    # ---- prompts and answers

    def encode(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a text, or of chat messages through the model's chat template.

        Args:
            prompt: The text or the messages.
            tools: Descriptions of tools for the template, in OpenAI's form.
            template_options: Values for the template, such as ``{"enable_thinking": False}``.

        Raises:
            UsageError: The model has no tokenizer or no chat template, the prompt is empty, or a message is
                malformed.
            PromptTooLongError: A text alone is far longer than the context. Tokenising all of it would take
                minutes and gigabytes, and could not be interrupted.
            UnsupportedModelError: The model's chat template or tokenizer exceeds a limit of time, memory or
                size, or its tokenizer fails on this text.
        """
        return self.prompts.encode(prompt, tools=tools, template_options=template_options)

    def token_text(self, token: int) -> str:
        """One token as text, special ones too, which steps leave out; empty without a tokenizer.

        A token may be a part of a character; then it is a replacement character.

        Raises:
            UsageError: It is no token of the vocabulary.
        """
        return self.prompts.token_text(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token's text; a token may be a part of a character.

        Raises:
            UsageError: It is no token of the vocabulary, or the model has no usable tokenizer.
        """
        token = require_whole("token", token, 0, self.decoder.vocabulary - 1)
        return self.decoder.grammars.token_bytes(token)

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
        self.passes.usable_model()
        return self.decoder.logits(self.prompts.check_ids(tokens, room=0))

    @known_keywords("generating an answer")
    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        draft_tokens: int = MOST_DRAFT,
        expected: str | None = None,
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
            presence_penalty: Subtracted from the logits of tokens that the answer has already.
            frequency_penalty: The same, times how often it has them.
            logit_bias: Numbers from -100 to 100, added to the logits of some token ids.
            seed: Repeats a draw; ``None`` takes a fresh one, found in :attr:`stats`.
            stop: Texts that end the answer; they are no part of it.
            logprobs: Give the probability of each token, and of so many likeliest ones, 0 to 20.
            grammar: What the answer has to look like, see :class:`moechat.Grammar`.
            draft_tokens: Most tokens, 0 to 15, that are guessed from the text so far and verified in one
                pass, where that is expected to be faster; the answer is the same. 0: a pass for each token.
            expected: A text that the answer may repeat, such as a file that it changes: guesses come from it
                too. Of a long one the first tokens count, as many as the context holds.
            reserve: Tokens of the context that the prompt must leave for the answer.
            progress: Called before the first and after each part of the prompt with the tokens computed so
                far (or already cached) and the tokens of the prompt; its own time counts too.

        Returns:
            An iterator of steps. Closing it, or a KeyboardInterrupt inside it, leaves the engine usable.

        Raises:
            PromptTooLongError: Before any work, when the prompt leaves less room than ``reserve``.
            UsageError: A setting is unknown, has the wrong type, or is out of range.
        """
        steps = self.generate_in_turns(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            seed=seed,
            stop=stop,
            logprobs=logprobs,
            grammar=grammar,
            draft_tokens=draft_tokens,
            expected=expected,
            reserve=reserve,
            progress=progress,
        )
        return _tokens_only(steps)

    def generate_in_turns(self, prompt: Prompt, **options: Unpack[GenerateKeywords]) -> Answer:
        """Generate an answer beside others: several such iterators may be advanced in turns.

        Each has an attention cache of its own; ``conversations`` of :class:`moechat.LoadOptions` says how
        many of a whole context the memory budget holds. The tokens are those that each would have alone.
        :attr:`stats` are those of the answer that was advanced last.

        Args:
            prompt: As for :meth:`generate`, and so are options and errors.
            options: See :meth:`generate`.

        Returns:
            As :meth:`generate`, and ``None`` after each pass of the prompt but the last.
        """
        started = time.perf_counter()
        for name in options:
            require_known(name, list(GenerateKeywords.__annotations__), purpose="generating an answer")
        self.passes.usable_model()
        settings = self.sampling.override(
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            min_p=options.get("min_p"),
            repetition_penalty=options.get("repetition_penalty"),
            presence_penalty=options.get("presence_penalty"),
            frequency_penalty=options.get("frequency_penalty"),
        )
        max_new_tokens, logprobs, grammar = (
            options.get("max_new_tokens"),
            options.get("logprobs"),
            options.get("grammar"),
        )
        seed, progress = options.get("seed"), options.get("progress")
        if max_new_tokens is not None:
            max_new_tokens = require_whole("max_new_tokens", max_new_tokens, 1, _MOST_TOKENS)
        require_callable("progress", progress)
        if logprobs is not None:
            logprobs = require_whole("logprobs", logprobs, 0, MOST_LOGPROBS)
        if grammar is not None and not isinstance(grammar, Grammar):
            raise UsageError(
                f"the grammar is of type {type(grammar).__name__}", hint="make one with Grammar.json_schema"
            )
        stops = stop_texts(options.get("stop"))
        bias = token_bias(options.get("logit_bias"), self.decoder.vocabulary)
        draft_tokens = require_whole("draft_tokens", options.get("draft_tokens", MOST_DRAFT), 0, MOST_DRAFT)
        reserve = require_whole("reserve", options.get("reserve", 1), 1, _MOST_TOKENS)
        ids = self.prompts.to_ids(prompt, reserve)
        room = self.context_length - ids.shape[1]
        shipped = getattr(self._generation_config, "max_new_tokens", None)
        limit = max_new_tokens or (shipped if isinstance(shipped, int) and shipped > 0 else room)
        draw_seed = (
            secrets.randbits(_DRAWN_SEED_BITS) if seed is None else require_whole("seed", seed, 0, MOST_SEED)
        )
        return Answer(
            self.decoder,
            ids,
            AnswerSettings(
                min(limit, room),
                settings,
                draw_seed,
                stops,
                logprobs,
                bias,
                None if grammar is None else self.decoder.grammars.begin(grammar),
                draft_tokens,
                self._expected(options.get("expected"), draft_tokens),
            ),
            started=started,
            progress=progress or (lambda _done, _total: None),
        )

    def _expected(self, text: object, draft_tokens: int) -> list[int]:
        if text is not None and not isinstance(text, str):
            raise UsageError(f"expected is of type {type(text).__name__}; it must be a text")
        if not text or not draft_tokens or not self.passes.most_successive:
            return []
        try:
            return self.prompts.beginning(text)
        except MoechatError:  # nothing to guess from is no reason not to answer
            return []

    def compute_together(self, answers: Sequence[Answer]) -> None:
        """Compute what the next items of several answers need, in one pass where possible.

        Weights, and experts that several of them chose, are then read once for all. Call it before the
        answers are advanced; each then draws the token that it would have drawn alone. Answers whose prompt
        is not computed yet are left alone. Of models that the engine does not recognise, and on a GPU, each
        answer computes its own passes.

        Args:
            answers: From :meth:`generate_in_turns` of this engine.

        Raises:
            UsageError: One is there twice, or is another engine's.
            MoechatError: Experts cannot be read, or the engine is closed; the answers of the pass end then.
        """
        self._require_own(answers)
        compute_together(self.decoder, answers)

    def advance_all(self, answers: Sequence[Answer]) -> Iterator[Advanced]:
        """Advance several answers by one token, or one part of the prompt, each.

        Tokens are computed together, see :meth:`compute_together`.

        Args:
            answers: From :meth:`generate_in_turns` of this engine; those that have ended are left out.

        Returns:
            An iterator over what became of each. An error of one, which is in its item, does not end the
            others. If you stop iterating, the answers that were not reached stay as they are.

        Raises:
            UsageError: One is there twice, or is another engine's.
        """
        self._require_own(answers)
        return advance_all(self.decoder, answers)

    def _require_own(self, answers: Sequence[Answer]) -> None:
        if len({id(answer) for answer in answers}) < len(answers):
            raise UsageError("an answer is there twice", hint="give each answer once")
        if any(answer.decoder is not self.decoder for answer in answers):
            raise UsageError(f"an answer is not one of this engine ({self.name})")


def _tokens_only(steps: Answer) -> Iterator[Step]:
    with closing(steps):
        for step in steps:
            if step is not None:
                yield step
