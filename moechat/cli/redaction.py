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
_IN_QUERY = re.compile(
    r"([?&;][\w.-]*(?:token|key|secret|pass|auth|sig|credential)[\w.-]*=)[^&;\s\"']+", re.IGNORECASE
)
# Greedily: a password may hold "/" and "@" itself.
_USER = re.compile(r"(\w[\w+.-]*://)[^\s\"'<>]*@")
_USER_AND_PASSWORD = re.compile(r"(?<![\w/:.@~-])[\w.%+-]+:(?!//)[^\s\"'<>]+@(?=[\w\[])")
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
        text = _USER.sub(rf"\1{HIDDEN}@", text)
        text = _USER_AND_PASSWORD.sub(f"{HIDDEN}@", text)
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
