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

import moechat
from moechat.errors import ModelNotFoundError, MoechatError, NotAllowedError, OfflineError, UsageError

_PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def http_library() -> Any:
    """The HTTP client's module that huggingface_hub uses: ``httpx``, or ``httpx2`` from its version 2 on.

    Its exceptions are what comes out of a transfer.

    Raises:
        UsageError: As :func:`session`.
    """
    return importlib.import_module(type(session()).__module__.partition(".")[0])


def session() -> Any:
    """The HTTP client of huggingface_hub.

    Raises:
        UsageError: A variable that it is made from makes no sense.
    """
    try:
        return hub_utilities().get_session()
    except Exception as problem:  # whatever a proxy, or a file of certificates, leads it to
        named = [name for name in (*_PROXY_VARIABLES, *_CERTIFICATE_VARIABLES) if os.environ.get(name)]
        hint = f"check {', '.join(named)}" if named else None
        if isinstance(problem, ImportError):
            hint = "SOCKS proxies need one more package: pip install socksio"
        raise UsageError(f"no connection can be set up: {problem}", hint=hint) from problem


def hub_utilities() -> Any:
    """``huggingface_hub.utils``: its session, headers and errors; typed loosely, as its names are lazy."""
    return importlib.import_module("huggingface_hub.utils")


def hub_headers() -> dict[str, str]:
    """Headers of a request to the hub, with the token if there is one.

    Raises:
        UsageError: As :func:`has_token`.
    """
    has_token()
    headers: dict[str, str] = hub_utilities().build_hf_headers(
        library_name="moechat", library_version=moechat.__version__
    )
    return headers


def hub_constants() -> Any:
    """``huggingface_hub.constants``, which come from its variables.

    Raises:
        UsageError: One of them makes no sense.
    """
    try:
        return importlib.import_module("huggingface_hub.constants")
    except ValueError as problem:
        raise UsageError(
            f"a variable of the hub has a wrong value: {problem}",
            hint="check the variables that begin with HF_, such as HF_HUB_DOWNLOAD_TIMEOUT",
        ) from problem


def endpoint() -> str:
    """Address of the hub: ``HF_ENDPOINT`` or the public one; it may hold a password (:func:`shown_endpoint`).

    Raises:
        UsageError: ``HF_ENDPOINT`` is no address.
    """
    address = str(hub_constants().ENDPOINT)
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            "HF_ENDPOINT is no address",
            hint=f"HF_ENDPOINT is {address.rpartition('@')[2]}; an address is like https://huggingface.co",
        )
    return address


def shown_endpoint() -> str:
    """The hub's address without user name and password, for people."""
    parts = urlsplit(endpoint())
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def has_token() -> bool:
    """Whether a token is sent to the hub (``HF_TOKEN``, or a saved login).

    Raises:
        UsageError: It cannot be read, or is none.
    """
    endpoint()  # raises first where a variable makes no sense; huggingface_hub would while it is imported
    from huggingface_hub import get_token

    try:
        token = get_token()
    except (OSError, ValueError) as problem:
        raise UsageError(
            f"the saved token of the hub cannot be read: {problem}",
            hint="check HF_TOKEN_PATH, or set HF_TOKEN",
        ) from problem
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UsageError(
            "the token that is set for the hub holds characters that no token has",
            hint="copy it again: " + _how_to_set_token(),
        )
    return token is not None and not withholds_token()


def withholds_token() -> bool:
    """Whether ``HF_HUB_DISABLE_IMPLICIT_TOKEN`` keeps a token from being sent."""
    endpoint()  # as above
    from huggingface_hub import constants

    return bool(constants.HF_HUB_DISABLE_IMPLICIT_TOKEN)


def _how_to_set_token() -> str:
    if withholds_token():
        return "unset HF_HUB_DISABLE_IMPLICIT_TOKEN: it keeps any token from being sent"
    return f"create a token at {shown_endpoint()}/settings/tokens and set HF_TOKEN, or run `hf auth login`"


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` forbids the network."""
    return bool(hub_constants().HF_HUB_OFFLINE)


def offline_error(repository: str, revision: str | None, bits: int | None = None) -> OfflineError:
    """The network is forbidden and the model is not in the library; its checkpoint may be in HF_HOME."""
    wanted = "" if bits is None else f" with {bits} bits"
    cached = _cached_snapshot(repository, revision)
    hint = f"unset {offline_variable()}, or copy the model's store into the library from another machine"
    if cached is not None:
        hint = f"its checkpoint is in the Hugging Face cache: moechat run {shlex.quote(str(cached))}"
    return OfflineError(
        f"{repository}{wanted} is not in the library, and {offline_variable()} forbids the network",
        hint=hint,
    )


def offline_variable() -> str:
    """Which variable forbids the network."""
    other = "TRANSFORMERS_OFFLINE"
    return other if os.environ.get(other) and not os.environ.get("HF_HUB_OFFLINE") else "HF_HUB_OFFLINE"


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
        UsageError: A variable of the hub or a proxy makes no sense.
    """
    endpoint()
    library = http_library()
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise offline_error(repository, revision) from None
    except library.HTTPError as problem:
        raise _explain(problem, repository, revision) from None  # its text may hold a signed address
    except library.InvalidURL as problem:
        raise _odd_address(problem) from None


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
            f"{repository} is gated: its makers ask who you are, and no token is sent",
            hint=f"{terms}, then {_how_to_set_token()}",
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
            f"there is no repository {repository} on {_host()}, or your token may not see it",
            hint="check the spelling; for a private repository the token needs read access to it",
        )
    return ModelNotFoundError(
        f"there is no public repository {repository} on {_host()}",
        hint=f"check the spelling; if it is private, {_how_to_set_token()}",
    )


def _explain_status(status: int, response: Any, repository: str) -> MoechatError:
    if status == 401:
        if not has_token():
            return _no_repository(repository)
        return NotAllowedError(
            f"{_host()} does not accept the token that is set (status 401)",
            hint="it may have expired: " + _how_to_set_token(),
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
        when = f"in {wait} seconds" if wait.isdecimal() else "in a few minutes"
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
        return _odd_address(problem)
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
        proxied = next((name for name in _PROXY_VARIABLES if os.environ.get(name)), None)
        return OfflineError(
            f"{_host()} cannot be reached: {reason}",
            hint=f"check the connection, and the proxy in {proxied}"
            if proxied
            else "check the connection; behind a proxy set HTTPS_PROXY",
        )
    return OfflineError(
        f"the connection to {_host()} was lost: {reason}",
        hint="run the same command again: what has arrived is kept",
    )


def _odd_address(problem: Any) -> MoechatError:
    return OfflineError(
        f"{_host()} sent us to an address that cannot be used: {problem}",
        hint="check HF_ENDPOINT and the proxy variables; else the hub is at fault: try again later",
    )


def _proxy_error(reason: str) -> MoechatError:
    named = next((name for name in _PROXY_VARIABLES if os.environ.get(name)), "HTTPS_PROXY")
    place = urlsplit(os.environ.get(named, "")).hostname  # without user name and password
    shown = f"the proxy {place}" if place else "the proxy"
    return OfflineError(
        f"{shown} does not let us through to {_host()}: {reason}", hint=f"check {named}; unset it to use none"
    )


def _host() -> str:
    return urlsplit(shown_endpoint()).netloc
