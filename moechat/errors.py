"""The exception tree.

Every error that a user can meet derives from :class:`MoechatError` and carries the exit code that the command
line returns for it (DESIGN: 0 ok, 2 usage, 3 model not found or not allowed, 4 does not fit, 5 offline and
not here, 6 store damaged, 7 graphics card lost, 129 hung up, 130 interrupted). ``str(error)`` states the fact
with its numbers; ``error.hint`` the next step.
"""

from __future__ import annotations


class MoechatWarning(RuntimeWarning):
    """Something is slower or smaller than was asked for; the message is one sentence without a period."""


class MoechatError(Exception):
    """Base of all errors that moechat raises on purpose.

    Args:
        message: What happened, with the numbers; one sentence without a trailing period.
        hint: What the user can do about it, or ``None``.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(MoechatError):
    """The request itself is wrong: an unknown option value, bytes that are not UTF-8, an empty prompt."""

    exit_code = 2


class PromptTooLongError(UsageError):
    """The prompt does not fit into the context window."""


class ModelNotFoundError(MoechatError):
    """No such alias, directory or repository."""

    exit_code = 3


class NotInLibraryError(ModelNotFoundError):
    """A name of a hub repository whose store is not on this machine; it can be downloaded."""


class NotAllowedError(MoechatError):
    """The hub does not let us have the model: it is gated or private, or the token is refused."""

    exit_code = 3


class DownloadError(MoechatError):
    """What came from the hub is not what the hub had promised: another size, another hash."""

    exit_code = 3


class UnsupportedModelError(MoechatError):
    """The model is there, but moechat cannot or may not run it: its family, its packing, code of its own."""

    exit_code = 3


class CheckpointError(UnsupportedModelError):
    """A source checkpoint is malformed: bad header, missing tensor, wrong shape."""


class DoesNotFitError(MoechatError):
    """Disk, RAM or VRAM is too small for what was asked.

    Attributes:
        least_bytes: The least memory budget that works, where one would.
    """

    exit_code = 4

    def __init__(self, message: str, *, hint: str | None = None, least_bytes: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.least_bytes = least_bytes


class NoModelError(MoechatError):
    """A chat goes on without a model: another one could not be loaded, nor the one before again."""


class DeviceUnavailableError(UsageError):
    """The device that was asked for is not there, or cannot be used."""


class DeviceLostError(MoechatError):
    """The graphics card failed while it was used: this process can compute nothing on it any more."""

    exit_code = 7


class OfflineError(MoechatError):
    """The network is needed and not available, and the files are not here."""

    exit_code = 5


class StoreDamagedError(MoechatError):
    """A store is truncated, altered or incomplete; it is refused by name before its first use."""

    exit_code = 6


class SessionsUnavailableError(MoechatError):
    """The database of conversations is locked, damaged, of a newer version, or cannot be written."""


class SessionsBusyError(SessionsUnavailableError):
    """Another program has locked the database of conversations."""


class SessionNotFoundError(UsageError):
    """No conversation of that number is kept."""
