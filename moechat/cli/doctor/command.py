"""``moechat doctor``: a report on the machine and the installation, safe to paste, with advice.

Each section is examined on its own, so that a failure leaves the others intact. Nothing is measured or
written, and no network is used. The home directory is written as ``~``, and possible secrets are hidden.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
from typing import TYPE_CHECKING

from moechat.cli.doctor.check_files import file_sections
from moechat.cli.doctor.check_machine import MACHINE
from moechat.cli.doctor.findings import Look, Report
from moechat.cli.doctor.redaction import Redaction, option_variables
from moechat.cli.terminal.consoles import write_output
from moechat.cli.terminal.page import Page
from moechat.errors import MoechatError
from moechat.safe_text import one_line

if TYPE_CHECKING:
    from moechat.cli.lazy_group import LazyGroup


def doctor(commands: LazyGroup, *, json: bool) -> int:
    """Print the report.

    Args:
        commands: All commands of the program, whose options the settings file and variables may set.
        json: Print JSON instead of text.

    Returns:
        The exit status: 0, even if there are problems.
    """
    variables = option_variables(commands)
    redact = Redaction(os.environ, variables)
    report = redact.report(examine({**MACHINE, **file_sections(commands, variables)}))
    if json:
        plain = {
            "sections": report.sections,
            "findings": [vars(finding) for finding in report.findings],
        }
        write_output(sys.stdout, jsonlib.dumps(plain, indent=2, ensure_ascii=False) + "\n")
        return 0
    page = Page()
    for title, rows in report.sections.items():
        page.line(title, "bold")
        page.pairs([(f"  {name}", value) for name, value in rows.items()])
    page.line()
    if not report.findings:
        page.line("nothing to mend was found", "bold")
    for finding in report.findings:
        page.line(one_line(f"{finding.level}: {finding.fact}"), "bold" if finding.level == "problem" else "")
        page.line(one_line(f"  {finding.hint}"), "dim")
    write_output(sys.stdout, page.text)
    return 0


def examine(sections: dict[str, Look]) -> Report:
    """Examine all sections; never fails."""
    report = Report()
    reported: set[str] = set()
    for title, look in sections.items():
        rows = report.sections[title] = {}
        try:
            look(report, rows)
        except MoechatError as error:
            # Several sections may raise the same error.
            if str(error) not in reported:
                report.problem(f"{title}: {error}", error.hint or "this report may help whoever can")
            reported.add(str(error))
        except Exception as error:  # a broken installation may raise anything
            report.problem(f"{title} cannot be examined: {type(error).__name__}: {error}", "see above")
    return report
