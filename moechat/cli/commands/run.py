"""``moechat run``: loads a model, then answers a prompt or starts a chat."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moechat.chat.pending_reply import follow_or_load_here, start_reply
from moechat.chat.reply import Reply
from moechat.chat.signals import OneInterrupt, no_more_interrupts, when_continued
from moechat.chat.terminal.answer_view import AnswerDisplay, View
from moechat.chat.terminal.live_map import live_map
from moechat.chat.terminal.output import can_redraw
from moechat.cli.commands.chat_backend import ModelSlot
from moechat.cli.commands.loaded_model import loaded_by_a_server, wait_for_its_end
from moechat.cli.commands.model_choice import ModelChoice, preset_notice
from moechat.cli.commands.prompt_input import read_files, read_prompt
from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.commands.tokenizer_check import require_tokenizer
from moechat.cli.engine_import import import_engine
from moechat.cli.terminal.answer_stats import print_stats, print_tuning
from moechat.cli.terminal.consoles import can_ask, is_animated, print_notice, require_output, write_json_line
from moechat.cli.terminal.load_progress import LoadProgress, format_bytes
from moechat.cli.terminal.map_of_experts import live_lines
from moechat.errors import MoechatError, NoModelError, NotInLibraryError, StoreDamagedError, UsageError
from moechat.fetch.hub_client import is_offline
from moechat.fetch.hub_errors import offline_error
from moechat.history.attachments import attach
from moechat.history.conversation import Conversation, Mark, Turn
from moechat.hub.model_ref import hub_model
from moechat.hub.names import resolve

if TYPE_CHECKING:
    from moechat import Engine, Progress
    from moechat.chat.interfaces import ChatEngine, Models
    from moechat.chat.session_recorder import Recorder

_INTERRUPTED = 128 + signal.SIGINT
# Seconds for timing plans: before a chat, before a single answer, and with --tune.
_TUNE_CHAT_S, _TUNE_ANSWER_S, _TUNE_LONG_S = 5.0, 3.0, 20.0


def run(options: RunOptions) -> int:
    """Run the command.

    Returns:
        The exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    if not options.model and options.remote is None:
        raise UsageError("MODEL is missing", hint="moechat run MODEL, such as moechat run demo")
    if options.dry_run:
        return _dry_run(options)
    # Cheapest checks first: the name, the prompt, the model.
    options = options.with_form()
    absent = options.server is None and _is_absent(options)
    if (notice := preset_notice(options)) is not None and not options.quiet:
        print_notice(notice)
    many = prompt = None
    files = read_files(options.file or ())
    if options.jsonl is not None:
        from moechat.cli.commands.jsonl import read_jsonl_prompts

        many = read_jsonl_prompts(options)
    else:
        prompt = read_prompt(options.prompt, quiet=options.quiet)
        prompt = attach(files, prompt) if prompt is not None else None
        for option, wanted, why in (
            ("--json", options.json, "gives one answer, so it needs a prompt"),
            ("--completion", options.completion, "needs a text to continue"),
        ):
            if prompt is None and wanted:
                raise UsageError(f"{option} {why}", hint="give it as an argument or on stdin")
    require_output()
    if options.watch and not is_animated():
        raise UsageError(
            "--watch draws on the terminal of stderr, and that is none that can move its cursor",
            hint="leave --watch or the redirection of stderr out; /map in the chat prints the map once",
        )
    if absent:
        from moechat.cli.commands.download import download_to_run

        given = options.load_options.given
        if not download_to_run(options.model, given, yes=options.yes, quiet=options.quiet):
            return NotInLibraryError.exit_code
    if many is not None:
        from moechat.cli.commands.jsonl import answer_jsonl

        with _models(ModelChoice(options), chat=False) as models:
            return answer_jsonl(models, many, options)
    if prompt is None:
        return _chat(options, files)
    conversation, recorder = _conversation(options)
    with _models(ModelChoice(options), chat=False) as models:
        try:
            return _answer_once(models, prompt, options, conversation, recorder)
        finally:
            recorder.close()


def _dry_run(options: RunOptions) -> int:
    try:
        resolve(options.model, bits=options.bits)
    except NotInLibraryError:
        from moechat.cli.commands.download import DownloadCommand, download

        given = options.load_options.given
        return download(
            DownloadCommand(options.model, options.bits, dry_run=True, json=options.json, load=given)
        )
    from moechat.cli.commands.plan import plan
    from moechat.cli.commands.plan_arguments import PlanCommand

    return plan(
        PlanCommand(model=options.model, json=options.json, verbose=options.verbose, **options.shared)
    )


