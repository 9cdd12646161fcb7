"""Builds the native core where it is missing, without a network and without an installation."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

# Imported by every command, in the order of `pyproject.toml`; torch and transformers come with the machine.
_NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "triton": "triton",
    "typer": "typer",
    "rich": "rich",
    "psutil": "psutil",
    "platformdirs": "platformdirs",
    "huggingface_hub": "huggingface-hub",
    "pynvml": "nvidia-ml-py",
}


class BuildError(Exception):
    """The native core cannot be built; says what is missing."""


def build_native(root: Path, say: Callable[[str], None]) -> None:
    """Build ``moechat/_native`` into the clone, unless it can be imported.

    Args:
        root: The clone.
        say: Takes a line for people.

    Raises:
        BuildError: A package, CMake or a compiler is missing, or the build failed.
    """
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise BuildError(f"packages are missing: {', '.join(missing)}; install them with pip")
    if importlib.util.find_spec("moechat._native") is not None:
        return
    cmake = shutil.which("cmake")
    if cmake is None:
        raise BuildError("cmake is missing; install it, or moechat itself with pip")
    build = root / "build" / "gpu"
    command = [
        cmake,
        "-S",
        str(root / "native"),
        "-B",
        str(build),
        "-DCMAKE_BUILD_TYPE=Release",
        "-DMOECHAT_ISAS=native",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DMOECHAT_PYBIND11={_headers()}",
    ]
    if shutil.which("ninja"):
        command += ["-G", "Ninja"]
    say("building the native core")
    _run(command)
    _run([cmake, "--build", str(build), "--target", "_native", "--parallel"])
    built = next(build.rglob(f"_native*{sysconfig.get_config_var('EXT_SUFFIX')}"), None)
    if built is None:
        raise BuildError(f"the build left no module in {build}")
    shutil.copy2(built, root / "moechat" / built.name)
    importlib.invalidate_caches()


def _headers() -> Path:
    """Directory with pybind11's headers: its own package's, or torch's copy."""
    for module, below in (("pybind11", "include"), ("torch", "include")):
        found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None:
            place = Path(found.origin).parent / below
            if (place / "pybind11" / "pybind11.h").is_file():
                return place
    raise BuildError("pybind11's headers are missing; install pybind11 with pip")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise BuildError(f"{' '.join(command[:3])} … ended with status {done.returncode}:\n{said}")
