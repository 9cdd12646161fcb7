"""What goes wrong between here and the hub, said in our words: one message and one hint for each cause.

No message holds an address with its query (they are signed) or a header (one of them is the token).
"""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moechat.errors import ModelNotFoundError, MoechatError, NotAllowedError, OfflineError, UsageError

_TOKEN_HINT = "create a token at {endpoint}/settings/tokens and set HF_TOKEN, or run `hf auth login`"
_PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def http_library() -> Any:
    """The HTTP client's module that huggingface_hub uses: ``httpx``, or ``httpx2`` from its version 2 on.

    Its exceptions are what comes out of a transfer.
    """
    return importlib.import_module(type(hub_utilities().get_session()).__module__.partition(".")[0])


def hub_utilities() -> Any:
    """``huggingface_hub.utils``: its session, headers and errors; typed loosely, as its names are lazy."""
    return importlib.import_module("huggingface_hub.utils")


def endpoint() -> str:
    """Address of the hub: ``HF_ENDPOINT`` or the public one."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def has_token() -> bool:
    """Whether a token is set for the hub (``HF_TOKEN``, or a saved login)."""
    from huggingface_hub import get_token

    return get_token() is not None


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` forbids the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def offline_error(repository: str, revision: str | None) -> OfflineError:
    """The network is forbidden and the model is not in the library; its checkpoint may be in HF_HOME."""
    cached = _cached_snapshot(repository, revision)
    hint = "unset HF_HUB_OFFLINE, or copy the model's store into the library from another machine"
    if cached is not None:
        hint = f"its checkpoint is in the Hugging Face cache: moechat run {shlex.quote(str(cached))}"
    return OfflineError(
        f"{repository} is not in the library, and HF_HUB_OFFLINE forbids the network", hint=hint
    )


def _cached_snapshot(repository: str, revision: str | None) -> Path | None:
    """Directory of a checkpoint in the cache of huggingface_hub, if it seems whole."""
    from huggingface_hub import try_to_load_from_cache

    found = [
        try_to_load_from_cache(repository, name, revision=revision)
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json")
    ]
    if not isinstance(found[0], str) or not any(isinstance(path, str) for path in found[1:]):
        return None
    return Path(found[0]).parent


@contextmanager
def explained(repository: str, revision: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP client raise in the block into our errors.

    Args:
        repository: ``org/name``, for messages.
        revision: Branch, tag or commit asked for, for messages.

    Raises:
        ModelNotFoundError: No such repository, revision or file.
        NotAllowedError: It is gated, disabled, or the token is refused.
        OfflineError: The hub cannot be reached, does not answer, or has no time for us.
        UsageError: ``HF_ENDPOINT`` is no address.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise offline_error(repository, revision) from None
    except http_library().HTTPError as problem:
        raise _explain(problem, repository, revision) from None  # its text may hold a signed address


def _explain(problem: Any, repository: str, revision: str | None) -> MoechatError:
    from huggingface_hub import errors

    if isinstance(problem, errors.GatedRepoError):
        terms = f"accept the terms at {endpoint()}/{repository}"
        if has_token():
            return NotAllowedError(
                f"{repository} is gated, and your token has no access to it",
                hint=f"{terms} with the account of your token; some makers then have to approve",
            )
        return NotAllowedError(
            f"{repository} is gated: its makers ask who you are, and no token is set",
            hint=f"{terms}, then {_TOKEN_HINT.format(endpoint=endpoint())}",
        )
    if isinstance(problem, errors.RevisionNotFoundError):
        return ModelNotFoundError(
            f"{repository} has no revision {revision}", hint=f"see {endpoint()}/{repository}/commits/main"
        )
    if isinstance(problem, errors.DisabledRepoError):
        return NotAllowedError(f"{repository} has been disabled on the hub", hint="choose another model")
    if isinstance(problem, errors.RepositoryNotFoundError):
        return _no_repository(repository)
    response = getattr(problem, "response", None)
    if response is not None:
        return _explain_status(int(response.status_code), response, repository)
    return _explain_transport(problem)


def _no_repository(repository: str) -> MoechatError:
    if has_token():
        return ModelNotFoundError(
            f"there is no repository {repository} on {_host()}, or your token may not see it",
            hint="check the spelling; for a private repository the token needs read access to it",
        )
    return ModelNotFoundError(
        f"there is no public repository {repository} on {_host()}",
        hint=f"check the spelling; if it is private, {_TOKEN_HINT.format(endpoint=endpoint())}",
    )


def _explain_status(status: int, response: Any, repository: str) -> MoechatError:
    if status == 401:
        if not has_token():
            return _no_repository(repository)
        return NotAllowedError(
            f"{_host()} does not accept the token that is set (status 401)",
            hint="it may have expired: " + _TOKEN_HINT.format(endpoint=endpoint()),
        )
    if status == 403:
        return NotAllowedError(
            f"{_host()} does not allow access to {repository} (status 403)",
            hint="the token needs read access to this repository; a firewall may also answer so",
        )
    if status == 404:
        return ModelNotFoundError(
            f"{_host()} has no such file in {repository} (status 404)",
            hint="the repository may have just changed: run the same command again",
        )
    if status == 429:
        wait = response.headers.get("retry-after", "")
        when = f"in {wait} seconds" if wait.isdigit() else "in a few minutes"
        return OfflineError(
            f"{_host()} refuses more requests for now (status 429)",
            hint=f"run the same command again {when}; with a token (HF_TOKEN) the limits are higher",
        )
    if status == 407:
        return _proxy_error("it asks for a user name and a password (status 407)")
    return OfflineError(
        f"{_host()} failed with status {status}",
        hint="run the same command again later: what has arrived is kept; see https://status.huggingface.co",
    )


def _explain_transport(problem: Any) -> MoechatError:
    library = http_library()
    reason = str(problem) or type(problem).__name__
    if isinstance(problem, library.UnsupportedProtocol):
        return UsageError(
            f"HF_ENDPOINT or a proxy variable is no address: {reason}",
            hint=f"HF_ENDPOINT is {endpoint()}; an address begins with https://",
        )
    if isinstance(problem, library.ProxyError):
        return _proxy_error(reason)
    if isinstance(problem, library.ReadTimeout):
        return OfflineError(
            f"the connection to {_host()} has stalled: nothing came any more",
            hint="check the connection and run the same command again: what has arrived is kept; "
            "HF_HUB_DOWNLOAD_TIMEOUT sets how many seconds of silence are borne",
        )
    if isinstance(problem, library.TimeoutException):
        return OfflineError(
            f"{_host()} does not answer", hint="check the connection and run the same command again"
        )
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return OfflineError(
            f"the certificate of {_host()} cannot be verified",
            hint="where a company's proxy reads along, set SSL_CERT_FILE to its certificates",
        )
    if isinstance(problem, library.ConnectError):
        proxied = any(os.environ.get(name) for name in _PROXY_VARIABLES)
        return OfflineError(
            f"{_host()} cannot be reached: {reason}",
            hint="check the connection"
            + (", and the proxy in HTTPS_PROXY" if proxied else "; behind a proxy set HTTPS_PROXY"),
        )
    return OfflineError(
        f"the connection to {_host()} was lost: {reason}",
        hint="run the same command again: what has arrived is kept",
    )


def _proxy_error(reason: str) -> MoechatError:
    named = next((name for name in _PROXY_VARIABLES if os.environ.get(name)), "HTTPS_PROXY")
    place = urlsplit(os.environ.get(named, "")).hostname  # without user name and password
    shown = f"the proxy {place}" if place else "the proxy"
    return OfflineError(
        f"{shown} does not let us through to {_host()}: {reason}", hint=f"check {named}; unset it to use none"
    )


def _host() -> str:
    return urlsplit(endpoint()).netloc.rpartition("@")[2] or endpoint()
