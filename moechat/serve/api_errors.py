"""Errors as clients get them: status, and a body in OpenAI's or Anthropic's form."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from moechat.errors import (
    DoesNotFitError,
    ModelNotFoundError,
    ModelRulesError,
    MoechatError,
    NotAllowedError,
    OfflineError,
    PromptTooLongError,
    SessionNotFoundError,
    SessionsBusyError,
    SessionsUnavailableError,
    StoreDamagedError,
    UnsupportedModelError,
    UsageError,
)
from moechat.serve.jobs import ServerBusyError, ServerClosingError

_RETRY_AFTER_S = 2
_INVALID = "invalid_request_error"
_SERVER = "server_error"


class ApiError(Exception):
    """An answer with an error.

    Args:
        status: Of HTTP.
        message: One or two sentences.
        kind: ``type`` of the error in OpenAI's form.
        code: For programs.
        param: The field of the request that is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body in Anthropic's form."""
        kind = _ANTHROPIC.get(self.status, _INVALID if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        if self.status in (429, 503):
            return {"Retry-After": str(_RETRY_AFTER_S)}
        if self.status in (408, 413, 431):  # what is left of the request is not read
            return {"Connection": "close"}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def response(self, *, anthropic: bool = False) -> JSONResponse:
        """The whole answer."""
        body = self.anthropic_body if anthropic else self.body
        return JSONResponse(body, self.status, self.headers)


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# The first class that fits.
_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (PromptTooLongError, 400, _INVALID, "context_length_exceeded"),
    (ModelNotFoundError, 404, _INVALID, "model_not_found"),
    (SessionNotFoundError, 404, _INVALID, "conversation_not_found"),
    (UsageError, 400, _INVALID, None),
    (SessionsBusyError, 503, _SERVER, "history_busy"),
    (SessionsUnavailableError, 500, _SERVER, "history_unavailable"),
    (ServerBusyError, 429, "rate_limit_error", "queue_full"),
    (ServerClosingError, 503, _SERVER, "shutting_down"),
    (DoesNotFitError, 500, _SERVER, "does_not_fit"),
    (ModelRulesError, 400, _INVALID, "model_rules"),
    (UnsupportedModelError, 500, _SERVER, "model_unsupported"),
    (NotAllowedError, 500, _SERVER, "model_not_allowed"),
    (OfflineError, 500, _SERVER, "offline"),
    (StoreDamagedError, 500, _SERVER, "model_damaged"),
)


def api_error(error: Exception, param: str | None = None) -> ApiError:
    """The answer for an exception of the engine."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, MoechatError):
        # Its text may have paths, or parts of a prompt.
        return ApiError(500, f"unexpected: {type(error).__name__}", kind=_SERVER, code="internal_error")
    text = str(error) if error.hint is None else f"{error}; {error.hint}"
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            return ApiError(status, text, kind=name, code=code, param=param)
    return ApiError(500, text, kind=_SERVER)
