"""Compiles the GPU kernels for GPUs that need not be present; prints the result of each as JSON."""

import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moechat.geometry import Activation, ExpertGeometry, WeightType
from moechat.offload.kernels import launch, packed_linear, triton_blocks, triton_few, triton_linear

SCALARS = {
    "alpha": "fp32", "limit": "fp32", "clear": "i32",
    **dict.fromkeys(
        ("hidden", "items_padded", "rows", "cols", "tiles", "groups", "first_tile", "sz"), "i32"
    ),
}  # fmt: skip
POINTERS = {"pages": "*u8", "data": "*u8", "partial": "*fp32", "item_weight": "*fp32", "others": "*fp32"}
# Sizes that are multiples of 16 in all known models; the compiler gets this as a hint.
EVEN = ("hidden", "rows", "cols", "sz")


def kernel_named(name):
    return getattr(triton_few if name == "blocks" else triton_blocks, name)


def build(kernel, constants, types, warps, capability):
    signature = {
        name: "constexpr"
        if name in constants
        else SCALARS.get(name) or types.get(name) or POINTERS.get(name, "*i32")
        for name in kernel.arg_names
    }
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in EVEN]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(places[name],): value for name, value in constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


def sizes_of(built):
    ptx = built.asm["ptx"]
    return {
        "shared": built.metadata.shared,
        "bytes": len(built.asm["cubin"]),
        "conversions": len(re.findall(r"\bcvt\.rn\.f32\.[su]\d+", ptx)),
        "flushing": ptx.count(".ftz"),
        "wide_loads": len(re.findall(r"\bld\.global\.v4\.b32", ptx)),
        "spilled": spilled_bytes(built.asm["cubin"]),
    }


def spilled_bytes(cubin):
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", done.stdout + done.stderr).group(1))


def main() -> None:
    """Arguments: capabilities, encodings such as 4 or 16h, numbers of items, separated by commas; a type.

    No numbers of items: the kernels of packed dense layers, without and with a bias.
    """
    capabilities, encodings, items = (argument.split(",") for argument in sys.argv[1:4])
    dtype = sys.argv[4]
    results = {}
    if items == [""]:
        for bits, bias in itertools.product(map(int, encodings), (False, True)):
            for plan in packed_linear.launches(bits, dtype, has_bias=bias):
                for capability in map(int, capabilities):
                    kernel = getattr(triton_linear, plan.kernel)
                    built = build(kernel, plan.constants, plan.types, plan.warps, capability)
                    results[f"{plan.kernel} sm_{capability} {bits} bits, bias {bias}"] = sizes_of(built)
        encodings = []
    for encoding in encodings:
        geometry = ExpertGeometry(
            2880, 2880, 32, int(encoding.rstrip("h")),
            WeightType.FP16 if encoding.endswith("h") else WeightType.BF16,
            Activation.CLAMPED_SWIGLU, 1.702, 7.0, has_bias=True,
        )  # fmt: skip
        for count in map(int, items):
            for plan in launch.launches(geometry, count, dtype):
                for capability in map(int, capabilities):
                    name = f"{plan.kernel} sm_{capability} {encoding} bits, {count} items"
                    built = build(
                        kernel_named(plan.kernel), plan.constants, plan.types, plan.warps, capability
                    )
                    results[name] = sizes_of(built)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
