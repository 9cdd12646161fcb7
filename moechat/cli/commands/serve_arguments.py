"""The arguments of ``moechat serve``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from moechat.cli.completion.completers import complete_models
from moechat.cli.config.own_names import OwnNames
from moechat.cli.options import ServingOptions
from moechat.cli.parameters import argument, flag, option
from moechat.errors import UsageError
from moechat.serve.settings import DEFAULT_PORT, ServeSettings
from moechat.steps import MOST_DRAFT
from moechat.validation import require_number, require_whole

_HELP = """\
Serve a model to other programs, in the protocols of OpenAI and Anthropic.

Without MODEL, every model of the library can be asked for by name, and is loaded when it is. Only programs \
of this machine can connect; another --host needs a key. Ctrl-C ends the server.

Addresses: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /health, \
/metrics, /moechat/state, /moechat/conversations, and / for a page with a chat, your saved conversations \
and the machine at work.
"""
_EXAMPLES = """\
moechat serve demo

moechat serve qwen3.6 --parallel 4 --port 8000

moechat serve --host 0.0.0.0 --api-key-file key.txt
"""
_MOST_KEY_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ServeCommand(ServingOptions):
    """The arguments of ``moechat serve``.

    Raises:
        UsageError: A value is out of range, a file cannot be read, or two options exclude each other.
    """

    HELP: ClassVar[str] = _HELP
    EXAMPLES: ClassVar[str] = _EXAMPLES

    model: Annotated[str | None, argument("MODEL", "A model or preset, as for run.", complete_models)] = None
    host: Annotated[str, option("ADDRESS", "Address to listen on.")] = ServeSettings.host
    port: Annotated[int, option("PORT", "Port to listen on; 0 takes a free one.")] = DEFAULT_PORT
    api_key_file: Annotated[
        str | None, option("FILE", "Clients must send the key in this file (Authorization: Bearer).")
    ] = None
    origin: Annotated[
        list[str] | None,
        option("ORIGIN", "A web page's origin that may call the server, such as http://localhost:3000."),
    ] = None
    parallel: Annotated[int, option("N", "Answers at a time; more wait.")] = ServeSettings.parallel
    queue: Annotated[int, option("N", "Most requests that wait.")] = ServeSettings.queue
    draft_tokens: Annotated[
        int,
        option("N", "Most tokens that are guessed from the text so far and verified in one pass; 0: none."),
    ] = ServeSettings.draft_tokens
    keep_alive: Annotated[
        float | None,
        option("MINUTES", "Unload the model after so long without requests; never if not given."),
    ] = None
    no_save: Annotated[
        bool,
        flag("The page keeps conversations in its memory only, as with MOECHAT_NO_SAVE=1.", "--no-save"),
    ] = False
    share_history: Annotated[
        bool,
        flag(
            "With another --host: the page shows your saved conversations to everyone who has the key.",
            "--share-history",
        ),
    ] = False
    yes: Annotated[bool, flag("Download the model without asking if it is not here.", "--yes", "-y")] = False
    quiet: Annotated[bool, flag("Only errors.", "--quiet", "-q")] = False
    verbose: Annotated[bool, flag("A line for each request, without its contents.", "--verbose", "-v")] = (
        False
    )

    own: OwnNames = field(default_factory=OwnNames)
    preset: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_causal_system()
        require_whole("--port", self.port, 0, 65535)
        require_whole("--parallel", self.parallel, 1, 64)
        require_whole("--queue", self.queue, 1, 100_000)
        require_whole("--draft-tokens", self.draft_tokens, 0, MOST_DRAFT)
        if self.keep_alive is not None:
            require_number("--keep-alive", self.keep_alive, 0, 1e6)
        if self.parallel > self.load_options.conversations:
            given = self.load_options.conversations
            if given != type(self.load_options).conversations:
                raise UsageError(
                    f"--conversations is {given} and --parallel {self.parallel}",
                    hint="every answer under way needs an attention cache of its own",
                )
        if self.quiet and self.verbose:
            raise UsageError("--quiet and --verbose exclude each other")
        if self.no_save and self.share_history:
            raise UsageError("--no-save and --share-history exclude each other")
        self.settings  # noqa: B018 - checks them

    @property
    def settings(self) -> ServeSettings:
        """Settings of the server, without its key."""
        return ServeSettings(
            host=self.host,
            port=self.port,
            api_key="" if self.api_key_file is None else "in the file",
            origins=tuple(self.origin or ()),
            parallel=self.parallel,
            queue=self.queue,
            draft_tokens=self.draft_tokens,
            keep_alive_s=None if self.keep_alive is None else 60 * self.keep_alive,
        )

    def with_history(self, settings: ServeSettings) -> ServeSettings:
        """Settings with the database of conversations.

        Other people may know the key of a server that other machines reach, so it has none by default.
        """
        if self.no_save or not (settings.is_local or self.share_history):
            return settings
        from moechat.history.session_database import sessions_path  # sqlite takes its time to import

        return replace(settings, history=sessions_path())

    def with_key(self) -> ServeSettings:
        """Settings of the server.

        Raises:
            UsageError: The file with the key cannot be read, or has none.
        """
        if self.api_key_file is None:
            return self.settings
        try:
            with open(Path(self.api_key_file).expanduser(), "rb") as file:
                key = file.read(_MOST_KEY_BYTES + 1).decode("ascii").strip()
        except OSError as error:
            raise UsageError(f"{self.api_key_file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            raise UsageError(f"{self.api_key_file} holds no key: it is not ASCII") from None
        if not key or len(key) > _MOST_KEY_BYTES or any(c.isspace() for c in key):
            raise UsageError(
                f"{self.api_key_file} must hold one key without white space",
                hint="make one: openssl rand -hex 32 > key.txt",
            )
        return replace(self.settings, api_key=key)
