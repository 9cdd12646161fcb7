"""``moechat run``: load the model, then one answer or a chat."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moechat.chat.asking import ask
from moechat.chat.conversation import Conversation, Mark, Turn
from moechat.chat.output import can_redraw
from moechat.chat.reply import Reply
from moechat.chat.showing import Showing, View
from moechat.chat.signals import OneInterrupt, no_more_interrupts, when_continued
from moechat.cli.options import RunOptions
from moechat.cli.progress import LoadProgress, format_bytes
from moechat.cli.prompt import read_prompt
from moechat.cli.stats import print_stats, print_tuning
from moechat.cli.terminal import ClosedStream, can_ask, is_animated, print_notice, write_json_line
from moechat.errors import MoechatError, NotInLibraryError, StoreDamagedError, UsageError
from moechat.hub.failures import is_offline, offline_error
from moechat.hub.names import hub_model, resolve

if TYPE_CHECKING:
    from moechat import Engine, Progress
    from moechat.chat.recorder import Recorder

_INTERRUPTED = 128 + signal.SIGINT
# Seconds for timing plans: before a chat, before a single answer, and where it was asked for.
_TUNE_CHAT_S, _TUNE_ANSWER_S, _TUNE_LONG_S = 5.0, 3.0, 20.0


def run(options: RunOptions) -> int:
    """Do what ``moechat run`` was asked for.

    Returns:
        The exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    if options.dry_run:
        return _dry_run(options)
    # In the order of what costs least to find out: the name, the prompt, the model.
    absent = _is_absent(options)
    many = prompt = None
    if options.jsonl is not None:
        from moechat.cli.many import read_many

        many = read_many(options)
    else:
        prompt = read_prompt(options.prompt, quiet=options.quiet)
        for option, wanted, why in (
            ("--json", options.json, "gives one answer, so it needs a prompt"),
            ("--completion", options.completion, "needs a text to continue"),
        ):
            if prompt is None and wanted:
                raise UsageError(f"{option} {why}", hint="give it as an argument or on stdin")
    if isinstance(sys.stdout, ClosedStream):
        raise BrokenPipeError  # nobody would see what takes seconds to begin
    if absent:
        from moechat.cli.download import download_to_run

        if not download_to_run(options.model, options.bits, yes=options.yes, quiet=options.quiet):
            return NotInLibraryError.exit_code
    if many is not None:
        from moechat.cli.many import answer_many

        with closing(_ready(options, chat=False)) as answering:
            return answer_many(answering, many, options)
    if prompt is None:
        return _chat(options)
    conversation, recorder = _conversation(options)
    engine = _ready(options, chat=False)
    try:
        return _answer_once(engine, prompt, options, conversation, recorder)
    finally:
        recorder.close()
        engine.close()


def _dry_run(options: RunOptions) -> int:
    try:
        resolve(options.model, bits=options.bits)
    except NotInLibraryError:
        from moechat.cli.download import DownloadCommand, download

        command = DownloadCommand(options.model, dry_run=True, json=options.json)
        return download(command if options.bits is None else replace(command, bits=options.bits))
    from moechat.cli.plan import PlanCommand, plan

    return plan(
        PlanCommand(
            model=options.model,
            vram=options.vram,
            ram=options.ram,
            ctx=options.ctx,
            bits=options.bits,
            dense_bits=options.dense_bits,
            system=options.system,
            json=options.json,
        )
    )


def _is_absent(options: RunOptions) -> bool:
    """Whether the model is not here but could be fetched, if the user says so now.

    Raises:
        NotInLibraryError: Nobody can be asked, and ``--yes`` was not given.
        OfflineError: ``HF_HUB_OFFLINE`` forbids the network.
        ModelNotFoundError: The name means nothing.
    """
    try:
        resolve(options.model, bits=options.bits)
    except NotInLibraryError as error:
        if is_offline():
            ref = hub_model(options.model)
            raise offline_error(str(ref.repository), ref.revision, options.bits) from None
        if not options.yes and not can_ask():
            error.hint = (
                f"{error.hint}, or --yes with the same command; --dry-run with download shows what it takes"
            )
            raise
        return True
    return False


def _chat(options: RunOptions) -> int:
    from moechat.chat.keys import held_keys
    from moechat.chat.reader import has_editor
    from moechat.chat.repl import Chat
    from moechat.chat.sessions import sessions_path
    from moechat.cli.voice import ConsoleVoice, LoadedModels

    conversation, _ = _conversation(options)
    # What is typed while the model is loaded is the first message.
    with (
        held_keys if has_editor() else nullcontext(),
        LoadedModels(
            lambda name: _ready(replace(options, model=name), chat=True), options.model, options.bits
        ) as models,
    ):
        status = Chat(
            models,
            options.chat,
            ConsoleVoice(),
            conversation=conversation if options.resumes else None,
            sessions=sessions_path() if options.save else None,
        ).run()
        no_more_interrupts()  # impatience must not break the way out
        return status


def _conversation(options: RunOptions) -> tuple[Conversation, Recorder]:
    """The conversation that goes on, or a new one; and what keeps it. Single answers are kept only in one."""
    from moechat.chat.recorder import Recorder, resumed

    def tell(message: str, hint: str | None) -> None:
        print_notice(message if hint is None else f"{message}\n{hint}")

    if not options.resumes:
        return Conversation(system=options.system_prompt), Recorder(None, tell)
    from moechat.chat.sessions import sessions_path

    path = sessions_path()
    found = resumed(path, options.chat, resolve(options.model, bits=options.bits).name, tell)
    recorder = Recorder(path if options.save else None, tell, once=True)
    return found or Conversation(system=options.system_prompt), recorder


