"""Kernels of the fake driver: they note their launches, and may run Triton's interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

SIZES = {"p": 8, "i": 4, "f": 4}


class FakeKernel(ctypes.Structure):
    """As in ``native/tests/fake_cuda.cc``."""

    _fields_ = (
        ("parameters", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("launched", ctypes.c_uint64 * 6),
        ("sizes", ctypes.c_uint64 * 64),
        ("values", ctypes.c_uint64 * 64),
        ("run", ctypes.CFUNCTYPE(None)),
    )

    @classmethod
    def of(cls, kinds: str) -> FakeKernel:
        kernel = cls(parameters=len(kinds))
        for at, kind in enumerate(kinds):
            kernel.sizes[at] = SIZES[kind]
        return kernel

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


def compiled(fake: FakeKernel, signature: dict[str, str], **metadata: Any) -> Any:
    """A build as a launch of Triton returns it."""
    usual = {
        "num_ctas": 1,
        "num_warps": 8,
        "shared": 2048,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
    }
    return SimpleNamespace(
        metadata=SimpleNamespace(**{**usual, **metadata}),
        src=SimpleNamespace(signature=signature),
        function=fake.address,
    )


class BuiltKernel:
    """A kernel of the interpreter that is launched like one that Triton has built.

    The first launch computes, and returns a build, as Triton does. Later launches of that build come through
    the fake driver, with addresses and numbers only; they compute too.

    Args:
        kernel: Of the interpreter.
        wait: Called before it reads memory.
    """

    def __init__(self, kernel: Any, wait: Callable[[], None]) -> None:
        self._kernel, self._wait = kernel, wait
        self._kept: list[Any] = []
        self.through_triton = self.by_driver = 0
        self.errors: list[BaseException] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.through_triton += 1
            self._kernel[grid](*arguments, **options)
            return self._build(arguments, options)

        return launch

    def _build(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        types = [_type_of(argument) for argument in arguments]
        fake = FakeKernel.of("".join("p" if each.startswith("*") else each[0] for each in types))
        constants = {name: value for name, value in options.items() if name != "num_warps"}

        def run() -> None:
            try:
                self.by_driver += 1
                with _disable_current_modes():
                    self._wait()
                    values = [
                        _value(given, bits, kind)
                        for given, bits, kind in zip(arguments, fake.values, types, strict=False)
                    ]
                self._kernel[tuple(fake.launched[:3])](*values, **constants)
            except BaseException as error:  # ctypes would only print it
                self.errors.append(error)

        fake.run = ctypes.CFUNCTYPE(None)(run)
        self._kept.append(fake)
        signature = {f"argument{at}": kind for at, kind in enumerate(types)}
        return compiled(fake, {**signature, **dict.fromkeys(constants, "constexpr")})


def _type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"*{argument.dtype}"
    return "fp32" if isinstance(argument, float) else "i32"


def _value(given: Any, bits: int, kind: str) -> Any:
    if isinstance(given, torch.Tensor):
        memory = (ctypes.c_char * given.element_size()).from_address(bits)
        return torch.frombuffer(memory, dtype=given.dtype)
    word = ctypes.c_uint32(bits & 0xFFFFFFFF)
    return (ctypes.c_float if kind == "fp32" else ctypes.c_int32).from_buffer(word).value


@contextmanager
def built_kernels(patch: pytest.MonkeyPatch, wait: Callable[[], None]) -> Iterator[list[BuiltKernel]]:
    """Let the driver launch the kernels of experts of few tokens."""
    from moechat.offload.kernels import triton_blocks, triton_few, triton_kept_few

    made = []
    for module, name in ((triton_few, "blocks"), (triton_kept_few, "blocks"), (triton_blocks, "combine")):
        made.append(BuiltKernel(getattr(module, name), wait))
        patch.setattr(module, name, made[-1])
    yield made
    for each in made:
        if each.errors:
            raise each.errors[0]
