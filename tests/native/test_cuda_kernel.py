"""Launches of kernels by the driver: parameters are compared with the kernel's, and arrive as given."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import VARIABLE, FakeCuda
from fake_kernels import FakeKernel, compiled

from moechat import _native
from moechat.offload.kernels.quick_launch import QuickKernel, aligned


@pytest.fixture(scope="module", autouse=True)
def cuda() -> Iterator[FakeCuda]:
    """The fake driver, opened by this process."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda()
        patch.setenv(VARIABLE, str(cuda.path))
        assert _native.cuda_driver_version() == 12080
        yield cuda


def test_a_launch_passes_the_grid_and_every_value() -> None:
    fake = FakeKernel.of("pifp")
    kernel = _native.CudaKernel(fake.address, 256, 1024, "pifp")
    kernel(77, 3, 2, 1, 2**63 + 5, -4, 1.5, 0)
    assert list(fake.launched) == [3, 2, 1, 256, 1024, 77]
    assert fake.values[0] == 2**63 + 5
    assert struct.unpack("<i", struct.pack("<I", fake.values[1])) == (-4,)
    assert struct.unpack("<f", struct.pack("<I", fake.values[2])) == (1.5,)
    assert fake.values[3] == 0
    assert fake.launches == 1


@pytest.mark.parametrize("kinds", ["pi", "pifp", "ppf", "iif", ""])
def test_other_parameters_than_the_kernel_s_are_refused(kinds: str) -> None:
    fake = FakeKernel.of("pif")
    with pytest.raises(ValueError, match="parameter"):
        _native.CudaKernel(fake.address, 32, 0, kinds)


def test_unknown_kinds_and_too_many_parameters_are_refused() -> None:
    fake = FakeKernel.of("p")
    with pytest.raises(ValueError, match="'x'; there are p, i and f"):
        _native.CudaKernel(fake.address, 32, 0, "x")
    with pytest.raises(ValueError, match="65 parameters"):
        _native.CudaKernel(fake.address, 32, 0, "p" * 65)


@pytest.mark.parametrize("values", [(1,), (1, 2, 3)])
def test_a_launch_with_too_few_or_too_many_values_is_refused(values: tuple[int, ...]) -> None:
    fake = FakeKernel.of("pi")
    kernel = _native.CudaKernel(fake.address, 32, 0, "pi")
    with pytest.raises(ValueError, match=f"was given {4 + len(values)} values"):
        kernel(0, 1, 1, 1, *values)
    assert fake.launches == 0


def test_the_driver_s_refusal_is_an_error_with_the_call_s_name() -> None:
    fake = FakeKernel.of("p")
    kernel = _native.CudaKernel(fake.address, 32, 0, "p")
    with pytest.raises(_native.CudaError, match="cuLaunchKernel"):
        kernel(0, 0, 1, 1, 5)


def test_a_thread_without_a_context_can_wait_for_a_stream(cuda: FakeCuda) -> None:
    stream = cuda.stream()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(_native.cuda_finish, stream.handle).result()
    with pytest.raises(_native.CudaUnavailableError):
        _native.cuda_finish(stream.handle, 99)


# As a kernel's own: an integer that became a constant, and compile-time ones behind the others.
SIGNATURE = {
    "pages": "*u8",
    "count": "i32",
    "one": "constexpr",
    "alpha": "fp32",
    "table": "*fp32",
    "HIDDEN": "constexpr",
}


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_build_of_triton_is_launched_without_its_constants(padding: int) -> None:
    fake = FakeKernel.of("pifp" + "p" * padding)
    quick = QuickKernel.of(compiled(fake, SIGNATURE))
    assert quick is not None
    quick.launch(5, (7, 1, 1), [4096, 3, 1, 0.5, 8192])
    assert list(fake.launched) == [7, 1, 1, 256, 2048, 5]
    bits = struct.unpack("<I", struct.pack("<f", 0.5))[0]
    assert list(fake.values)[: 4 + padding] == [4096, 3, bits, 8192, *[0] * padding]


@pytest.mark.parametrize(
    "metadata",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"global_scratch_size": 64},
        {"profile_scratch_size": 8},
    ],
)
def test_a_build_that_needs_more_than_its_arguments_is_left_to_triton(metadata: dict[str, Any]) -> None:
    fake = FakeKernel.of("pifppp")
    assert QuickKernel.of(compiled(fake, SIGNATURE)) is not None
    assert QuickKernel.of(compiled(fake, SIGNATURE, **metadata)) is None


def test_what_is_not_known_is_left_to_triton() -> None:
    fake = FakeKernel.of("pifppp")
    assert QuickKernel.of(None) is None, "the interpreter builds nothing"
    assert QuickKernel.of(compiled(fake, {**SIGNATURE, "count": "i64"})) is None
    assert QuickKernel.of(compiled(fake, {**SIGNATURE, "more": "i32"})) is None, "the driver counts fewer"
    assert QuickKernel.of(SimpleNamespace(src=None)) is None


def test_only_aligned_addresses_go_to_a_build_for_them() -> None:
    assert aligned([16, 4096])
    assert aligned([])
    assert not aligned([16, 4104])
