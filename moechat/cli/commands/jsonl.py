"""``moechat run MODEL --jsonl FILE``: an answer to every prompt of a file, a JSON object a line."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from moechat.chat.output import Nowhere
from moechat.chat.reply import Reply, opens_thought
from moechat.chat.settings import Generation
from moechat.cli.counting import Counting
from moechat.cli.options import RunOptions
from moechat.cli.prompts_file import FilePrompt, PromptsFile, read_prompts
from moechat.cli.terminal import print_notice, write_json_line
from moechat.errors import DeviceLostError, MoechatError, StoreDamagedError, UsageError

if TYPE_CHECKING:
    from moechat import Engine

_INTERRUPTED = 128 + signal.SIGINT


def read_many(options: RunOptions) -> PromptsFile:
    """The prompts.

    Raises:
        UsageError: They cannot be read, or ``--completion`` is to continue conversations.
    """
    assert options.jsonl is not None
    file = read_prompts(options.jsonl, "--jsonl", quiet=options.quiet)
    if options.completion:
        for prompt in file.prompts:
            if not prompt.is_plain:
                raise UsageError(
                    f"{options.jsonl}, line {prompt.line}: a conversation cannot be continued as a text",
                    hint="leave --completion out",
                )
    return file


def answer_many(engine: Engine, file: PromptsFile, options: RunOptions) -> int:
    """Answer all prompts, each with an object on stdout as soon as it is done.

    A prompt that cannot be answered (blank, or too long for the context, say) has an ``error`` in its object,
    with the ``answers`` to its turns before that, and leaves the others alone.

    Returns:
        The exit status: 0, that of the first error of a prompt, or 130 after Ctrl-C, whose partial answer
        comes out too.

    Raises:
        StoreDamagedError, DeviceLostError: No answer can come any more.
    """
    status = tokens = failed = 0
    with Counting(len(file.prompts), "answering", "answered", quiet=options.quiet) as counting:
        for number, prompt in enumerate(file.prompts):
            result: dict[str, Any] = {"line": prompt.line, "model": engine.name}
            if prompt.key is not None:
                result["id"] = prompt.key
            named = len(result)
            replies: list[Reply] = []
            interrupted = False
            try:
                _answer(engine, prompt, options, replies)
            except (StoreDamagedError, DeviceLostError):
                raise
            except MoechatError as error:
                result["error"] = str(error)
                if finished := [reply.text for reply in replies if reply.finish_reason]:
                    result["answers"] = finished
                status = status or error.exit_code
                failed += 1
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # what follows is short, and must come out whole
                interrupted = True
                if replies:
                    replies[-1].finish_reason = "interrupted"
            if "error" not in result and (replies or not interrupted):
                result |= _told(replies, engine)
            if len(result) > named:
                write_json_line(sys.stdout, result)
            if interrupted:
                return _INTERRUPTED
            tokens += sum(len(reply.tokens) for reply in replies)
            counting.show(number + 1, tokens)
    if failed and not options.quiet:
        print_notice(f"{failed} of {len(file.prompts)} prompts were not answered; their lines have an error")
    return status


def _answer(engine: Engine, prompt: FilePrompt, options: RunOptions, replies: list[Reply]) -> None:
    if options.completion:
        prompt.require_text(0)
        replies.append(Reply())
        replies[-1].follow(engine.generate(prompt.turns[0], **_settings(prompt, options)), None)
        return
    messages = list(prompt.opening)
    if options.system_prompt is not None and not any(one["role"] == "system" for one in messages):
        messages.insert(0, {"role": "system", "content": options.system_prompt})
    for number, turn in enumerate(prompt.turns):
        prompt.require_text(number)
        messages.append({"role": "user", "content": turn})
        tokens = engine.encode(messages)
        steps = engine.generate(tokens, **_settings(prompt, options))
        replies.append(Reply())
        replies[-1].follow_apart(
            steps,
            Nowhere(),
            Nowhere(),
            thinking=opens_thought(engine, tokens),
            token_text=engine.token_text,
        )
        messages.append({"role": "assistant", "content": replies[-1].text})


def _settings(prompt: FilePrompt, options: RunOptions) -> dict[str, Any]:
    """Those of the command line, or of the prompt's own line where it has them."""
    own = Generation(dict(prompt.settings)).arguments
    return {**options.generation, **own}


def _told(replies: list[Reply], engine: Engine) -> dict[str, Any]:
    """The last answer, as ``--json`` tells it; of several turns all of them."""
    last = replies[-1]
    several = {"answers": [reply.text for reply in replies]} if len(replies) > 1 else {}
    return {
        "text": last.text,
        **several,
        "tokens": last.tokens,
        **({"thinking": last.thinking} if last.thinking else {}),
        "finish_reason": last.finish_reason,
        "statistics": engine.stats.to_json(),
    }
