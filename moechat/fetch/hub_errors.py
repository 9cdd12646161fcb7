"""Translates errors of the hub and the network: one message and one hint for each cause.

No message contains a URL's query (it may be a signature) or a header (one of them is the token).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moechat.errors import ModelNotFoundError, MoechatError, NotAllowedError, OfflineError
from moechat.fetch.hub_client import (
    PROXY_VARIABLES,
    endpoint,
    has_token,
    host_name,
    how_to_set_token,
    http_library,
    offline_variable,
    shown_endpoint,
)


def offline_error(repository: str, revision: str | None, bits: int | None = None) -> OfflineError:
    """The error for a model that is not in the library while the network is forbidden.

    Its hint names the checkpoint if the cache of huggingface_hub has it.
    """
    with_bits = "" if bits is None else f" with {bits} bits"
    cached = _cached_snapshot(repository, revision)
    hint = f"unset {offline_variable()}, or copy the model's store into the library from another machine"
    if cached is not None:
        hint = f"its checkpoint is in the Hugging Face cache: moechat run {shlex.quote(str(cached))}"
    return OfflineError(
        f"{repository}{with_bits} is not in the library, and {offline_variable()} forbids the network",
        hint=hint,
    )


def _cached_snapshot(repository: str, revision: str | None) -> Path | None:
    """The directory of a checkpoint in the cache of huggingface_hub, if it seems complete."""
    from huggingface_hub import try_to_load_from_cache

    found = [
        try_to_load_from_cache(repository, name, revision=revision)
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json")
    ]
    if not isinstance(found[0], str) or not any(isinstance(path, str) for path in found[1:]):
        return None
    return Path(found[0]).parent


@contextmanager
def translate_hub_errors(repository: str, revision: str | None = None) -> Iterator[None]:
    """Translate errors that huggingface_hub and its HTTP client raise in the block.

    Args:
        repository: ``org/name``, for messages.
        revision: Requested branch, tag or commit, for messages.

    Raises:
        ModelNotFoundError: There is no such repository, revision or file.
        NotAllowedError: The repository is gated or disabled, or the token is rejected.
        OfflineError: The hub cannot be reached, does not answer, or is overloaded.
        UsageError: A variable of the hub or a proxy is invalid.
    """
    endpoint()
    library = http_library()
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise offline_error(repository, revision) from None
    except library.HTTPError as problem:
        raise _explain(problem, repository, revision) from None  # its text may contain a signed URL
    except library.InvalidURL as problem:
        raise _unusable_address(problem) from None


def _explain(problem: Any, repository: str, revision: str | None) -> MoechatError:
    from huggingface_hub import errors

    if isinstance(problem, errors.GatedRepoError):
        terms = f"accept the terms at {shown_endpoint()}/{repository}"
        if has_token():
            return NotAllowedError(
                f"{repository} is gated, and your token has no access to it",
                hint=f"{terms} with the account of your token; some makers then have to approve",
            )
        return NotAllowedError(
            f"{repository} is gated: its makers ask for your name, and no token is sent",
            hint=f"{terms}, then {how_to_set_token()}",
        )
    if isinstance(problem, errors.RevisionNotFoundError):
        return ModelNotFoundError(
            f"{repository} has no revision {revision}",
            hint=f"see {shown_endpoint()}/{repository}/commits/main",
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
            f"there is no repository {repository} on {host_name()}, or your token may not see it",
            hint="check the spelling; for a private repository the token needs read access to it",
        )
    return ModelNotFoundError(
        f"there is no public repository {repository} on {host_name()}",
        hint=f"check the spelling; if it is private, {how_to_set_token()}",
    )


def _explain_status(status: int, response: Any, repository: str) -> MoechatError:
    if status == 401:
        if not has_token():
            return _no_repository(repository)
        return NotAllowedError(
            f"{host_name()} does not accept the token that is set (status 401)",
            hint="it may have expired: " + how_to_set_token(),
        )
    if status == 403:
        return NotAllowedError(
            f"{host_name()} does not allow access to {repository} (status 403)",
            hint="the token needs read access to this repository; a firewall may also answer so",
        )
    if status == 404:
        return ModelNotFoundError(
            f"{host_name()} has no such file in {repository} (status 404)",
            hint="the repository may have just changed: run the same command again",
        )
    if status == 429:
        wait = response.headers.get("retry-after", "")
        when = f"in {wait} seconds" if wait.isdecimal() else "in a few minutes"
        return OfflineError(
            f"{host_name()} refuses more requests for now (status 429)",
            hint=f"run the same command again {when}; with a token (HF_TOKEN) the limits are higher",
        )
    if status == 407:
        return _proxy_error("it asks for a user name and a password (status 407)")
    return OfflineError(
        f"{host_name()} failed with status {status}",
        hint="run the same command again later: what has arrived is kept; see https://status.huggingface.co",
    )


def _explain_transport(problem: Any) -> MoechatError:
    library = http_library()
    reason = str(problem) or type(problem).__name__
    if isinstance(problem, library.UnsupportedProtocol):
        return _unusable_address(problem)
    if isinstance(problem, library.ProxyError):
        return _proxy_error(reason)
    if isinstance(problem, library.ReadTimeout):
        return OfflineError(
            f"the connection to {host_name()} has stalled: no more data arrived",
            hint="check the connection and run the same command again: what has arrived is kept; "
            "HF_HUB_DOWNLOAD_TIMEOUT sets the longest silence in seconds",
        )
    if isinstance(problem, library.TimeoutException):
        return OfflineError(
            f"{host_name()} does not answer", hint="check the connection and run the same command again"
        )
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return OfflineError(
            f"the certificate of {host_name()} cannot be verified",
            hint="behind a proxy that decrypts traffic, set SSL_CERT_FILE to its certificates",
        )
    if isinstance(problem, library.ConnectError):
        proxied = next((name for name in PROXY_VARIABLES if os.environ.get(name)), None)
        return OfflineError(
            f"{host_name()} cannot be reached: {reason}",
            hint=f"check the connection, and the proxy in {proxied}"
            if proxied
            else "check the connection; behind a proxy set HTTPS_PROXY",
        )
    return OfflineError(
        f"the connection to {host_name()} was lost: {reason}",
        hint="run the same command again: what has arrived is kept",
    )


def _unusable_address(problem: Any) -> MoechatError:
    return OfflineError(
        f"{host_name()} redirects to an address that cannot be used: {problem}",
        hint="check HF_ENDPOINT and the proxy variables; else the hub is at fault: try again later",
    )


def _proxy_error(reason: str) -> MoechatError:
    named = next((name for name in PROXY_VARIABLES if os.environ.get(name)), "HTTPS_PROXY")
    place = urlsplit(os.environ.get(named, "")).hostname  # without user name and password
    shown = f"the proxy {place}" if place else "the proxy"
    return OfflineError(
        f"{shown} blocks the connection to {host_name()}: {reason}",
        hint=f"check {named}; unset it to use none",
    )
