"""The arguments of ``moechat run``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar

from moechat.chat.chat_options import NAMES, ChatOptions, Generation, require_setting
from moechat.chat.template_options import TemplateOptions, parse_options
from moechat.cli.commands.answer_form import AnswerForm
from moechat.cli.completion.completers import complete_models, complete_remotes
from moechat.cli.config.own_names import OwnNames
from moechat.cli.config.own_tables import DEFAULT_MODEL, Remote
from moechat.cli.options import PlaceOptions
from moechat.cli.parameters import argument, flag, option
from moechat.errors import UsageError
from moechat.options import LoadOptions, as_flag
from moechat.steps import MOST_DRAFT, MOST_LOGPROBS
from moechat.validation import require_whole

_HELP = """\
Chat with a model; with a prompt or piped stdin: one answer, then exit.

The answer goes to stdout, everything else to stderr. Piped stdin is put before the prompt, with a blank \
line between. A checkpoint directory is converted at its first use, and the result is kept; a model from the \
hub is downloaded after you confirm it.

In a chat /help lists commands and keys; Ctrl-X Ctrl-E writes a message in your editor.
"""
_EXAMPLES = """\
moechat run demo

moechat run demo "Tell me a story about a fox named Mia and a red kite" --max-tokens 200

moechat run ./some-model --ram 2G

moechat run ./some-model "Which animal?" --schema animal.json --json

git diff | moechat run ./some-model "Write a commit message for this change"

