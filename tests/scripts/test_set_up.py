"""The set-up scripts, each in its own clone, over a Python whose `venv` and `pip` only record their calls.

A real set-up takes minutes. These tests check everything around it: missing parts are reported, no step is
repeated, an interrupted set-up is resumed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from places import ROOT

SCRIPTS = ["scripts/setup", "scripts/moechat", "scripts/test", "scripts/check", ".ci/run"]
TOOLS = "bash sh env awk cat chmod cp cut date df du find grep head ln ls mkdir mv readlink rm sed seq"
TOOLS += " sha256sum sleep sort tail touch tr wc xargs"

FAKE_PYTHON = r"""#!/usr/bin/env bash
# Interpreter for tests: real for scripts, a stub for venv, pip and the first start.
case "$1 $2" in
"-m venv")
  echo venv >>"$FAKE_LOG"
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "version = ${FAKE_VERSION:-3.11.7}" >"$3/pyvenv.cfg" ;;
"-m pip")
  [[ $3 == --version ]] && exit 0
  echo "pip ${*:5}" >>"$FAKE_LOG"
  [[ " $* " == *" -e "* ]] && echo "$SKBUILD_CMAKE_DEFINE" >>"$FAKE_LOG.defines"
  [[ " $* " == *" -r "* ]] && cp "${!#}" "$FAKE_LOG.requirements"
  eval "${FAKE_PIP:-}"
  if [[ " $* " == *" -e "* ]]; then
    printf '#!/bin/sh\necho "ran in $PWD with" "$@"\n' >"${0%/*}/moechat" && chmod +x "${0%/*}/moechat"
  fi ;;
*)
  if [[ "$*" == *"import torch"* ]]; then echo try >>"$FAKE_LOG"; eval "${FAKE_TRY:-}"; exit; fi
  exec REAL_PYTHON "$@" ;;
