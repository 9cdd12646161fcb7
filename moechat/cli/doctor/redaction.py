"""Removes secrets and the home directory from a report."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from moechat.cli.config.settings_file import OWN_VARIABLES, PREFIX, options_of, variable_of
from moechat.cli.doctor.findings import Finding, Report

if TYPE_CHECKING:
    from moechat.cli.lazy_group import LazyGroup

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL", re.I)
_PROXY = re.compile(r"(HTTPS?|ALL)_PROXY", re.I)
_ADDRESS = re.compile(r"(\w[\w+.-]*://)?(.*)@(.*)", re.DOTALL)
# Tokens of the hub, of other model services and of GitHub, recognised by their prefixes.
_TOKEN = re.compile(r"(?<![A-Za-z0-9])(?:(?:hf|sk|gh[pousr]|github_pat)_\w{8,}|sk-[\w-]{16,})")
# Texts may be long logs, so no pattern may take quadratic time. The lookahead scans each name once, starting
# at a separator.
_IN_QUERY = re.compile(
    r"([?&;](?=[\w.-]*?(?:token|key|secret|pass|auth|sig|credential))[\w.-]*=)[^&;\s\"']+", re.IGNORECASE
)
_WORD = re.compile(r"[^\s\"'<>]+")
_NAME = re.compile(r"[\w.%+-]+")
_HOST = re.compile(r"@(?=[\w\[])")
# Shorter values would also match ordinary words.
_LEAST_SECRET = 8


class Redaction:
    """Removes the home directory and secrets of the environment from texts.

    Args:
        environment: Variables of the process.
        options: Names of variables that set our options.
    """

    def __init__(self, environment: Mapping[str, str], options: Collection[str] = ()) -> None:
        secrets = set()
        for name, value in environment.items():
            if _SECRET_NAME.search(name) and is_secret(name, options):
                secrets.add(value)
            elif _PROXY.fullmatch(name) and (parts := _ADDRESS.fullmatch(value)):
                secrets.update((parts[2], parts[2].partition(":")[2]))
        # Longest first: one may be part of another.
        kept = [secret for secret in secrets if len(secret) >= _LEAST_SECRET]
        self._secrets = sorted(kept, key=len, reverse=True)
        home = os.path.expanduser("~")
        homes = sorted({home, os.path.realpath(home)} - {"/", "~"}, key=len, reverse=True)
        # Only as a whole path or the beginning of one: not inside another path or name.
        self._home = (
            re.compile(
                rf"(?:(?<=://)|(?<![\w/.~@+-]))(?:{'|'.join(map(re.escape, homes))})(?![\w@+~-]|\.[\w.])"
            )
            if homes
            else None
        )

    def __call__(self, text: str) -> str:
        """Redact a text."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        text = _TOKEN.sub(HIDDEN, text)
        text = _IN_QUERY.sub(rf"\1{HIDDEN}", text)
        text = _WORD.sub(_without_user, text)
        return text if self._home is None else self._home.sub("~", text)

    def report(self, report: Report) -> Report:
        """Redact all texts of a report."""
        return Report(
            {
                self(title): {self(name): self(value) for name, value in rows.items()}
                for title, rows in report.sections.items()
            },
            [Finding(one.level, self(one.fact), self(one.hint)) for one in report.findings],
        )


def _without_user(match: re.Match[str]) -> str:
    """Hide user name and password in the URLs of a word."""
    word = match[0]
    if "@" not in word:
        return word
    # Up to the last "@": a password may contain "/" and "@".
    scheme, at = word.find("://"), word.rfind("@")
    if 0 <= scheme < at:
        word = f"{word[: scheme + 3]}{HIDDEN}{word[at:]}"
    hosts = [found.start() for found in _HOST.finditer(word)]
    start = _user_before(word, hosts[-1]) if hosts else None
    return word if start is None else f"{word[:start]}{HIDDEN}{word[hosts[-1] :]}"


def _user_before(word: str, at: int) -> int | None:
    """The start of ``USER:PASSWORD`` before the "@" of a host, if there is one."""
    for name in _NAME.finditer(word, 0, at):
        start, end = name.span()
        if end > at - 2 or word[end] != ":" or word.startswith("//", end + 1):
            continue
        if start == 0 or word[start - 1] not in "/:@~":
            return start
        # In a path or after a colon: only the part after a character that paths lack, as in a/b+me:word@host.
        signs = [word.find(sign, start, end - 1) for sign in "%+"]
        if max(signs) >= 0:
            return min(sign for sign in signs if sign >= 0) + 1
    return None


def is_secret(variable: str, options: Collection[str]) -> bool:
    """Whether the value of a variable may be secret.

    Args:
        variable: Its name.
        options: Names of variables that set our options.
    """
    if variable in OWN_VARIABLES and not _SECRET_NAME.search(variable):
        return False
    if variable in options:
        # MOECHAT_MAX_TOKENS is a number, but a system prompt may contain anything.
        return variable == variable_of("system-prompt")
    # An unknown variable with our prefix may contain anything.
    return variable.startswith(PREFIX) or _SECRET_NAME.search(variable) is not None


def shown_variable(name: str, value: str, options: Collection[str]) -> str:
    """The value of a variable, redacted."""
    if is_secret(name, options):
        return HIDDEN
    parts = _ADDRESS.fullmatch(value) if _PROXY.fullmatch(name) else None
    return f"{parts[1] or ''}{HIDDEN}@{parts[3]}" if parts else value


def option_variables(commands: LazyGroup) -> frozenset[str]:
    """Names of the environment variables that set options of the program's commands."""
    return frozenset(
        variable_of(option) for command in commands.built().values() for option in options_of(command)
    )
