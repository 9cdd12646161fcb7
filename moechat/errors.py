"""Exception classes.

Every expected error derives from :class:`MoechatError` and carries the exit status that the command line
returns for it: 0 success, 1 unexpected, 2 usage, 3 model not found or not allowed, 4 does not fit, 5 offline
and not cached, 6 store damaged, 7 GPU lost, 8 in use by another program, 9 a file system failed, 129 terminal
closed (SIGHUP), 130 interrupted, 143 terminated.
``str(error)`` states the fact with its numbers; ``error.hint`` gives the next step.
"""

from __future__ import annotations

_FETCH_AGAIN = "fetch the model's files again, all from the same repository and version of the model"
SHORTEN = "shorten the prompt, or raise the context with --ctx where the model allows it"
COPY_AGAIN = "download or copy the file again"  # a hint for a damaged file


def one_line(error: object, most: int = 240) -> str:
    """The beginning of an error's text in one line; those of libraries can be pages long."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[:most]}…"


class MoechatWarning(RuntimeWarning):
    """Something runs slower or smaller than requested; the message is one sentence without a period."""


class MoechatError(Exception):
    """Base class of all errors that moechat raises deliberately.

    Args:
        message: The fact with its numbers; one sentence without a trailing period.
        hint: The user's next step, or ``None``.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(MoechatError):
    """The request is invalid: an unknown option value, bytes that are not UTF-8, an empty prompt."""

    exit_code = 2


class PromptTooLongError(UsageError):
    """The prompt does not fit into the context window."""


def require_room(tokens: int, context: int, reserve: int, hint: str | None = None) -> None:
    """Refuse a prompt that leaves too little of the context.

    Args:
        tokens: Of the prompt.
        context: Tokens of the context.
        reserve: Tokens that the answer needs.
        hint: The user's next step.

    Raises:
        PromptTooLongError: It does.
    """
    if tokens + reserve > context:
        raise PromptTooLongError(
            f"the prompt has {tokens} tokens; the context holds {context}"
            + (f", of which {reserve} for the answer" if reserve else ""),
            hint=hint or SHORTEN,
        )


class ModelNotFoundError(MoechatError):
    """The alias, directory or repository does not exist."""

    exit_code = 3


class NotInLibraryError(ModelNotFoundError):
    """The name is a hub repository without a store on this machine; it can be downloaded."""


class NotAllowedError(MoechatError):
    """The hub denies access to the model: it is gated or private, or the token is rejected."""

    exit_code = 3


class DownloadError(MoechatError):
    """Downloaded data does not match the size or hash that the hub announced."""

    exit_code = 3


class UnsupportedModelError(MoechatError):
    """The model exists, but moechat cannot or may not run it: its family, its packing, its own code."""

    exit_code = 3


class CheckpointError(UnsupportedModelError):
    """A source checkpoint is malformed: bad header, missing tensor, wrong shape.

    Args:
        message: See :class:`MoechatError`; it names the file, and the tensor if it is about one.
        hint: The user's next step; ``None`` advises to fetch the files again.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint or _FETCH_AGAIN)


class ModelRulesError(UnsupportedModelError):
    """A rule that came with the model, its chat template or a part of its tokenizer, is out of bounds.

    Either for any text, or for this one: then others may work, and a chat goes on.
    """


class NotFiniteError(UnsupportedModelError):
    """A model's results are not numbers that a token could be chosen by: its weights are damaged, or its
    values exceed the compute type.
    """


class DoesNotFitError(MoechatError):
    """Disk, RAM or VRAM is too small for the request.

    Attributes:
        least_bytes: The smallest memory budget that works, if there is one.
    """

    exit_code = 4

    def __init__(self, message: str, *, hint: str | None = None, least_bytes: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.least_bytes = least_bytes


class NoModelError(MoechatError):
    """A chat has no model for now: none could be loaded, or the server that had it has ended."""


class ServerEndedError(NoModelError):
    """The server that had the model in memory has ended, or is about to; the model can be loaded here."""


class DeviceUnavailableError(UsageError):
    """The requested device is missing or unusable."""


class DeviceLostError(MoechatError):
    """The GPU failed during use; this process can no longer compute on it."""

    exit_code = 7


class OfflineError(MoechatError):
    """The files are not on this machine and the network is unavailable."""

    exit_code = 5


class StoreDamagedError(MoechatError):
    """A store is truncated, altered or incomplete; the message names the file."""

    exit_code = 6


class StoreReadError(MoechatError):
    """Experts could not be read from the disk, which may pass; the model stays loaded."""

    exit_code = 6


class StoreFormatError(StoreDamagedError):
    """A store has an older format, which is no longer read; where its source is known it is made again."""


class InUseError(MoechatError):
    """Another program uses what is to be changed or removed."""

    exit_code = 8


class StorageError(MoechatError):
    """A file system failed or refused: an input/output error, a directory that cannot be written."""

    exit_code = 9


class SessionsUnavailableError(MoechatError):
    """The conversation database is locked, damaged, of a newer version, or cannot be read or written."""

    exit_code = 9


class SessionsBusyError(SessionsUnavailableError):
    """Another program has locked the conversation database."""

    exit_code = 8


class SessionsFullError(SessionsUnavailableError):
    """The disk of the conversation database is full."""

    exit_code = 4


class SessionNotFoundError(UsageError):
    """No stored conversation has that number."""
