"""``moechat trace``: records the choices of a model's routers over many prompts."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.cli.commands.prompts_file import FilePrompt, Messages, PromptsFile, read_prompts
from moechat.cli.commands.replay_arguments import TraceCommand
from moechat.cli.commands.tokenizer_check import require_tokenizer
from moechat.cli.terminal.consoles import print_notice, require_output, write_output
from moechat.cli.terminal.load_progress import LoadProgress
from moechat.cli.terminal.prompt_progress import PromptProgress, prompts_text
from moechat.errors import MoechatError, PromptTooLongError, UnsupportedModelError, UsageError
from moechat.hub.names import resolve

if TYPE_CHECKING:
    from moechat import Engine
    from moechat.models.router_search import Router
    from moechat.offload.recorder import RoutingRecorder
    from moechat.routing import Trace

_INTERRUPTED = 128 + signal.SIGINT


def trace(command: TraceCommand) -> int:
    """Run the command; a recording that is interrupted or fails is written as far as it got.

    Returns:
        The exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    # Cheapest checks first.
    ref = resolve(command.model, bits=command.bits)
    out = _destination(command.out, ref.name)
    file = read_prompts(command.prompts, quiet=command.quiet)
    wanted = file.prompts[: command.limit]
    if not command.quiet:
        print_notice(_understood(command.prompts, file, len(wanted)))
    require_output()
    engine = _load(command)
    with engine:
        session = _Session(engine, command, wanted)
        try:
            session.run()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the file and the output must be complete
            session.interrupted = True
        except BaseException:
            # The recording before the error may have taken hours.
            if session.recorder.sequences:
                _keep(session.recorder.trace(), out)
                print_notice(
                    f"recorded before the error, in {out}: {prompts_text(session.recorder.sequences)}"
                )
            raise
        recorder = session.recorder
        if not recorder.sequences:
            print_notice("nothing was recorded")
            return _INTERRUPTED
        recorded = recorder.trace()
        _keep(recorded, out)
        result = describe(
            recorded, out, model=engine.name, asked=len(wanted), interrupted=session.interrupted
        )
    result |= {"understood": file.understood, "mode": "chat" if session.chat else "completion"}
    write_output(sys.stdout, json.dumps(result) + "\n" if command.json else render(result))
    if session.interrupted and not command.quiet:
        print_notice(f"interrupted: {recorder.sequences} of {prompts_text(len(wanted))} were recorded")
    return _INTERRUPTED if session.interrupted else 0


def describe(trace: Trace, out: Path, *, model: str, asked: int, interrupted: bool) -> dict[str, Any]:
    """The result as JSON; undefined numbers are ``None``."""
    locality = trace.locality()
    prompts = trace.prompt_lengths
    return {
        "out": str(out),
        "model": model,
        "prompts": trace.sequences,
        "prompts_asked": asked,
        "interrupted": interrupted,
        "tokens": trace.tokens,
        "prompt_tokens": 0 if prompts is None else int(prompts.sum()),
        "layers": trace.layers,
        "experts": trace.num_experts,
        "top_k": trace.top_k,
        "locality": None if math.isnan(locality) else locality,
        "locality_by_chance": trace.top_k / trace.num_experts,
        "entropy_bits": trace.entropy(),
        "most_entropy_bits": math.log2(trace.num_experts),
        "gates": trace.gates is not None,
    }


def render(result: dict[str, Any]) -> str:
    """The result as lines for people."""
    locality = result["locality"]
    same = "unknown" if locality is None else f"{locality:.3f}"
    return (
        f"{result['out']}: {result['tokens']:,} tokens ({result['prompt_tokens']:,} of them prompt) of "
        f"{prompts_text(result['prompts'])}, {result['layers']} layers of {result['experts']} experts, "
        f"{result['top_k']} a token\n"
        f"locality {same} (share of a token's experts that the token before used; "
        f"{result['locality_by_chance']:.3f} by chance)\n"
        f"entropy {result['entropy_bits']:.2f} of {result['most_entropy_bits']:.2f} bits a layer\n"
        + ("with the routers' distributions, and the tokens' embeddings\n" if result["gates"] else "")
    )


