"""``moechat doctor``: one report of machine and installation that can be pasted anywhere, and what to do.

Each section is looked into by itself: whatever is broken must not keep the others from being told. Nothing is
measured, nothing is written, and no network is used. The home directory is written as ``~``, and what may be
a secret is not shown.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys

from moechat.chat.neutral import one_line
from moechat.cli.doctor_files import FILES
from moechat.cli.doctor_machine import MACHINE
from moechat.cli.doctor_report import Report
from moechat.cli.page import Page
from moechat.cli.redaction import Redaction, option_variables
from moechat.cli.terminal import write_output
from moechat.errors import MoechatError

SECTIONS = {**MACHINE, **FILES}


def doctor(*, json: bool) -> int:
    """Print the report; returns the exit status: 0, also where there are problems."""
    redact = Redaction(os.environ, option_variables())
    report = redact.report(examine())
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


def examine() -> Report:
    """Look into everything; never fails."""
    report = Report()
    told: set[str] = set()
    for title, look in SECTIONS.items():
        rows = report.sections[title] = {}
        try:
            look(report, rows)
        except MoechatError as error:
            # Several sections may meet the same one.
            if str(error) not in told:
                report.problem(f"{title}: {error}", error.hint or "this report may help whoever can")
            told.add(str(error))
        except Exception as error:  # what is broken here is what the report is about
            report.problem(f"{title} cannot be looked into: {type(error).__name__}: {error}", "see above")
    return report