esac
"""


class Clone:
    """A clone with only the files that the set-up reads, and a PATH with only the programs of the test."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "a clone"
        self.tools = directory / "tools"
        self.log = directory / "calls"
        self.log.touch()
        for name in ["pyproject.toml", "scripts/constraints.txt", *SCRIPTS]:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "native" / "src" / "deep").mkdir(parents=True)
        (self.root / "native" / "CMakeLists.txt").write_text("")
        (self.root / "native" / "src" / "deep" / "a.cc").write_text("int a;\n")
        self.tools.mkdir()
        for tool in TOOLS.split():
            found = shutil.which(tool)
            assert found is not None, tool
            (self.tools / tool).symlink_to(found)
        self.put("python3", FAKE_PYTHON.replace("REAL_PYTHON", sys.executable))
        self.put("c++", "#!/bin/sh\nexit 0\n")
        self.put("df", "#!/bin/sh\necho header\necho disk 1 1 99999999 1 /\n")

    def put(self, tool: str, text: str) -> None:
        path = self.tools / tool
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def remove(self, *tools: str) -> None:
        for tool in tools:
            (self.tools / tool).unlink()

    def start(
        self, script: str = "scripts/setup", *arguments: str, **variables: str
    ) -> subprocess.Popen[str]:
        cwd = variables.pop("cwd", "/")
        return subprocess.Popen(
            [str(self.root / script), *arguments],
            env={"PATH": str(self.tools), "FAKE_LOG": str(self.log), "HOME": "/nonexistent", **variables},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str = "scripts/setup", *arguments: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(script, *arguments, **variables)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        """Arguments of the stub Python since the last call of this method."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return lines

    def wait_for_call(self, kind: str = "pip") -> None:
        deadline = time.monotonic() + 20
        while kind not in self.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    @property
    def torch_pin(self) -> str:
        lines = (self.root / "scripts" / "constraints.txt").read_text().splitlines()
        return next(line for line in lines if line.startswith("torch=="))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


STEPS = {
    " venv ": "venv",
    " try ": "try",
    " -e ": "build",
    " cmake ": "tools",
    " -r ": "packages",
    " torch==": "torch",
}


def kinds(calls: list[str]) -> list[str]:
    """The steps of a set-up; the build, which runs beside the installation of packages, after these."""
    steps = [next(step for mark, step in STEPS.items() if mark in f" {call} ") for call in calls]
    return (
        sorted(steps, key=lambda step: step == "try" or (step == "build") / 2) if "build" in steps else steps
    )


FULL = ["venv", "tools", "torch", "packages", "build", "try"]
AGAIN = FULL[1:]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_the_oldest_transformers_is_the_one_that_may_be_installed() -> None:
    lines = (ROOT / "scripts" / "constraints-oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    with (ROOT / "pyproject.toml").open("rb") as file:
        requirements = tomllib.load(file)["project"]["dependencies"]
    (least,) = (each for each in requirements if each.startswith("transformers"))
    version = least.removeprefix("transformers>=").partition(",")[0]
    assert oldest["transformers"].startswith(f"{version}.")


def test_constraints_are_exact_and_name_no_host() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    assert all(line.count("==") == 1 and "+" not in line and "/" not in line for line in lines)
    names = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert {"torch", "transformers", "scikit-build-core", "pybind11", "cmake", "ninja", "setuptools"} <= names


def test_first_use_sets_up_and_the_second_does_nothing(clone: Clone) -> None:
    status, out, err = clone.run()
    assert (status, out) == (0, ""), err
    assert "set up in" in err
    calls = clone.calls()
    assert kinds(calls) == FULL
    assert f"pip --no-compile --no-deps {clone.torch_pin}" in calls
    assert all("-c" in call.split() for call in calls if " cmake " in call or " -r " in call)
    assert clone.run() == (0, "", "")
    assert clone.calls() == []


def test_the_command_gets_the_callers_arguments_and_directory(clone: Clone, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(clone.root / "scripts" / "moechat")
    status, out, err = clone.run("scripts/moechat", "run", "a b", "*", cwd=str(tmp_path))
    assert status == 0
    assert out == f"ran in {tmp_path} with run a b *\n"
    assert "set up in" in err
    by_link = subprocess.run(
        [link, "x"],
        cwd="/",
        capture_output=True,
        text=True,
        env={"PATH": str(clone.tools), "FAKE_LOG": str(clone.log)},
    )
    assert (by_link.returncode, by_link.stdout, by_link.stderr) == (0, "ran in / with x\n", "")


def test_a_script_is_found_from_its_own_directory(clone: Clone) -> None:
    clone.run()
    for arguments, cwd in (
        (["bash", "setup"], "scripts"),
        (["bash", "scripts/setup"], "."),
        (["./setup"], "scripts"),
    ):
        result = subprocess.run(
            arguments, cwd=clone.root / cwd, capture_output=True, text=True, env={"PATH": str(clone.tools)}
        )
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/constraints.txt", "native/src/deep/a.cc"])
def test_a_changed_input_triggers_a_new_set_up(clone: Clone, changed: str) -> None:
    clone.run()
    clone.calls()
    with (clone.root / changed).open("a") as file:
        file.write("\n")
    assert clone.run()[0] == 0
    assert kinds(clone.calls()) == AGAIN
    assert clone.run() == (0, "", "")


def test_new_and_removed_native_sources_count_as_changes(clone: Clone) -> None:
    clone.run()
    new = clone.root / "native" / "src" / "new.h"
    for change in (new.touch, new.unlink):
        clone.calls()
        change()
        clone.run()
        assert kinds(clone.calls()) == AGAIN


def test_a_clone_that_was_moved_is_set_up_again(clone: Clone) -> None:
    clone.run()
    clone.calls()
    moved = clone.root.with_name("moved")
    clone.root.rename(moved)
    clone.root = moved
    assert clone.run()[0] == 0
    assert kinds(clone.calls())[-2:] == ["build", "try"]


def test_another_python_gets_another_environment(clone: Clone) -> None:
    clone.run()
    clone.calls()
    program = clone.root.parent / "real-other.py"
    program.write_text(
        "import sys, sysconfig\n"
        "sys.version_info = (3, 12, 1, 'final', 0)\n"
        "code = sys.stdin.read() if sys.argv[1] == '-' else sys.argv[2]\n"
        "sys.argv = [sys.argv[1], *sys.argv[2 if sys.argv[1] == '-' else 3 :]]\n"
        "exec(code)\n"
    )
    clone.put("python-other", FAKE_PYTHON.replace("REAL_PYTHON", f"{sys.executable} {program}"))
    status, _, err = clone.run(MOECHAT_PYTHON="python-other")
    assert (status, kinds(clone.calls())) == (0, FULL), err
    assert "Python 3.12.1" in err
    assert clone.run(MOECHAT_PYTHON="python-other") == (0, "", "")
    assert clone.run() == (0, "", "")  # no wish: what is there is good


def test_a_torch_index_is_used_for_torch_alone(clone: Clone) -> None:
    clone.run(MOECHAT_TORCH_INDEX="some-index")
    calls = clone.calls()
    assert f"pip --no-compile --no-deps --index-url some-index {clone.torch_pin}" in calls
    assert sum("some-index" in call for call in calls) == 1


def test_the_build_runs_beside_the_installation_of_packages(clone: Clone) -> None:
    # Each waits until the other has begun.
    mine, other = f"{clone.log}.build", f"{clone.log}.torch"
    wait = "for i in $(seq 100); do [[ -e {} ]] && break; sleep 0.1; done; [[ -e {} ]]"
    pip = (
        f"if [[ $* == *' -e '* ]]; then touch {mine}; {wait.format(other, other)} || exit 1; "
        f"elif [[ $* == *torch==* ]]; then touch {other}; {wait.format(mine, mine)} || exit 1; fi"
    )
    status, _, err = clone.run(FAKE_PIP=pip)
    assert status == 0, err


def test_a_failed_installation_ends_the_build(clone: Clone) -> None:
    pid = f"{clone.log}.pid"
    pip = (
        f"if [[ $* == *' -e '* ]]; then echo $$ >{pid}; sleep 60; "
        f"elif [[ $* == *torch==* ]]; then while [[ ! -s {pid} ]]; do sleep 0.05; done; exit 1; fi"
    )
    status, _, err = clone.run(FAKE_PIP=pip)
    assert status == 1
    assert f"set-up failed (step: {clone.torch_pin})" in err
    assert ends(int(Path(pid).read_text()))


def test_an_interrupt_ends_the_build(clone: Clone) -> None:
    pid = Path(f"{clone.log}.pid")
    pip = f"if [[ $* == *' -e '* ]]; then echo $$ >{pid}; fi; if [[ $* != *cmake* ]]; then sleep 60; fi"
    process = clone.start(FAKE_PIP=pip)
    clone.wait_for_call("torch==")
    clone.wait_for_call(" -e ")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert ends(int(pid.read_text()))


def ends(pid: int) -> bool:
    """Whether the process ends, or is a zombie, within seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def defines(clone: Clone) -> str:
    return Path(f"{clone.log}.defines").read_text().splitlines()[-1]


def test_instruction_sets_are_those_of_this_processor_unless_named_and_are_kept(clone: Clone) -> None:
    assert clone.run(SKBUILD_CMAKE_DEFINE="OTHER=1")[0] == 0
    assert defines(clone) == "MOECHAT_ISAS=native;OTHER=1"
    clone.calls()
    assert clone.run(MOECHAT_ISAS="all")[0] == 0
    assert kinds(clone.calls()) == AGAIN
    assert defines(clone) == "MOECHAT_ISAS=all"
    assert clone.run() == (0, "", "")  # kept without the variable
    (clone.root / "native" / "b.cc").touch()
    assert clone.run()[0] == 0
    assert defines(clone) == "MOECHAT_ISAS=all"
    assert clone.run(MOECHAT_ISAS="portable,avx2")[0] == 0
    assert defines(clone) == "MOECHAT_ISAS=portable,avx2"


def test_developer_tools_are_installed_on_demand_and_kept(clone: Clone) -> None:
    requirements = Path(f"{clone.log}.requirements")
    assert clone.run()[0] == 0
    assert "transformers" in requirements.read_text()
    assert "pytest" not in requirements.read_text()
    clone.calls()
    assert clone.run("scripts/setup", "--dev")[0] == 0
    assert kinds(clone.calls()) == AGAIN
    assert "pytest" in requirements.read_text()
    assert clone.run() == (0, "", "")
    (clone.root / "native" / "b.cc").touch()
    assert clone.run()[0] == 0
    assert "pytest" in requirements.read_text()


def test_an_unknown_argument_is_refused(clone: Clone) -> None:
    status, out, err = clone.run("scripts/setup", "--devel")
    assert (status, out) == (2, "")
    assert "unknown argument --devel" in err
    assert clone.calls() == []


def test_two_concurrent_set_ups_do_the_work_once(clone: Clone) -> None:
    first = clone.start(FAKE_PIP="sleep 0.5")
    clone.wait_for_call()
    status, _, err = clone.run()
    assert first.wait(timeout=60) == 0
    assert status == 0
    assert err == "another set-up of this clone is running; waiting for it\n"
    assert kinds(clone.calls()) == FULL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_set_up_is_resumed(clone: Clone, number: signal.Signals) -> None:
    process = clone.start(FAKE_PIP="sleep 30")
    clone.wait_for_call()
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=20)
    assert process.returncode in (130, -number)
    assert ("interrupted; run this again" in err) == (number == signal.SIGINT)
    clone.calls()
    assert clone.run()[0] == 0
    assert kinds(clone.calls()) == AGAIN


