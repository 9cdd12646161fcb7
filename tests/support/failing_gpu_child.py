"""The command over a simulated GPU (see ``interpreted_gpu.py``) that fails after some copies.

Usage: ``python failing_gpu_child.py COPIES ARGUMENTS...``; the arguments are moechat's.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton


def main() -> int:
    from fake_cuda import VARIABLE, FakeCuda

    cuda = FakeCuda()
    os.environ[VARIABLE] = str(cuda.path)

    from interpreted_gpu import InterpretedGpu
    from wide_products import group_products, pair_products

    import moechat.engine.api
    import moechat.loading.load
    from moechat.cli.main import main as moechat_main
    from moechat.offload.kernels import packed_linear, triton_few

    # The interpreter's time goes by programs and operations, whatever their size.
    packed_linear.ROWS = 64
    triton_few.group_products = group_products
    triton_few.pair_products = pair_products
    moechat.loading.load.Accelerator = lambda _ordinal: InterpretedGpu(cuda)  # type: ignore[attr-defined]
    moechat.engine.api.require_gpu = lambda _ordinal: None  # type: ignore[attr-defined]
    cuda.set(fail_after=float(sys.argv[1]))
    return moechat_main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
