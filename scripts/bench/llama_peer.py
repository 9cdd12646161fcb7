"""The prebuilt llama.cpp that bench/cpu and gpu_check compare with: from npm, never compiled here.

The npm package ``node-llama-cpp`` carries CPU libraries for a dozen processor generations, of which llama.cpp
loads the one that it scores highest, a library for CUDA in a package of its own, and a bundle of the sources
that they were built from. Only the headers are taken from that: ``llama_calls.cc``, a few lines between
ctypes and llama.cpp, is compiled against them.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_PACKAGE = "node-llama-cpp"
_CHOSEN = "auto"


class PeerError(Exception):
    """llama.cpp cannot be had; says why and what to do."""


@dataclass(frozen=True)
class LlamaPeer:
    """Prebuilt libraries of llama.cpp.

    Attributes:
        directory: Scratch folder that holds the npm packages, the headers and the compiled calls.
        variant: Processor generation of the CPU library, such as ``haswell``; ``auto``: llama.cpp chooses.
        build: The package of libraries: ``linux-x64``, or ``linux-x64-cuda``.
    """

    directory: Path
    variant: str = _CHOSEN
    build: str = "linux-x64"

    @property
    def libraries(self) -> Path:
        """Directory of the prebuilt libraries."""
        return self.directory / "node_modules" / "@node-llama-cpp" / self.build / "bins" / self.build

    @property
    def calls(self) -> Path:
        """The compiled ``llama_calls.cc``."""
        return self.directory / "libllama_calls.so"

    def command(self, what: str) -> list[str]:
        """The command line of ``llama_worker.py``."""
        worker = str(_HERE / "llama_worker.py")
        return [sys.executable, worker, what, str(self.directory), self.variant, self.build]

    def install(self) -> None:
        """Install what is missing.

        Raises:
            PeerError: npm, git or a compiler is missing or failed.
        """
        if not self.libraries.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "package.json").write_text('{"private": true}\n', "utf-8")
            # Its optional packages are the libraries for every platform; only one of them is needed.
            npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--omit=optional"]
            self._run([*npm, _PACKAGE])
            version = self._package(_PACKAGE)["version"]
            self._run([*npm, f"@node-llama-cpp/{self.build}@{version}"])
        sources = self.directory / "llama.cpp"
        if not sources.is_dir():
            bundle = self.directory / "node_modules" / _PACKAGE / "llama" / "gitRelease.bundle"
            self._run(["git", "clone", "--quiet", str(bundle), str(sources)])
        source = _HERE / "llama_calls.cc"
        if not self.calls.is_file() or self.calls.stat().st_mtime < source.stat().st_mtime:
            libraries = [
                str(path)
                for path in sorted(self.libraries.glob("lib*.so"))
                if not path.name.startswith(("libggml-cpu", "libggml-cuda", "libllama-common"))
            ]
            includes = [f"-I{sources / 'include'}", f"-I{sources / 'ggml' / 'include'}"]
            compiler = [shutil.which("c++") or "g++", "-std=c++17", "-O2", "-fPIC", "-shared"]
            end = ["-o", str(self.calls), f"-Wl,-rpath,{self.libraries}"]
            self._run([*compiler, *includes, str(source), *libraries, *end])

    def about(self) -> dict[str, Any]:
        """Versions, and the CPU library that is loaded.

        Raises:
            PeerError: It cannot be loaded.
        """
        if not self.calls.is_file():
            raise PeerError(f"{self.directory} has no llama.cpp; run the same with --prepare first")
        answer = json.loads(self._run(self.command("about")))
        release = json.loads(
            (self.directory / "node_modules" / _PACKAGE / "llama" / "llama.cpp.info.json").read_text("utf-8")
        )
        return {"package": self._package(_PACKAGE)["version"], "release": release["tag"], **answer}

    def _package(self, name: str) -> Mapping[str, Any]:
        path = self.directory / "node_modules" / name / "package.json"
        values: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return values

    def _run(self, command: Sequence[str]) -> str:
        try:
            done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)
        except OSError as error:
            raise PeerError(
                f"{command[0]} cannot be run: {error}; install it, or leave llama.cpp out with --only moechat"
            ) from error
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip())[-1000:]
            raise PeerError(f"{' '.join(command[:3])} … ended with status {done.returncode}: {said}")
        return done.stdout


def load_calls(directory: Path, variant: str, build: str = LlamaPeer.build) -> tuple[ctypes.CDLL, str]:
    """Load llama.cpp into this process; returns its calls and the name of the CPU variant in use.

    Raises:
        RuntimeError: The variant is not in the package, or does not run on this processor.
    """
    peer = LlamaPeer(directory, variant, build)
    if build.endswith("cuda"):
        _load_cuda()
    calls = ctypes.CDLL(str(peer.calls))
    calls.peer_system_info.restype = ctypes.c_char_p
    calls.peer_load.restype = ctypes.c_void_p
    calls.peer_load.argtypes = [ctypes.c_char_p, ctypes.c_bool, ctypes.c_int32, ctypes.c_int32]
    calls.peer_free.argtypes = calls.peer_free_context.argtypes = [ctypes.c_void_p]
    calls.peer_model_bytes.restype = ctypes.c_uint64
    calls.peer_model_bytes.argtypes = [ctypes.c_void_p]
    calls.peer_vocabulary.argtypes = [ctypes.c_void_p]
    calls.peer_context.restype = ctypes.c_void_p
    calls.peer_context.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int32,
        ctypes.c_int,
        ctypes.c_uint32,
    ]
    calls.peer_empty.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    calls.peer_feed.restype = ctypes.POINTER(ctypes.c_float)
    calls.peer_feed.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32]
    file = "" if variant == _CHOSEN else f"libggml-cpu-{variant}.so"
    calls.peer_start(str(peer.libraries).encode(), file.encode())
    # The library in use is the one that this process has mapped.
    mapped = {
        Path(line.split()[-1]).stem.removeprefix("libggml-cpu-")
        for line in Path("/proc/self/maps").read_text("utf-8").splitlines()
        if "/libggml-cpu-" in line
    }
    if len(mapped) != 1:
        raise RuntimeError(f"llama.cpp loaded {sorted(mapped) or 'no'} CPU variants; expected {variant}")
    return calls, mapped.pop()


def _load_cuda() -> None:
    """Load the runtime libraries of CUDA that torch has brought, where the system has none of its own."""
    for name in ("cudart", "cublasLt", "cublas"):
        found = sorted(
            path
            for place in sys.path
            for path in Path(place or ".").glob(f"nvidia/**/lib{name}.so.*")
            if path.is_file()
        )
        if found:
            ctypes.CDLL(str(found[-1]), mode=ctypes.RTLD_GLOBAL)