def test_an_incomplete_environment_is_replaced(clone: Clone) -> None:
    (clone.root / ".venv" / "bin").mkdir(parents=True)
    (clone.root / ".venv" / "bin" / "python").symlink_to("/nonexistent")
    assert clone.run()[0] == 0
    assert kinds(clone.calls()) == FULL


def test_packages_that_do_not_import_are_reinstalled_once(clone: Clone, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    assert clone.run(FAKE_TRY=f"[[ -e {flag} ]] || {{ touch {flag}; false; }}")[0] == 0
    assert sorted(kinds(clone.calls())) == sorted([*FULL, *FULL])
    clone.root.joinpath("pyproject.toml").touch()
    (clone.root / "native" / "b.cc").touch()
    status, _, err = clone.run(FAKE_TRY="false")
    assert status == 1
    assert "set-up failed (step: first start)" in err


def test_a_failing_step_shows_the_end_of_its_log(clone: Clone) -> None:
    fail = "if [[ $* == *' -e '* ]]; then seq 100; echo a.cc:3: it is wrong; exit 3; fi"
    status, out, err = clone.run(FAKE_PIP=fail)
    assert (status, out) == (1, "")
    assert "a.cc:3: it is wrong" in err
    assert "set-up failed (step: native core (c++, native))" in err
    assert "it resumes" in err
    assert str(clone.root / ".venv" / "setup-native.log") in err
    clone.calls()
    assert clone.run()[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Failed to establish a new connection: [Errno -3] Temporary failure in name resolution",
            "cannot be reached",
        ),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ],
)
def test_a_missing_network_and_a_full_disk_have_different_errors(
    clone: Clone, text: str, message: str
) -> None:
    status, _, err = clone.run(FAKE_PIP=f"echo {text!r}; exit 1")
    assert status == 1
    assert message in err
    assert "hint: " in err