def _ready(options: RunOptions, *, chat: bool) -> Engine:
    """The model, loaded and with a plan."""
    engine = _load(options)
    try:
        if not options.completion and not engine.has_chat_template:
            raise UsageError(
                f"{engine.name} has no chat template: it was not made for chats",
                hint='continue a text instead: moechat run MODEL --completion "Once upon a time"',
            )
        _tune(engine, options, chat=chat)
        if options.verbose:
            _describe(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def _load(options: RunOptions) -> Engine:
    with LoadProgress(quiet=options.quiet) as progress:
        import moechat

        return moechat.load(
            options.model,
            device=options.device,
            vram=options.vram,
            ram=options.ram,
            system=options.system,
            bits=options.bits,
            dtype=options.dtype,
            dense_bits=options.dense_bits,
            activation_bits=options.activation_bits,
            deterministic=options.deterministic,
            threads=options.threads,
            ctx=options.ctx,
            progress=progress,
        )


def _describe(engine: Engine) -> None:
    for key, value in engine.describe().items():
        shown = format_bytes(value) if key.endswith("_bytes") else value
        print_notice(f"{key.replace('_', ' ')}: {shown}")
    for notice in engine.notices():
        print_notice(notice)


def _tune(engine: Engine, options: RunOptions, *, chat: bool) -> None:
    """Take the plan that was the fastest, or find it out, where the user can see why it takes so long.

    A named system is what was asked for; only ``auto`` is ours to choose.
    """
    if options.tune is False or (options.tune is None and options.system != "auto"):
        return
    seen = sys.stderr.isatty() and not options.quiet and not options.json
    limit = 0.0
    if options.tune:
        limit = _TUNE_LONG_S
    elif seen:
        limit = _TUNE_CHAT_S if chat else _TUNE_ANSWER_S
    # Nothing to show where nothing can take long.
    quiet = options.quiet or limit == 0 or not engine.stats.pages
    try:
        with LoadProgress(quiet=quiet) as progress:

            def report(state: Progress) -> None:
                # Where one answer is wanted Ctrl-C ends the command.
                progress(replace(state, detail="Ctrl-C skips it") if chat else state)

            engine.tune(limit_s=limit, again=bool(options.tune), progress=report)
    except KeyboardInterrupt:
        if not chat:
            raise
        print_notice("(plans were not timed; the computed one is used)")
    except StoreDamagedError:
        raise
    except MoechatError as error:  # a disk that fails now may work again when a question comes
        print_notice(f"plans were not timed: {error}")
    if engine.tuning is not None and (options.verbose or (options.stats and engine.stats.pages)):
        print_tuning(engine.tuning.to_json())


def _answer_once(
    engine: Engine, prompt: str, options: RunOptions, conversation: Conversation, recorder: Recorder
) -> int:
    """Ask, show the answer, and keep it where it belongs to a conversation, however it ends.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        MoechatError: There is no answer, or it broke off, or it cannot be written.
    """
    reply, shown = Reply(), Showing(_view(options))
    mark: Mark = ""
    lost: BaseException | None = None
    with OneInterrupt().watching() as interrupts, when_continued(shown.answer.moved):
        try:
            _follow(engine, prompt, options, conversation, reply, shown)
            mark = "cut" if reply.finish_reason == "length" else ""
        except KeyboardInterrupt:
            reply.finish_reason, mark = "interrupted", "stopped"
        except Exception as error:
            mark, lost = ("stopped" if isinstance(error, BrokenPipeError) else "failed"), error
        except BaseException as error:  # terminated
            mark, lost = "stopped", error
        interrupts.over()
    no_more_interrupts()
    if lost is None:
        try:
            shown.end()
        except (MoechatError, OSError) as error:
            lost = error
    else:
        shown.end_somehow()
    if reply.text and not options.completion:
        conversation.add(Turn(prompt, reply.text, reply.thinking, mark, engine.name, time.time()))
        recorder.keep(conversation)
    if lost is not None:
        raise lost
    if options.json:
        _print_json(engine, reply)
    if mark == "cut" and not options.quiet:
        print_notice(f"(cut off after {len(reply.tokens)} tokens)")
    if options.stats:
        print_stats(engine.stats.to_json())
    return _INTERRUPTED if mark == "stopped" else 0


def _follow(
    engine: Engine,
    prompt: str,
    options: RunOptions,
    conversation: Conversation,
    reply: Reply,
    shown: Showing,
) -> None:
    shown.waiting.start()
    if options.completion:
        steps = engine.generate(prompt, progress=shown.waiting.progress, **options.generation)
        reply.follow(steps, shown.answer)
        return
    asked = ask(engine, conversation, prompt, options.chat.generation, shown.waiting.progress)
    if asked.told_from > conversation.told_from and not options.quiet:
        with shown.waiting.hidden():
            print_notice(f"(the {2 * asked.told_from} oldest messages were left out)")
    reply.follow_apart(
        asked.steps, shown.answer, shown.thoughts, thinking=asked.thinking, token_text=engine.token_text
    )


def _view(options: RunOptions) -> View:
    return View(
        answer=not options.json,
        rendered=not (options.raw or options.completion) and can_redraw(sys.stdout),
        thoughts=not (options.hide_thinking or options.quiet or options.json),
        animated=is_animated(),
        waits=not options.quiet,
    )


def _print_json(engine: Engine, reply: Reply) -> None:
    result: dict[str, Any] = {
        "model": engine.name,
        "text": reply.text,
        "tokens": reply.tokens,
        **({"thinking": reply.thinking} if reply.thinking else {}),
        "finish_reason": reply.finish_reason,
        "statistics": engine.stats.to_json(),
    }
    write_json_line(sys.stdout, result)
