"""``moechat run MODEL --jsonl FILE``: answers every prompt of a file, one JSON object per line."""

from __future__ import annotations

import difflib
import signal
import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from moechat.chat.chat_options import NAMES, Generation
from moechat.chat.pending_reply import behind_thinking, encode_messages
from moechat.chat.reply import Reply, thought_end
from moechat.chat.terminal.output import NullSink
from moechat.cli.commands.prompts_file import (
    BadLine,
    FilePrompt,
    PromptsFile,
    describe_bad,
    read_prompts,
    refuse_lines,
)
from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.terminal.consoles import print_notice, write_json_line
from moechat.cli.terminal.prompt_progress import PromptProgress
from moechat.errors import DeviceLostError, MoechatError, ServerEndedError, StoreDamagedError, UsageError
from moechat.safe_text import one_line

if TYPE_CHECKING:
    from moechat.chat.interfaces import ChatEngine, Models

_INTERRUPTED = 128 + signal.SIGINT
_MOST_KEYS = 8
# Names of other programs for our settings.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "temp": "temperature",
}


def read_jsonl_prompts(options: RunOptions) -> PromptsFile:
    """Read the prompts, and print notices about lines and keys that cannot be used.

    Raises:
        UsageError: The file cannot be read, or no line of it can be answered.
    """
    assert options.jsonl is not None
    file = read_prompts(options.jsonl, "--jsonl", quiet=options.quiet, keep_bad=True)
    if options.completion:
        file = _only_texts(file)
    if not options.quiet:
        if file.bad:
            print_notice(describe_bad(file.shown, file.bad, len(file.prompts) + len(file.bad)))
        if file.ignored:
            print_notice(_ignored(file.ignored))
    return file


def _only_texts(file: PromptsFile) -> PromptsFile:
    """The file with its conversations, which cannot be continued as texts, among the bad lines."""
    bad = [
        BadLine(
            prompt.line,
            "a conversation cannot be continued as a text",
            hint="run without --completion",
            key=prompt.key,
        )
        for prompt in file.prompts
        if not prompt.is_plain
    ]
    total = len(file.prompts) + len(file.bad)
    plain = [prompt for prompt in file.prompts if prompt.is_plain]
    every = sorted([*file.bad, *bad], key=lambda line: line.line)
    if not plain:
        raise refuse_lines(file.shown, every, total)
    return replace(file, prompts=plain, bad=every)


def _ignored(keys: Mapping[str, int]) -> str:
    named = []
    for key, count in list(keys.items())[:_MOST_KEYS]:
        close = _OTHER_NAMES.get(key) or next(iter(difflib.get_close_matches(key, NAMES, n=1)), None)
        meant = f"; did you mean {close}?" if close else ""
        named.append(f"{one_line(key)[:40]} ({count} line{'s'[: count != 1]}{meant})")
    if len(keys) > _MOST_KEYS:
        named.append(f"and {len(keys) - _MOST_KEYS} more")
    return f"keys without a meaning here are ignored: {', '.join(named)}"


@dataclass(frozen=True)
class _Line:
    """What a line of the file became.

    Attributes:
        result: The object to write; ``None`` if Ctrl-C came before anything was written.
        status: Exit status.
        tokens: Tokens of its answers.
        interrupted: Ctrl-C came.
    """

    result: dict[str, Any] | None
    status: int = 0
    tokens: int = 0
    interrupted: bool = False


def answer_jsonl(models: Models, file: PromptsFile, options: RunOptions) -> int:
    """Answer all prompts, writing an object to stdout after each, in the order of the file.

    The object of a line that is no prompt, or of a prompt that fails (for example, blank or too long), has an
    ``error``, and the ``answers`` to its previous turns. The other prompts are not affected.

    Returns:
        The exit status: 0, that of the first failed line, or 130 after Ctrl-C, which writes the partial
            answer.

    Raises:
        StoreDamagedError, DeviceLostError: No further answer is possible.
    """
    entries: list[FilePrompt | BadLine] = sorted([*file.prompts, *file.bad], key=lambda entry: entry.line)
    if options.remote is None:
        lines = _in_turn(models, entries, options)
    else:
        lines = _side_by_side(models.engine, entries, options)
    status = tokens = failed = 0
    with (
        PromptProgress(len(entries), "answering", "answered", quiet=options.quiet) as progress,
        closing(lines),
    ):
        for number, line in enumerate(lines):
            if line.result is not None:
                write_json_line(sys.stdout, line.result)
            if line.interrupted:
                return _INTERRUPTED
            status = status or line.status
            failed += line.status != 0
            tokens += line.tokens
            progress.show(number + 1, tokens)
    if failed and not options.quiet:
        print_notice(f"{failed} of {len(entries)} prompts were not answered; their lines have an error")
    return status


