"""``moechat doctor``: one report of machine and installation that can be pasted anywhere, and what to do.

Each section is looked into by itself: whatever is broken must not keep the others from being told. Nothing is
measured, nothing is written, and no network is used. The home directory is written as ``~``, and what may be
a secret is not shown.
"""

from __future__ import annotations

import json as jsonlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import moechat
from moechat.cli.page import Page
from moechat.cli.terminal import write_output
from moechat.config import user_paths
from moechat.errors import MoechatError

_PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "huggingface-hub",
    "numpy",
    "safetensors",
    "tokenizers",
    "rich",
)
_VARIABLES = re.compile(
    r"(MOECHAT|HF|CUDA|OMP|MKL)_.*|TRITON_.*|NO_COLOR|TERM|LANG|HTTPS?_PROXY|NO_PROXY", re.I
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CREDENTIAL", re.I)
_USER_IN_ADDRESS = re.compile(r"(\w+://)[^/@\s]+@")
_GIB = 1 << 30
# A small model with its checkpoint's shards on the way.
_LITTLE_DISK = 20 * _GIB
# The smallest known models in 4 bits take about as much.
_LITTLE_MEMORY = 6 * _GIB

Level = Literal["problem", "advice"]


@dataclass(frozen=True)
class Finding:
    """Something that could be better.

    Attributes:
        level: ``problem``: something does not work; ``advice``: it works, but worse than it could.
        fact: What was found, with its numbers.
        hint: What to do.
    """

    level: Level
    fact: str
    hint: str


@dataclass
class Report:
    """What was looked into.

    Attributes:
        sections: Title, then names and values.
        findings: In the order of the sections.
    """

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def problem(self, fact: str, hint: str) -> None:
        """Something does not work."""
        self.findings.append(Finding("problem", fact, hint))

    def advice(self, fact: str, hint: str) -> None:
        """Something could be better."""
        self.findings.append(Finding("advice", fact, hint))


def doctor(*, json: bool) -> int:
    """Print the report; returns the exit status: 0, also where there are problems."""
    redact = Redaction(os.environ)
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
        page.line(f"{finding.level}: {finding.fact}", "bold" if finding.level == "problem" else "")
        page.line(f"  {finding.hint}", "dim")
    write_output(sys.stdout, page.text)
    return 0


class Redaction:
    """Takes out of a text what a stranger need not know: the home directory, and secrets of the environment.

    Args:
        environment: Variables of the process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Longer ones first: one may be a part of another.
        secrets = {value for name, value in environment.items() if _is_secret(name) and len(value) >= 8}
        self._secrets = sorted(secrets, key=len, reverse=True)
        home = os.path.expanduser("~")
        self._home = home if len(home) > 1 else ""

    def __call__(self, text: str) -> str:
        """The text without them."""
        for secret in self._secrets:
            text = text.replace(secret, "(hidden)")
        text = _USER_IN_ADDRESS.sub(r"\1(hidden)@", text)
        return re.sub(rf"{re.escape(self._home)}(?=[/\"\s,:;]|$)", "~", text) if self._home else text

    def report(self, report: Report) -> Report:
        """A report without them."""
        return Report(
            {
                title: {name: self(value) for name, value in rows.items()}
                for title, rows in report.sections.items()
            },
            [Finding(one.level, self(one.fact), self(one.hint)) for one in report.findings],
        )


def _is_secret(variable: str) -> bool:
    # Of ours none is: MOECHAT_MAX_TOKENS is a number.
    return not variable.startswith("MOECHAT_") and _SECRET.search(variable) is not None


def examine() -> Report:
    """Look into everything; never fails."""
    report = Report()
    told: set[str] = set()
    for title, look in _SECTIONS.items():
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


def _installation(report: Report, rows: dict[str, str]) -> None:
    rows["moechat"] = f"{moechat.__version__}, {Path(moechat.__file__).parent}"
    rows["python"] = f"{platform.python_version()}, {sys.executable}"
    rows["system"] = f"{platform.platform()}, {platform.machine()}"
    for name in _PACKAGES:
        rows[name] = _version(name) or "not installed"
    from moechat import _native

    rows["native core"] = f"block format {_native.BLOCK_FORMAT_VERSION}"


def _processor(report: Report, rows: dict[str, str]) -> None:
    from moechat import _native
    from moechat.config import active_isa
    from moechat.hardware.identity import cpu_model

    available = _native.available_isas()
    rows["model"] = cpu_model()
    rows["physical cores"] = f"{_native.available_cores()} may be used"
    rows["kernels"] = f"can run {', '.join(available)}"
    isa = active_isa()
    rows["in use"] = isa
    if isa != available[-1]:
        report.advice(f"MOECHAT_ISA chooses {isa} although {available[-1]} works here", "unset MOECHAT_ISA")
    if available == ["portable"]:
        report.advice(
            "this processor has none of the instruction sets that the kernels are written for",
            "answers will be slow; a processor with AVX2 has been usual since 2015",
        )


def _memory(report: Report, rows: dict[str, str]) -> None:
    import psutil

    from moechat.hardware.measure import huge_pages
    from moechat.hardware.memory import available_bytes, total_bytes

    available = available_bytes()
    rows["in all"] = _size(total_bytes())
    rows["available"] = _size(available)
    rows["swap in use"] = _size(psutil.swap_memory().used)
    setting = huge_pages()
    rows["huge pages"] = setting or "unknown"
    if available < _LITTLE_MEMORY:
        report.advice(
            f"{_size(available)} of memory are available",
            "end other programs; experts that do not fit are read from disk, which is slower",
        )
    if setting == "never":
        report.advice(
            "transparent huge pages are switched off, which costs the kernels up to a tenth",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _card(report: Report, rows: dict[str, str]) -> None:
    from moechat.hardware.gpu import LEAST_CAPABILITY, find_gpus

    found = find_gpus()
    if not found.devices:
        rows["cards"] = f"none: {found.why}"
        return
    rows["driver"] = found.driver or "unknown"
    for device in found.devices:
        capability = device.capability
        rows[f"card {device.index}"] = (
            f"{device.name}, {_size(device.vram_free)} of {_size(device.vram)} free, compute capability "
            f"{'unknown' if capability is None else '.'.join(map(str, capability))}"
        )
        if capability is not None and capability < LEAST_CAPABILITY:
            report.advice(
                f"{device.name} has compute capability {capability[0]}.{capability[1]}",
                "the kernels need 7.5 (Turing) or newer: models run on the CPU",
            )
        if device.lanes and device.lanes_most and device.lanes < device.lanes_most:
            report.advice(
                f"{device.name} runs with {device.lanes} of {device.lanes_most} PCIe lanes",
                "if that does not change under load, another slot makes copies faster",
            )
    import torch

    if torch.version.cuda is None:
        report.problem(
            f"there is a card, but torch {torch.__version__} was built without CUDA",
            "install a build of torch with CUDA, see pytorch.org; until then models run on the CPU",
        )
        return
    rows["torch"] = f"for CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        report.problem(
            "torch finds no card that it can use", "python -c 'import torch; torch.cuda.init()' says why"
        )
    if _version("triton") is None:
        report.problem("Triton, which builds the kernels of a card, is not installed", "pip install triton")
    elif not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        report.problem(
            "Triton finds no C compiler", "install gcc and Python's headers (python3-dev), or set CC"
        )


def _files(report: Report, rows: dict[str, str]) -> None:
    from moechat.hardware.identity import disk_of, existing_parent

    paths = user_paths()
    for name in ("data", "state", "cache", "config"):
        directory: Path = getattr(paths, name)
        rows[name] = str(directory)
        parent = existing_parent(directory)
        if not os.access(parent, os.W_OK):
            report.problem(f"{parent} cannot be written", "change its permissions, or set MOECHAT_HOME")
    disk = disk_of(paths.models)
    free = shutil.disk_usage(existing_parent(paths.models)).free
    rows["disk"] = ", ".join(part for part in (disk.file_system, disk.device) if part) or "unknown"
    rows["free"] = _size(free)
    if free < _LITTLE_DISK:
        report.advice(
            f"{_size(free)} are free on the disk of the library",
            "`moechat rm` removes models; MOECHAT_HOME moves everything to another disk",
        )


def _settings(report: Report, rows: dict[str, str]) -> None:
    from moechat.cli.settings_file import FILE, apply_settings, read_settings

    paths = user_paths()
    rows["file"] = str(paths.config / FILE)
    settings = read_settings(paths)
    if not settings.path.exists():
        rows["file"] += " (there is none)"
    rows |= {name: str(value) for name, value in settings.general.items()}
    for command, values in settings.of.items():
        rows |= {f"{command}: {name}": str(value) for name, value in values.items()}
    import typer

    from moechat.cli.app import app

    apply_settings(typer.main.get_command(app), settings)


def _library(report: Report, rows: dict[str, str]) -> None:
    from moechat.hub.library import list_leftovers, list_stores

    paths = user_paths()
    entries = list_stores(paths)
    for entry in entries:
        rows[entry.title] = "damaged" if entry.damaged else f"{entry.bits} bits, {_size(entry.nbytes)}"
        if entry.damaged:
            report.problem(
                f"the store {entry.path.name} is damaged",
                f"moechat rm {entry.path.name}, then download it again",
            )
    if not entries:
        rows["models"] = "none but the demo"
    left = list_leftovers(paths)
    if left:
        report.advice(
            f"unfinished downloads and conversions take {_size(sum(item.nbytes for item in left))}",
            "they go on with the command that was interrupted; `moechat rm --leftovers` removes them",
        )


def _measurements(report: Report, rows: dict[str, str]) -> None:
    from moechat.hardware.measured_file import load_measured

    notes: list[str] = []
    profile = load_measured(notes.append)
    for note in notes:
        report.advice(note, "moechat profile measures anew")
    if profile is None:
        rows["this machine"] = "not measured"
        report.advice(
            "this machine has not been measured", "`moechat profile` takes half a minute; plans then fit it"
        )
    else:
        rows["this machine"] = f"measured {profile.created[:10]}: {profile.title}"


def _hub(report: Report, rows: dict[str, str]) -> None:
    from moechat.hub.failures import endpoint, has_token, is_offline

    rows["address"] = endpoint()
    rows["token"] = "there is one" if has_token() else "none"
    if is_offline():
        rows["offline"] = "HF_HUB_OFFLINE is set"
        report.advice("HF_HUB_OFFLINE is set: no model can be downloaded", "unset it")


def _environment(report: Report, rows: dict[str, str]) -> None:
    for name in sorted(os.environ):
        if _VARIABLES.fullmatch(name):
            rows[name] = "(hidden)" if _is_secret(name) else os.environ[name]


_SECTIONS: dict[str, Callable[[Report, dict[str, str]], None]] = {
    "moechat": _installation,
    "processor": _processor,
    "memory": _memory,
    "graphics card": _card,
    "files": _files,
    "settings": _settings,
    "library": _library,
    "measurements": _measurements,
    "hub": _hub,
    "environment": _environment,
}


def _version(package: str) -> str | None:
    """Version of an installed package; ``None`` if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _size(nbytes: int) -> str:
    from moechat.cli.progress import format_bytes

    return format_bytes(nbytes)
