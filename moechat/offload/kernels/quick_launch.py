"""Launches builds of Triton's kernels by the driver itself.

Triton's launch binds the arguments, makes a key of them and looks a build up, in Python, every time. A
decoded token launches two or three kernels in every layer that waits for the host, always the same builds.
So the first launch goes through Triton, and the later ones of the same build go to the driver. On an H100 the
time around the kernel of a layer's experts, which itself takes 17 us, fell from 76 to 36 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moechat import _native

# Triton's types of parameters; everything else is a pointer. A parameter that became a constant has none.
_KINDS = {"i32": "i", "u32": "i", "fp32": "f"}
_CONSTANT = "constexpr"
_ALIGNMENT = 16
_THREADS = 32  # of a warp


class QuickKernel:
    """One build of a kernel.

    A build holds for arguments like those of the launch that made it: pointers to the same types at multiples
    of 16 bytes, and integers that Triton does not specialise. The caller keeps one for each other choice.

    Args:
        kernel: The build as the driver has it.
        places: Numbers of the arguments that it takes.
        padding: Null pointers behind them: memory for features that the build does not use.
    """

    def __init__(self, kernel: _native.CudaKernel, places: tuple[int, ...], padding: int) -> None:
        self._kernel = kernel
        self._places = places
        self._padding = (0,) * padding

    @classmethod
    def of(cls, compiled: Any) -> QuickKernel | None:
        """The build that a launch of Triton returned; ``None``: only Triton can launch it.

        Args:
            compiled: What the launch returned; ``None`` in the interpreter.
        """
        try:
            metadata, signature = compiled.metadata, compiled.src.signature
            needs_more = (
                metadata.num_ctas != 1
                or metadata.launch_cooperative_grid
                or metadata.launch_pdl
                or metadata.global_scratch_size
                or metadata.profile_scratch_size
            )
            if needs_more:
                return None
            types = list(signature.values())
            places = tuple(at for at, kind in enumerate(types) if kind != _CONSTANT)
            kinds = "".join("p" if types[at].startswith("*") else _KINDS[types[at]] for at in places)
            function, threads, shared = compiled.function, _THREADS * metadata.num_warps, metadata.shared
        except (AttributeError, KeyError, TypeError):
            return None  # another version of Triton
        for padding in (2, 1, 0):
            try:
                kernel = _native.CudaKernel(function, threads, shared, kinds + "p" * padding)
            except (ValueError, _native.CudaUnavailableError):
                continue
            return cls(kernel, places, padding)
        return None

    def launch(self, stream: int, grid: tuple[int, int, int], arguments: list[Any]) -> None:
        """Launch it.

        Args:
            stream: Handle (CUstream).
            grid: Programs in each direction.
            arguments: Of the kernel without the compile-time ones, addresses in place of tensors.
        """
        self._kernel(stream, *grid, *self._taken(arguments))

    def prepared(self, grid: tuple[int, int, int], arguments: list[Any]) -> _native.PreparedLaunch:
        """A launch for :class:`moechat._native.DeviceLayers`.

        Args:
            grid: Programs in each direction.
            arguments: As for :meth:`launch`; names in place of what is known later.
        """
        return _native.PreparedLaunch(self._kernel, grid, self._taken(arguments))

    def _taken(self, arguments: list[Any]) -> list[Any]:
        return [*[arguments[place] for place in self._places], *self._padding]


# Torch's own way takes 10 us: it makes an object of the stream each time.
_RAW_STREAM: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """Handle (CUstream) of torch's current stream of a GPU."""
    if _RAW_STREAM is not None and device.index is not None:
        return _RAW_STREAM(device.index)
    return int(torch.cuda.current_stream(device).cuda_stream)


def aligned(addresses: list[int]) -> bool:
    """Whether a build for aligned pointers serves these."""
    together = 0
    for address in addresses:
        together |= address
    return together % _ALIGNMENT == 0
