"""Compiles the GPU kernels for cards that need not be there; prints what became of each as JSON."""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moechat.geometry import Activation, ExpertGeometry, WeightType
from moechat.offload.kernels import launch, triton_blocks

SCALARS = {"alpha": "fp32", "limit": "fp32", "hidden": "i32", "items_padded": "i32"}
POINTERS = {"pages": "*u8", "partial": "*fp32", "item_weight": "*fp32", "others": "*fp32"}


def compile_one(kernel, constants, types, warps, capability):
    signature = {
        name: "constexpr"
        if name in constants
        else SCALARS.get(name) or types.get(name) or POINTERS.get(name, "*i32")
        for name in kernel.arg_names
    }
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name == "hidden"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(places[name],): value for name, value in constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


def main() -> None:
    """Arguments: capabilities, encodings such as 4 or 16h, numbers of items, separated by commas; a type."""
    capabilities, encodings, items = (argument.split(",") for argument in sys.argv[1:4])
    dtype = sys.argv[4]
    results = {}
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
                    kernel = getattr(triton_blocks, plan.kernel)
                    built = compile_one(kernel, plan.constants, plan.types, plan.warps, capability)
                    results[name] = {"shared": built.metadata.shared, "bytes": len(built.asm["cubin"])}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