class _Session:
    """One recording."""

    def __init__(self, engine: Engine, command: TraceCommand, prompts: Sequence[FilePrompt]) -> None:
        from moechat.offload.recorder import RoutingRecorder

        self._engine = engine
        self._command = command
        self._prompts = prompts
        self.interrupted = False
        self.chat = engine.has_chat_template if command.chat is None else command.chat
        if self.chat and not engine.has_chat_template:
            raise UsageError(
                f"{engine.name} has no chat template: it was not made for chats", hint="leave --chat out"
            )
        loaded = engine.loaded
        recorder = partial(RoutingRecorder, loaded.parts, loaded.store.geometry.num_experts)
        if command.gates:
            recorder = partial(recorder, routers=_routers(engine), embed=loaded.model.get_input_embeddings())
        self.recorder: RoutingRecorder = recorder()

    def run(self) -> None:
        """Record all prompts."""
        first = [self._first_turn(prompt) for prompt in self._prompts]
        with (
            self.recorder.attached(),
            PromptProgress(len(first), "recording", "recorded", quiet=self._command.quiet) as counting,
        ):
            for prompt, tokens in zip(self._prompts, first, strict=True):
                self._record(prompt, tokens, counting)

    def _first_turn(self, prompt: FilePrompt) -> list[int]:
        """Tokens up to the first answer; all prompts are checked before the first one is computed."""
        where = f"{'stdin' if self._command.prompts == '-' else self._command.prompts}, line {prompt.line}"
        if not self.chat and not prompt.is_plain:
            raise UsageError(
                f"{where}: a conversation cannot be continued without a chat template",
                hint="leave --completion out, or use a model that was made for chats",
            )
        try:
            for number in range(len(prompt.turns)):
                prompt.require_text(number)
            tokens = self._encoded(
                [*prompt.opening, _user_message(prompt.turns[0])] if self.chat else prompt.turns[0]
            )
        except UsageError as problem:
            raise UsageError(f"{where}: {problem}", hint=problem.hint) from problem
        if len(tokens) >= self._engine.context_length:
            raise PromptTooLongError(
                f"{where}: the prompt has {len(tokens)} tokens; the context holds "
                f"{self._engine.context_length}, of which 1 for the answer",
                hint="shorten the prompt, or raise the context with --ctx where the model allows it",
            )
        return tokens

    def _encoded(self, prompt: str | Messages) -> list[int]:
        return self._engine.encode(prompt)

    def _record(self, prompt: FilePrompt, tokens: list[int], counting: PromptProgress) -> None:
        """Record one sequence: a text, or all turns of a conversation."""
        engine, recorder = self._engine, self.recorder
        # Tokens reused from the previous sequence would not be routed, so not be recorded.
        engine.drop_prompt_cache()
        conversation = list(prompt.opening)
        known: list[int] = []
        opening = 0
        try:
            for turn, question in enumerate(prompt.turns):
                if turn > 0:
                    tokens = self._encoded([*conversation, _user_message(question)])
                    if len(tokens) >= engine.context_length:
                        print_notice(f"line {prompt.line}: turn {turn + 1} does not fit into the context")
                        return
                before, answer, text = recorder.rows, [], []
                try:
                    for step in engine.generate(
                        tokens,
                        max_new_tokens=self._command.max_tokens,
                        temperature=self._command.temperature,
                        seed=self._command.seed,
                        draft_tokens=0,  # wrong guesses would be recorded
                    ):
                        answer.append(step.token_id)
                        text.append(step.text)
                        counting.show(recorder.sequences, recorder.tokens + recorder.rows)
                finally:
                    with _deferred_interrupt():
                        if recorder.rows > before:
                            reused = engine.stats.reused_tokens
                            recorder.forget(reused, before)
                            known = [*tokens, *answer]
                            opening = opening if reused else len(tokens)
                conversation += [_user_message(question), {"role": "assistant", "content": "".join(text)}]
        finally:
            with _deferred_interrupt():
                recorder.end_sequence(known, opening)


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, so that all layers record the same rows."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


def _routers(engine: Engine) -> list[Router | None]:
    """The routers of the model's expert layers.

    Raises:
        UnsupportedModelError: Not one of them was found.
    """
    from moechat.models.router_search import find_routers

    found = find_routers(engine.loaded.model, engine.loaded.named_parts())
    if not any(found):
        raise UnsupportedModelError(
            f"no router of {engine.name} was found whose choices can be computed again, so there are no "
            "distributions to record",
            hint="leave --gates out: the chosen experts can be recorded",
        )
    return found


def _user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _load(command: TraceCommand) -> Engine:
    with LoadProgress(quiet=command.quiet) as progress:
        import moechat

        require_tokenizer(command.model, command.bits)
        return moechat.load(command.model, **command.load_options.given, progress=progress)


def _destination(out: Path | None, model: str) -> Path:
    """The file to write, checked before hours of recording.

    Raises:
        UsageError: It cannot be written, or it exists and was not named with ``--out``.
    """
    if out is None:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", model).strip("-.") or "model"
        out = Path(f"{name}.trace.npz")
        if out.exists():
            raise UsageError(f"{out} already exists", hint=f"--out {out} replaces it")
    parent = out.parent
    if out.is_dir():
        raise UsageError(f"{out} is a directory")
    if not parent.is_dir():
        raise UsageError(f"there is no directory {parent} for {out.name}")
    if not os.access(out if out.exists() and not out.is_file() else parent, os.W_OK):
        raise UsageError(f"{out} cannot be written: no permission")
    return out


def _keep(trace: Trace, out: Path) -> None:
    try:
        trace.write(out)
    except OSError as problem:
        raise MoechatError(f"{out} cannot be written: {problem.strerror or problem}") from problem


def _understood(path: str, file: PromptsFile, used: int) -> str:
    shown = "stdin" if path == "-" else path
    taken = "" if used == len(file.prompts) else f", the first {used} of them"
    return f"{shown}: {prompts_text(len(file.prompts))}, {file.understood}{taken}"