def _in_turn(
    models: Models, entries: Sequence[FilePrompt | BadLine], options: RunOptions
) -> Generator[_Line, None, None]:
    """Answer the lines one after the other."""
    for entry in entries:
        try:
            line = _answer_line(models.engine, entry, options)
        except ServerEndedError:  # nothing of the line is written yet, so it is answered again
            models.load_here()
            line = _answer_line(models.engine, entry, options)
        yield line


def _side_by_side(
    engine: ChatEngine, entries: Sequence[FilePrompt | BadLine], options: RunOptions
) -> Generator[_Line, None, None]:
    """Answer some lines at a time; the results come in the order of the lines.

    Each thread has an engine of its own, because an engine has the measurements of its last answer.
    """
    from moechat.remote.engine import RemoteEngine

    assert isinstance(engine, RemoteEngine)
    engines: SimpleQueue[RemoteEngine] = SimpleQueue()
    for _ in range(options.concurrency):
        engines.put(engine.beside())

    def answer(entry: FilePrompt | BadLine) -> _Line:
        own = engines.get()
        try:
            return _answer_line(own, entry, options)
        finally:
            engines.put(own)

    pool = ThreadPoolExecutor(options.concurrency)
    # Not all at once: a file may have a million lines.
    ahead: deque[Future[_Line]] = deque()
    try:
        for entry in entries:
            ahead.append(pool.submit(answer, entry))
            if len(ahead) > 2 * options.concurrency:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield _Line(None, interrupted=True)
    finally:
        for future in ahead:
            future.cancel()
        engine.close()  # ends the answers under way
        pool.shutdown(wait=False, cancel_futures=True)


def _answer_line(engine: ChatEngine, entry: FilePrompt | BadLine, options: RunOptions) -> _Line:
    result: dict[str, Any] = {"line": entry.line, "model": engine.name}
    if entry.key is not None:
        result["id"] = entry.key
    named = len(result)
    replies: list[Reply] = []
    interrupted = False
    status = 0
    try:
        if isinstance(entry, BadLine):
            raise UsageError(entry.reason)
        _answer(engine, entry, options, replies)
    except (StoreDamagedError, DeviceLostError, ServerEndedError):
        raise
    except MoechatError as error:
        result["error"] = str(error)
        if finished := [reply.text for reply in replies if reply.finish_reason]:
            result["answers"] = finished
        status = error.exit_code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the remaining output must be complete
        interrupted = True
        if replies:
            replies[-1].finish_reason = "interrupted"
    if "error" not in result and (replies or not interrupted):
        result |= _answer_json(replies, engine, options)
    tokens = sum(len(reply.tokens) for reply in replies)
    return _Line(result if len(result) > named else None, status, tokens, interrupted)


def _answer(engine: ChatEngine, prompt: FilePrompt, options: RunOptions, replies: list[Reply]) -> None:
    if options.completion:
        prompt.require_text(0)
        replies.append(Reply())
        replies[-1].follow(engine.generate(prompt.turns[0], **_settings(prompt, options)), None)
        return
    messages = list(prompt.opening)
    template = options.settings.template
    template = replace(template, given={**template.given, **prompt.template_options})
    if options.system_prompt is not None and not any(one["role"] == "system" for one in messages):
        messages.insert(0, {"role": "system", "content": options.system_prompt})
    for number, turn in enumerate(prompt.turns):
        prompt.require_text(number)
        messages.append({"role": "user", "content": turn})
        tokens = encode_messages(engine, messages, template)
        thought = thought_end(engine, tokens)
        steps = engine.generate(tokens, **behind_thinking(_settings(prompt, options), thought))
        replies.append(Reply())
        replies[-1].follow_split(
            steps,
            NullSink(),
            NullSink(),
            thinking=bool(thought),
            token_text=engine.token_text,
        )
        messages.append({"role": "assistant", "content": replies[-1].text})


def _settings(prompt: FilePrompt, options: RunOptions) -> dict[str, Any]:
    """The settings of the command line, overridden by those of the prompt's line."""
    own = Generation(dict(prompt.settings)).arguments
    if prompt.stop:
        own["stop"] = prompt.stop
    return {**options.generation, **own}


def _answer_json(replies: list[Reply], engine: ChatEngine, options: RunOptions) -> dict[str, Any]:
    """The last answer in the form of ``--json``, and all answers of several turns."""
    last = replies[-1]
    several = {"answers": [reply.text for reply in replies]} if len(replies) > 1 else {}
    return {
        "text": last.text,
        **several,
        "tokens": last.tokens,
        **({"logprobs": last.logprobs_json(engine)} if options.logprobs is not None else {}),
        **({"thinking": last.thinking} if last.thinking else {}),
        "finish_reason": last.finish_reason,
        **({"stop": last.stop} if last.stop is not None else {}),
        "statistics": engine.stats.to_json(),
    }
