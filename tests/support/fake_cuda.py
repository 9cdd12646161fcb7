"""Builds ``native/tests/fake_cuda.cc``, a driver over host memory, and calls it."""

import ctypes
import hashlib
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from places import ROOT

SOURCE = ROOT / "native" / "tests" / "fake_cuda.cc"
VARIABLE = "MOECHAT_CUDA_DRIVER"


def build() -> Path:
    """The library, built once for its source and compiler."""
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread"]
    key = hashlib.sha256(" ".join(command).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"moechat-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"fake_cuda-{key}-{sysconfig.get_platform()}.so"
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(fresh), str(SOURCE)], check=True, timeout=120)
        fresh.rename(library)
    return library


class FakeCuda:
    """The library in this process; the driver that moechat opens is the same one."""

    def __init__(self) -> None:
        self.path = build()
        self._library = ctypes.CDLL(str(self.path))
        self._library.fake_cuda_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
        self._library.fake_cuda_get.argtypes = [ctypes.c_char_p]
        self._library.fake_cuda_get.restype = ctypes.c_double
        self._library.fake_cuda_adopt.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.fake_cuda_disown.argtypes = [ctypes.c_void_p]
        self._library.fake_cuda_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.fake_cuda_unpin.argtypes = [ctypes.c_void_p]
        self.reset()

    def reset(self) -> None:
        """As at first. Nothing may be under way."""
        self._library.fake_cuda_reset()

    def set(self, **settings: float) -> None:
        for name, value in settings.items():
            self._library.fake_cuda_set(name.encode(), value)

    def get(self, name: str) -> float:
        return self._library.fake_cuda_get(name.encode())

    def adopt(self, address: int, nbytes: int) -> None:
        """Register host memory as the GPU's."""
        self._library.fake_cuda_adopt(address, nbytes)

    def disown(self, address: int) -> None:
        self._library.fake_cuda_disown(address)

    def pin(self, address: int, nbytes: int) -> None:
        """Host memory that another library has pinned."""
        self._library.fake_cuda_pin(address, nbytes)

    def unpin(self, address: int) -> None:
        self._library.fake_cuda_unpin(address)

    def pages(self, count: int, page_bytes: int) -> np.ndarray:
        """Memory of the GPU, uint8 [count, page_bytes], all 0xA5."""
        memory = np.full((count, page_bytes), 0xA5, np.uint8)
        self.adopt(memory.ctypes.data, memory.nbytes)
        return memory

    def stream(self) -> "FakeStream":
        return FakeStream(self)


class FakeStream:
    """A stream of the GPU. Functions that it is given run one after another, on its thread."""

    _FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def __init__(self, cuda: FakeCuda) -> None:
        self._library = cuda._library
        self._kept = []
        handle, context = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self._context = context
        self._within(lambda: self._library.cuStreamCreateWithPriority(ctypes.byref(handle), 1, 0))
        self.handle = handle.value

    def _check(self, result: int) -> None:
        assert result == 0, f"the fake driver says {result}"

    def _within(self, call) -> None:
        self._check(self._library.cuCtxPushCurrent_v2(self._context))
        result = call()
        self._check(self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))
        self._check(result)

    def run(self, function) -> None:
        """Have a function called in its turn."""
        kept = self._FUNCTION(lambda _: function())
        self._kept.append(kept)
        self._within(lambda: self._library.cuLaunchHostFunc(ctypes.c_void_p(self.handle), kept, None))

    def synchronize(self) -> int:
        """Wait for all of them; what the driver says."""
        return self._library.cuStreamSynchronize(ctypes.c_void_p(self.handle))

    def close(self) -> None:
        self._library.cuStreamDestroy_v2(ctypes.c_void_p(self.handle))
