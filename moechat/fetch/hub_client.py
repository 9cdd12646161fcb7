"""Access to the hub through huggingface_hub: HTTP client, URL, token, and the variables that set them."""

from __future__ import annotations

import importlib
import os
import platform
from typing import Any
from urllib.parse import urlsplit

import moechat
from moechat.errors import UsageError

PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def http_library() -> Any:
    """The HTTP library of huggingface_hub: ``httpx``, or ``httpx2`` from version 2 on.

    Transfers raise its errors.

    Raises:
        UsageError: As :func:`session`.
    """
    return importlib.import_module(type(session()).__module__.partition(".")[0])


def session() -> Any:
    """The HTTP client of huggingface_hub.

    Raises:
        UsageError: An environment variable for it is invalid.
    """
    try:
        return hub_utilities().get_session()
    except Exception as problem:  # proxies and certificate files cause many kinds
        named = [name for name in (*PROXY_VARIABLES, *_CERTIFICATE_VARIABLES) if os.environ.get(name)]
        hint = f"check {', '.join(named)}" if named else None
        if isinstance(problem, ImportError):
            hint = "SOCKS proxies need one more package: pip install socksio"
        raise UsageError(f"no connection can be set up: {problem}", hint=hint) from problem


def hub_utilities() -> Any:
    """``huggingface_hub.utils``: session, headers and errors; ``Any``, because its names are lazy."""
    return importlib.import_module("huggingface_hub.utils")


def hub_headers() -> dict[str, str]:
    """Headers of a request to the hub, with the token if there is one.

    Raises:
        UsageError: As :func:`has_token`.
    """
    # Not by build_hf_headers(), which asks the hub for a list of programs first, and reads an answer of any
    # length.
    headers = {"User-Agent": f"moechat/{moechat.__version__}; python/{platform.python_version()}"}
    if has_token():
        from huggingface_hub import get_token

        headers["Authorization"] = f"Bearer {get_token()}"
    return headers


def hub_constants() -> Any:
    """``huggingface_hub.constants``, which it reads from environment variables.

    Raises:
        UsageError: A variable is invalid.
    """
    try:
        return importlib.import_module("huggingface_hub.constants")
    except ValueError as problem:
        raise UsageError(
            f"a variable of the hub has a wrong value: {problem}",
            hint="check the variables that begin with HF_, such as HF_HUB_DOWNLOAD_TIMEOUT",
        ) from problem


def endpoint() -> str:
    """The hub's URL: ``HF_ENDPOINT`` or the public one. It may contain a password.

    Raises:
        UsageError: ``HF_ENDPOINT`` is not a URL.
    """
    address = str(hub_constants().ENDPOINT)
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(
            "HF_ENDPOINT is not an address",
            hint=f"HF_ENDPOINT is {address.rpartition('@')[2]}; an address is like https://huggingface.co",
        )
    return address


def shown_endpoint() -> str:
    """The hub's URL without user name and password, for messages."""
    parts = urlsplit(endpoint())
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def has_token() -> bool:
    """Whether requests carry a token (``HF_TOKEN``, or a saved login).

    Raises:
        UsageError: The token cannot be read, or is invalid.
    """
    endpoint()  # reports invalid variables, on which importing huggingface_hub would fail
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
            "the token for the hub contains characters that no token has",
            hint="copy it again: " + how_to_set_token(),
        )
    return token is not None and not withholds_token()


def withholds_token() -> bool:
    """Whether ``HF_HUB_DISABLE_IMPLICIT_TOKEN`` keeps a token from being sent."""
    endpoint()  # as above
    from huggingface_hub import constants

    return bool(constants.HF_HUB_DISABLE_IMPLICIT_TOKEN)


def how_to_set_token() -> str:
    """A hint on how to set a token."""
    if withholds_token():
        return "unset HF_HUB_DISABLE_IMPLICIT_TOKEN: it keeps any token from being sent"
    return f"create a token at {shown_endpoint()}/settings/tokens and set HF_TOKEN, or run `hf auth login`"


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` forbids the network."""
    return bool(hub_constants().HF_HUB_OFFLINE)


def offline_variable() -> str:
    """The variable that forbids the network."""
    other = "TRANSFORMERS_OFFLINE"
    return other if os.environ.get(other) and not os.environ.get("HF_HUB_OFFLINE") else "HF_HUB_OFFLINE"


def host_name() -> str:
    """The hub's host and port, for messages."""
    return urlsplit(shown_endpoint()).netloc