def test_a_missing_compiler_is_reported_before_any_work(clone: Clone) -> None:
    clone.remove("c++")
    status, out, err = clone.run("scripts/moechat", "--version")
    assert (status, out) == (1, "")
    assert "error: no C++17 compiler (tried: c++ g++ clang++)" in err
    assert "package g++" in err
    assert clone.calls() == []
    assert not (clone.root / ".venv").exists()


def test_an_old_compiler_does_not_count(clone: Clone) -> None:
    clone.put("c++", "#!/bin/sh\nexit 1\n")
    clone.put("clang++", "#!/bin/sh\nexit 0\n")
    status, _, err = clone.run()
    assert status == 0
    assert "native core (clang++, native)" in err
    status, _, err = clone.run(CXX="c++ -flag", MOECHAT_PYTHON="python3")
    assert status == 0  # set up already: no compiler is needed


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("sys.version_info = (3, 10, 4, 'final', 0)", "is 3.10.4: too old, 3.11 to 3.13 are supported"),
        ("sys.version_info = (3, 14, 0, 'final', 0)", "is 3.14.0: too new, 3.11 to 3.13 are supported"),
        ("importlib.util.find_spec = lambda name: None", "without the venv module"),
        ("sysconfig.get_path = lambda name: '/nonexistent'", "without its C headers"),
        ("sys.exit(1)", "does not run"),
    ],
)
def test_an_unsuitable_python_is_reported_with_the_reason(clone: Clone, patch: str, message: str) -> None:
    script = f"import importlib.util, sys, sysconfig; {patch}; exec(sys.stdin.read())"
    clone.put("python3", f'#!/bin/sh\nexec {sys.executable} -c "{script}"\n')
    status, out, err = clone.run()
    assert (status, out) == (1, "")
    assert message in err
    assert str(clone.tools / "python3") in err
    assert "MOECHAT_PYTHON" in err
    clone.put("python3.12", FAKE_PYTHON.replace("REAL_PYTHON", sys.executable))
    assert clone.run()[0] == 0


def test_a_missing_python_is_reported(clone: Clone) -> None:
    clone.remove("python3")
    status, _, err = clone.run()
    assert status == 1
    assert "no Python found (looked for python3 python3.13 python3.12 python3.11)" in err
    status, _, err = clone.run(MOECHAT_PYTHON="/nonexistent/python")
    assert status == 1
    assert "/nonexistent/python does not exist" in err


def test_too_little_disk_is_reported_with_both_numbers(clone: Clone) -> None:
    clone.put("df", "#!/bin/sh\necho header\necho disk 1 1 512000 1 /\n")
    status, _, err = clone.run()
    assert status == 1
    assert "needs 2500 MB of free disk" in err
    assert "there are 500 MB" in err
    assert clone.calls() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_clone_is_reported(clone: Clone) -> None:
    clone.root.chmod(0o555)
    try:
        status, _, err = clone.run()
    finally:
        clone.root.chmod(0o755)
    assert status == 1
    assert "is not writable" in err
