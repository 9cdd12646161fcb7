"""Takes out of a report what a stranger need not know: secrets, and where the home directory is."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from functools import cache

from moechat.cli.doctor_report import Finding, Report
from moechat.cli.settings_file import OWN_VARIABLES, PREFIX, options_of, variable_of

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL", re.I)
_PROXY = re.compile(r"(HTTPS?|ALL)_PROXY", re.I)
_ADDRESS = re.compile(r"(\w[\w+.-]*://)?(.*)@(.*)", re.DOTALL)
# Their beginnings say what they are: of the hub, of other services of models, of GitHub.
_TOKEN = re.compile(r"(?<![A-Za-z0-9])(?:(?:hf|sk|gh[pousr]|github_pat)_\w{8,}|sk-[\w-]{16,})")
# These texts may be long, and a log's: none of this may look at a character again for each one before it. The
# name is looked through once, from a sign that no name has.
_IN_QUERY = re.compile(
    r"([?&;](?=[\w.-]*?(?:token|key|secret|pass|auth|sig|credential))[\w.-]*=)[^&;\s\"']+", re.IGNORECASE
)
_WORD = re.compile(r"[^\s\"'<>]+")
_NAME = re.compile(r"[\w.%+-]+")
_HOST = re.compile(r"@(?=[\w\[])")
# Longer ones only: shorter ones are found in words that are none.
_LEAST_SECRET = 8


class Redaction:
    """Takes out of a text what a stranger need not know: the home directory, and secrets of the environment.

    Args:
        environment: Variables of the process.
        options: Names of variables that give options of ours.
    """

    def __init__(self, environment: Mapping[str, str], options: Collection[str] = ()) -> None:
        secrets = set()
        for name, value in environment.items():
            if _SECRET_NAME.search(name) and is_secret(name, options):
                secrets.add(value)
            elif _PROXY.fullmatch(name) and (parts := _ADDRESS.fullmatch(value)):
                secrets.update((parts[2], parts[2].partition(":")[2]))
        # Longer ones first: one may be a part of another.
        kept = [secret for secret in secrets if len(secret) >= _LEAST_SECRET]
        self._secrets = sorted(kept, key=len, reverse=True)
        home = os.path.expanduser("~")
        homes = sorted({home, os.path.realpath(home)} - {"/", "~"}, key=len, reverse=True)
        # As a whole path, or the beginning of one: not within another, nor of a name that goes on.
        self._home = (
            re.compile(
                rf"(?:(?<=://)|(?<![\w/.~@+-]))(?:{'|'.join(map(re.escape, homes))})(?![\w@+~-]|\.[\w.])"
            )
            if homes
            else None
        )

    def __call__(self, text: str) -> str:
        """The text without them."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        text = _TOKEN.sub(HIDDEN, text)
        text = _IN_QUERY.sub(rf"\1{HIDDEN}", text)
        text = _WORD.sub(_without_user, text)
        return text if self._home is None else self._home.sub("~", text)

    def report(self, report: Report) -> Report:
        """A report without them, in names too."""
        return Report(
            {
                self(title): {self(name): self(value) for name, value in rows.items()}
                for title, rows in report.sections.items()
            },
            [Finding(one.level, self(one.fact), self(one.hint)) for one in report.findings],
        )


def _without_user(match: re.Match[str]) -> str:
    """A word without who logs in, and with what password, in the addresses within it."""
    word = match[0]
    if "@" not in word:
        return word
    # To the last "@": a password may hold "/" and "@" itself.
    scheme, at = word.find("://"), word.rfind("@")
    if 0 <= scheme < at:
        word = f"{word[: scheme + 3]}{HIDDEN}{word[at:]}"
    hosts = [found.start() for found in _HOST.finditer(word)]
    start = _user_before(word, hosts[-1]) if hosts else None
    return word if start is None else f"{word[:start]}{HIDDEN}{word[hosts[-1] :]}"


def _user_before(word: str, at: int) -> int | None:
    """Where ``USER:PASSWORD`` before the sign of a host begins, if there is one."""
    for name in _NAME.finditer(word, 0, at):
        start, end = name.span()
        if end > at - 2 or word[end] != ":" or word.startswith("//", end + 1):
            continue
        if start == 0 or word[start - 1] not in "/:@~":
            return start
        # Within a path, or behind a colon: only what follows a sign that no path has, as in a/b+me:word@host.
        signs = [word.find(sign, start, end - 1) for sign in "%+"]
        if max(signs) >= 0:
            return min(sign for sign in signs if sign >= 0) + 1
    return None


def is_secret(variable: str, options: Collection[str]) -> bool:
    """Whether the value of a variable may be one.

    Args:
        variable: Its name.
        options: Names of variables that give options of ours.
    """
    if variable in OWN_VARIABLES:
        return False
    if variable in options:
        # MOECHAT_MAX_TOKENS is a number; what a model is told first may be anything.
        return variable == variable_of("system-prompt")
    # A name with our prefix that is nothing to us may be meant for anything.
    return variable.startswith(PREFIX) or _SECRET_NAME.search(variable) is not None


def shown_variable(name: str, value: str, options: Collection[str]) -> str:
    """The value of a variable as it may be shown."""
    if is_secret(name, options):
        return HIDDEN
    parts = _ADDRESS.fullmatch(value) if _PROXY.fullmatch(name) else None
    return f"{parts[1] or ''}{HIDDEN}@{parts[3]}" if parts else value


@cache
def option_variables() -> frozenset[str]:
    """Names of variables that give options of ours."""
    from moechat.cli.app import grammar

    commands = grammar().built().values()
    return frozenset(variable_of(option) for command in commands for option in options_of(command))