moechat run --remote localhost:8000
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions(PlaceOptions):
    """The arguments of ``moechat run``; ``None`` leaves the choice to the model or the engine.

    Raises:
        UsageError: A value is out of range or not UTF-8, or two options exclude each other.
    """

    HELP: ClassVar[str] = _HELP
    EXAMPLES: ClassVar[str] = _EXAMPLES

    model: Annotated[
        str,
        argument(
            "MODEL",
            "'demo', an alias ('mixtral'), org/name\\[@revision], or a directory with a transformers "
            "checkpoint or a block store, or a GGUF file; a preset, or @NAME of a server, of your settings.",
            complete_models,
        ),
    ] = ""
    prompt: Annotated[
        str | None, argument("PROMPT", "One prompt; '-' reads it from stdin. Starts a chat if not given.")
    ] = None
    file: Annotated[
        list[str] | None,
        option(
            "FILE",
            "Send a text file, or the text at a URL, with the prompt or a chat's first message. May be "
            "repeated.",
            None,
            "--file",
            "-f",
        ),
    ] = None
    max_tokens: Annotated[int | None, option("N", "Most tokens of an answer.")] = None
    temperature: Annotated[
        float | None, option("T", "0 is greedy. This and the next four default to the model's own values.")
    ] = None
    top_p: Annotated[float | None, option("P", "Nucleus probability, above 0 to 1.")] = None
    top_k: Annotated[int | None, option("K", "Candidates kept; 0 keeps all.")] = None
    min_p: Annotated[
        float | None, option("P", "Least probability relative to the likeliest token, 0 to 1.")
    ] = None
    repetition_penalty: Annotated[float | None, option("R", "Above 1 discourages repeated tokens.")] = None
    seed: Annotated[int | None, option("N", "Makes sampling reproducible.")] = None
    stop: Annotated[
        list[str] | None, option("TEXT", "End the answer before this text; may be given several times.")
    ] = None
    schema: Annotated[
        str | None, option("FILE", "The answer is JSON that a JSON schema in this file allows.")
    ] = None
    grammar: Annotated[
        str | None,
        option("FILE", "The answer follows the rules in this file: Lark, or GBNF as of llama.cpp."),
    ] = None
    logprobs: Annotated[
        int | None, option("N", "With --json: each token's probability, and the N likeliest, 0 to 20.")
    ] = None
    draft_tokens: Annotated[
        int | None,
        option(
            "N",
            "Most tokens that are guessed from the text so far and verified in one pass; the answer is the "
            f"same. {MOST_DRAFT} if not given; 0: none.",
        ),
    ] = None
    think: Annotated[
        bool | None,
        flag(
            "Let the model think before it answers, or not, where its chat template has a switch for that.",
            "--think/--no-think",
            show_default=False,
        ),
    ] = None
    template_option: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "A value for the chat template, such as reasoning_effort=low; may be given several times.",
        ),
    ] = None
    remote: Annotated[
        str | None,
        option(
            "URL",
            "Let another server answer that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, moechat), or "
            "one of your settings by NAME; MODEL is its name there, the first or the server's own if not "
            "given.",
            complete_remotes,
        ),
    ] = None
    concurrency: Annotated[
        int, option("N", "With --remote and --jsonl: prompts that are answered at a time.")
    ] = 4
    no_daemon: Annotated[
        bool,
        flag(
            "Load the model here, also where a server (`moechat serve`) of yours has it in memory.",
            "--no-daemon",
        ),
    ] = False
    prompt_cache: Annotated[
        str | None,
        option(
            "FILE",
            "Keep the computed conversation in this file, and go on from it: only new tokens are computed.",
        ),
    ] = None
    system_prompt: Annotated[str | None, option("TEXT", "System prompt, before the conversation.")] = None
    completion: Annotated[
        bool, flag("Continue the prompt as it is, without the chat template.", "--completion")
    ] = False
    tune: Annotated[
        bool | None,
        flag(
            "Time a few plans for experts that do not fit (some seconds), or use the computed plan. If "
            "neither is given, plans are timed once for each model and budget, on a terminal.",
            "--tune/--no-tune",
            show_default=False,
        ),
    ] = None
    resume: Annotated[
        bool,
        flag("Continue the last conversation with this model, else the last of any.", "--continue", "-c"),
    ] = False
    session: Annotated[int | None, option("ID", "Continue a conversation listed by `moechat sessions`.")] = (
        None
    )
    no_save: Annotated[
        bool,
        flag("Save neither the conversation nor the input history, as with MOECHAT_NO_SAVE=1.", "--no-save"),
    ] = False
    raw: Annotated[bool, flag("Do not render markdown on a terminal.", "--raw")] = False
    hide_thinking: Annotated[bool, flag("Hide the model's thinking.", "--hide-thinking")] = False
    json: Annotated[
        bool, flag("Print one JSON object: text, tokens, finish reason, statistics.", "--json")
    ] = False
    jsonl: Annotated[
        str | None,
        option(
            "FILE",
            "Answer every prompt of a file with one JSON object a line. The file has one prompt a line, "
            "or JSON lines, which may have an id and settings; '-' is stdin.",
        ),
    ] = None
    stats: Annotated[bool, flag("Show statistics of each answer on stderr.", "--stats")] = False
    watch: Annotated[
        bool,
        flag(
            "Show below the answer where every expert is while it is written, on the terminal of stderr.",
            "--watch",
        ),
    ] = False
    quiet: Annotated[bool, flag("Only the answer, and errors.", "--quiet", "-q")] = False
    verbose: Annotated[bool, flag("Describe the loaded model and its memory.", "--verbose", "-v")] = False
    yes: Annotated[bool, flag("Download the model without asking if it is not here.", "--yes", "-y")] = False
    dry_run: Annotated[
        bool,
        flag(
            "Only show the use of memory, as `moechat plan` does, or the download that is needed.",
            "--dry-run",
        ),
    ] = False
    origins: Mapping[str, str] = field(default_factory=dict)
    own: OwnNames = field(default_factory=OwnNames)
    preset: str = ""
    form: AnswerForm | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_causal_system()
        for name in NAMES:
            require_setting(name, getattr(self, name), as_flag)
        if self.session is not None:
            require_whole("--session", self.session, 1, (1 << 63) - 1)
        _require_utf8("the prompt", self.prompt)
        _require_utf8("the system prompt", self.system_prompt)
        if self.file and self.completion:
            raise UsageError(
                "--completion continues a text; --file sends files with a message",
                hint="give the text on stdin",
            )
        if self.jsonl is not None:
            for option, given in (
                ("a prompt", self.prompt is not None),
                ("--file", bool(self.file)),
                ("--json", self.json),
                ("--continue or --session", self.resumes),
                ("--watch", self.watch),
            ):
                if given:
                    raise UsageError(f"--jsonl answers the prompts of a file; it excludes {option}")
        if self.prompt_cache is not None and (self.jsonl is not None or self.dry_run):
            raise UsageError("--prompt-cache keeps one conversation; it excludes --jsonl and --dry-run")
        if self.completion and self.resumes:
            raise UsageError("--completion continues a text; --continue and --session continue conversations")
        parse_options(self.template_option or ())
        if self.completion and (self.template_option or self.think is not None):
            raise UsageError(
                "--completion uses no chat template; it excludes --template-option, --think and --no-think"
            )
        if self.completion and self.system_prompt is not None:
            raise UsageError(
                "--completion uses no chat template; it excludes --system-prompt",
                hint="put that text at the beginning of the prompt",
            )
        self._check_remote()
        if self.schema is not None and self.grammar is not None:
            raise UsageError("--schema and --grammar exclude each other")
        if self.logprobs is not None:
            require_whole("--logprobs", self.logprobs, 0, MOST_LOGPROBS)
            if not (self.json or self.jsonl is not None):
                raise UsageError("--logprobs are shown by --json and --jsonl only")
        if self.draft_tokens is not None:
            require_whole("--draft-tokens", self.draft_tokens, 0, MOST_DRAFT)
        for text in self.stop or ():
            _require_utf8("--stop", text)
            if not text:
                raise UsageError("--stop is empty; it must be a text")
        if self.quiet and self.verbose:
            raise UsageError("--quiet and --verbose exclude each other")
        if self.quiet and self.watch:
            raise UsageError("--quiet and --watch exclude each other")

    def _check_remote(self) -> None:
        require_whole("--concurrency", self.concurrency, 1, 256)
        if self.remote is None:
            return
        given = [as_flag(name) for name in self.load_options.given if name not in self.origins]
        for name in ("draft_tokens", "grammar", "logprobs", "tune"):
            # A setting of the file is for the models of this machine; a grammar is a part of what is asked.
            kept = name != "grammar" and name in self.origins
            if getattr(self, name) is not None and not kept:
                given.append(as_flag(name))
        if self.dry_run:
            given.append("--dry-run")
        if self.watch:
            given.append("--watch")
        if self.prompt_cache is not None:
            given.append("--prompt-cache")
        if given:
            raise UsageError(
                f"--remote lets another server answer; it excludes {', '.join(given)}",
                hint="that server chooses how it loads its model",
            )

    @property
    def server(self) -> Remote | None:
        """The server that answers, with the name of the model there; ``None`` on this machine.

        Raises:
            UsageError: There is no server of that name.
        """
        if self.remote is None:
            return None
        named = self.own.remote(self.remote) or Remote(self.remote)
        asked = self.model or DEFAULT_MODEL
        return named if asked == DEFAULT_MODEL else replace(named, model=asked)

    def for_model(self, name: str) -> RunOptions:
        """These options for another model: without the preset, if there was one, and with that of the name.

        Args:
            name: A model, a preset, or ``@NAME [MODEL]`` for a server.

        Raises:
            UsageError: The preset or server is malformed.
        """
        plain = {name: value for name, value in self.own.plain.items() if name in _PARAMETERS}
        has = _PARAMETERS - {"model", "prompt"}
        changed, origins = self.own.applied(name, plain, has)
        plain["remote"] = None
        plain["prompt_cache"] = None  # the file is the first model's
        if changed.get("remote") is not None:
            # How a model of this machine is loaded means nothing there.
            loading = {entry.name for entry in fields(LoadOptions)}
            plain |= {entry.name: entry.default for entry in fields(self) if entry.name in loading}
            plain |= {"tune": None, "grammar": None, "logprobs": None, "draft_tokens": None}
        preset = name if name in self.own.settings.presets else ""
        values: dict[str, Any] = {**plain, **changed}
        if values["remote"] is not None and self.form is not None and self.form.kind == "grammar":
            values["form"] = None
        return replace(self, **values, origins={**self.own.origins, **origins}, preset=preset)

    @property
    def resumes(self) -> bool:
        """Whether a saved conversation is continued."""
        return self.resume or self.session is not None

    @property
    def save(self) -> bool:
        """Whether the conversation is saved."""
        return not self.no_save

    @property
    def settings(self) -> Generation:
        """Settings of answers."""
        values = {name: getattr(self, name) for name in NAMES}
        fixed: dict[str, Any] = {}
        if self.stop:
            fixed["stop"] = tuple(self.stop)
        if self.form is not None:
            fixed["grammar"] = self.form.schema if self.remote is not None else self.form.grammar()
        if self.logprobs is not None and self.remote is None:
            fixed["logprobs"] = self.logprobs
        if self.draft_tokens is not None and self.remote is None:
            fixed["draft_tokens"] = self.draft_tokens
        given = {name: value for name, value in values.items() if value is not None}
        template = TemplateOptions(
            parse_options(self.template_option or ()), self.think, origins=self.origins
        )
        return Generation(given, self.origins, fixed=fixed, template=template)

    def with_form(self) -> RunOptions:
        """These options with the file of --schema or --grammar read.

        Raises:
            UsageError: It cannot be read.
        """
        if self.schema is not None:
            return replace(self, form=AnswerForm.read("schema", self.schema))
        if self.grammar is not None:
            return replace(self, form=AnswerForm.read("grammar", self.grammar))
        return self

    @property
    def chat(self) -> ChatOptions:
        """Options of a chat."""
        return ChatOptions(
            generation=self.settings,
            system=self.system_prompt,
            raw=self.raw,
            hide_thinking=self.hide_thinking,
            save=self.save,
            resume=self.resume if self.session is None else self.session,
            stats=self.stats,
            watch=self.watch,
            quiet=self.quiet,
            verbose=self.verbose,
            loading=tuple(
                (as_flag(name)[2:], str(self.shared[name]), self.origins.get(name, "from the command line"))
                for name in self.load_options.given
            ),
        )

    @property
    def generation(self) -> dict[str, Any]:
        """Keyword arguments of the engine's ``generate``."""
        return self.settings.arguments


# The options and arguments of the command.
_PARAMETERS = {entry.name for entry in fields(RunOptions)} - {"origins", "own", "preset", "form"}


def _require_utf8(name: str, text: str | None) -> None:
    """Refuse text whose bytes were not UTF-8; Python represents such bytes as lone surrogates.

    Raises:
        UsageError: There is such a byte; the message gives its position.
    """
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 (character {error.start + 1})",
            hint="convert it first, for example with iconv",
        ) from None