def _is_absent(options: RunOptions) -> bool:
    """Whether the model has to be downloaded first, which the user may still decline.

    Raises:
        NotInLibraryError: It has to be downloaded, but there is no terminal to ask the user, and no
            ``--yes``.
        OfflineError: It has to be downloaded, but ``HF_HUB_OFFLINE`` is set.
        ModelNotFoundError: No model has this name.
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


def _chat(options: RunOptions, files: list[tuple[str, str]]) -> int:
    from moechat.chat.repl import Chat
    from moechat.chat.terminal.held_keys import held_keys
    from moechat.chat.terminal.reader import has_editor
    from moechat.cli.commands.chat_backend import StderrStatus
    from moechat.history.session_database import sessions_path

    conversation, _ = _conversation(options)
    choice = ModelChoice(options)
    # Text typed while the model loads becomes the first message.
    with (
        held_keys if has_editor() else nullcontext(),
        _models(choice, chat=True) as models,
    ):
        status = Chat(
            models,
            options.chat,
            StderrStatus(),
            conversation=conversation if options.resumes else None,
            sessions=sessions_path() if options.save else None,
            files=files,
        ).run()
        no_more_interrupts()  # a further Ctrl-C must not interrupt the clean-up
        with suppress(NoModelError):
            _save_conversation(models.engine, choice.current)
        return status


def _conversation(options: RunOptions) -> tuple[Conversation, Recorder]:
    """The resumed or a new conversation, and a recorder for it.

    A single answer is saved only in a resumed conversation.
    """
    from moechat.chat.session_recorder import Recorder, resume_conversation

    def notify(message: str, hint: str | None) -> None:
        print_notice(message if hint is None else f"{message}\n{hint}")

    if not options.resumes:
        return Conversation(system=options.system_prompt), Recorder(None, notify)
    from moechat.history.session_database import sessions_path

    path = sessions_path()
    server = options.server
    name = resolve(options.model, bits=options.bits).name if server is None else server.model
    found = resume_conversation(path, options.chat, name, notify)
    recorder = Recorder(path if options.save else None, notify, once=True)
    return found or Conversation(system=options.system_prompt), recorder


def _models(choice: ModelChoice, *, chat: bool) -> ModelSlot:
    """The model that is ready to answer; a context manager that closes it."""
    models: ModelSlot

    def load(name: str) -> ChatEngine:
        return _ready(choice.options(name), chat=chat)

    def load_here(name: str) -> ChatEngine:
        options = choice.options(name)
        if not options.quiet:
            print_notice(f"the server ended; loading {name} here")
        wait_for_its_end(models.engine)
        return _ready(replace(options, no_daemon=True), chat=chat)

    models = ModelSlot(load, choice.name, choice=choice, load_here=load_here)
    return models


def _ready(options: RunOptions, *, chat: bool) -> ChatEngine:
    """Load the model and tune its plan; or connect to the server that has it."""
    if (server := options.server) is not None:
        from moechat.remote.engine import RemoteEngine

        remote = RemoteEngine(server.url, server.model, key_variable=server.key_variable)
        if options.verbose:
            _describe(remote)
        return remote
    if not (options.no_daemon or options.tune or options.prompt_cache):
        elsewhere = loaded_by_a_server(options)
        if elsewhere is not None:
            _require_template(elsewhere, options)
            if options.verbose:
                _describe(elsewhere)
            return elsewhere
    engine = _load(options)
    try:
        _require_template(engine, options)
        _load_conversation(engine, options)
        _tune(engine, options, chat=chat)
        if options.verbose:
            _describe(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def _require_template(engine: ChatEngine, options: RunOptions) -> None:
    """Refuse a chat with a model that has no template; tell of values that its template does not read."""
    if not options.completion and not engine.has_chat_template:
        raise UsageError(
            f"{engine.name} has no chat template: it was not made for chats",
            hint=f"continue a text instead: moechat run {shlex.quote(options.model)} --completion "
            '"Once upon a time"',
        )
    if not options.quiet:
        for text in options.settings.template.unread(engine.name, engine.template_variables):
            print_notice(text)


def _load_conversation(engine: Engine, options: RunOptions) -> None:
    """Read the file of --prompt-cache, if it exists yet."""
    if options.prompt_cache is None or not os.path.lexists(os.path.expanduser(options.prompt_cache)):
        return
    tokens = engine.load_conversation(options.prompt_cache)
    if options.verbose:
        print_notice(f"{tokens} tokens of a conversation were read from {options.prompt_cache}")


def _save_conversation(engine: ChatEngine, options: RunOptions) -> None:
    """Write the file of --prompt-cache.

    Raises:
        MoechatError: It cannot be written.
    """
    if options.prompt_cache is None:
        return
    from moechat import Engine

    if not isinstance(engine, Engine):
        return
    tokens = engine.save_conversation(options.prompt_cache)
    if options.verbose and tokens:
        print_notice(f"{tokens} tokens of the conversation were written to {options.prompt_cache}")


def _load(options: RunOptions) -> Engine:
    with LoadProgress(quiet=options.quiet) as progress:
        import moechat

        require_tokenizer(options.model, options.bits)
        import_engine()
        return moechat.load(options.model, **options.load_options.given, progress=progress)


def _describe(engine: ChatEngine) -> None:
    for key, value in engine.describe().to_json().items():
        display = format_bytes(value) if key.endswith("_bytes") else value
        print_notice(f"{key.replace('_', ' ')}: {display}")
    for notice in engine.notices():
        print_notice(notice)


def _tune(engine: Engine, options: RunOptions, *, chat: bool) -> None:
    """Apply the plan remembered as fastest; else time plans if ``--tune`` is given or progress is visible.

    Without ``--tune`` this is done for ``auto`` only: a system that the user named is kept as it is.
    """
    if options.tune is False or (options.tune is None and options.system != "auto"):
        return
    visible = sys.stderr.isatty() and not options.quiet and not options.json
    limit = 0.0
    if options.tune:
        limit = _TUNE_LONG_S
    elif visible:
        limit = _TUNE_CHAT_S if chat else _TUNE_ANSWER_S
    # Without timing, or with all experts in memory, this is too short for a progress bar.
    quiet = options.quiet or limit == 0 or not engine.stats.pages
    try:
        with LoadProgress(quiet=quiet) as progress:

            def report(state: Progress) -> None:
                # In a chat Ctrl-C skips the timing; for a single answer it ends the command.
                progress(replace(state, detail="Ctrl-C skips it") if chat else state)

            engine.tune(limit_s=limit, again=bool(options.tune), progress=report)
    except KeyboardInterrupt:
        if not chat:
            raise
        print_notice("(plans were not timed; the computed one is used)")
    except StoreDamagedError:
        raise
    except MoechatError as error:  # for example a disk error, which may be temporary
        print_notice(f"plans were not timed: {error}")
    if engine.tuning is not None and (options.verbose or (options.stats and engine.stats.pages)):
        print_tuning(engine.tuning.to_json())


def _answer_once(
    models: Models, prompt: str, options: RunOptions, conversation: Conversation, recorder: Recorder
) -> int:
    """Answer the prompt, show the answer, and save it with a resumed conversation, even if it is incomplete.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        MoechatError: The answer failed, before or after its first token, or it cannot be written.
    """
    live = None
    if options.watch:
        live = live_map(lambda: models.engine.expert_map(), live_lines, keep=True)
    reply, display = Reply(), AnswerDisplay(_view(options), live)
    mark: Mark = ""
    lost: BaseException | None = None
    with OneInterrupt().watching() as interrupts, when_continued(display.moved):
        try:
            follow_or_load_here(
                models,
                reply,
                display,
                lambda: _follow(models.engine, prompt, options, conversation, reply, display),
            )
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
            display.end()
        except (MoechatError, OSError) as error:
            lost = error
    else:
        display.end_quietly()
    engine = models.engine
    if reply.text and not options.completion:
        conversation.add(Turn(prompt, reply.text, reply.thinking, mark, engine.name, time.time()))
        recorder.keep(conversation)
    if lost is not None:
        raise lost
    _save_conversation(engine, options)
    if options.json:
        _print_json(engine, reply, options)
    if mark == "cut" and not options.quiet:
        print_notice(f"(cut off after {engine.stats.output_tokens} tokens)")
    if options.stats:
        print_stats(engine.stats.to_json())
    return _INTERRUPTED if mark == "stopped" else 0


def _follow(
    engine: ChatEngine,
    prompt: str,
    options: RunOptions,
    conversation: Conversation,
    reply: Reply,
    display: AnswerDisplay,
) -> None:
    if options.completion:
        steps = engine.generate(prompt, progress=display.waiting.progress, **options.generation)
        reply.follow(display.following(steps), display.answer)
        return
    pending = start_reply(engine, conversation, prompt, options.chat.generation, display.waiting.progress)
    if pending.first_sent > conversation.first_sent and not options.quiet:
        with display.waiting.hidden():
            print_notice(f"(the {2 * pending.first_sent} oldest messages were left out)")
    reply.follow_split(
        display.following(pending.steps),
        display.answer,
        display.thoughts,
        thinking=pending.thinking,
        token_text=engine.token_text,
    )


def _view(options: RunOptions) -> View:
    return View(
        answer=not options.json,
        rendered=not (options.raw or options.completion) and can_redraw(sys.stdout),
        thoughts=not (options.hide_thinking or options.quiet or options.json),
        animated=is_animated(),
        waits=not options.quiet,
    )


def _print_json(engine: ChatEngine, reply: Reply, options: RunOptions) -> None:
    result: dict[str, Any] = {
        "model": engine.name,
        "text": reply.text,
        "tokens": reply.tokens,
        **({"logprobs": reply.logprobs_json(engine)} if options.logprobs is not None else {}),
        **({"thinking": reply.thinking} if reply.thinking else {}),
        "finish_reason": reply.finish_reason,
        **({"stop": reply.stop} if reply.stop is not None else {}),
        "statistics": engine.stats.to_json(),
    }
    write_json_line(sys.stdout, result)
