"""Compiles the GPU kernels for GPUs that need not be present; prints the result of each as JSON."""

import itertools
import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moechat.geometry import Activation, ExpertGeometry, WeightType
from moechat.offload import page_lookup
from moechat.offload.kernels import launch, packed_linear, triton_blocks, triton_linear, triton_lookup

SCALARS = {
    "alpha": "fp32", "limit": "fp32",
    **dict.fromkeys(
        ("hidden", "items_padded", "rows", "cols", "tiles", "groups", "first_tile", "sz",
         "first", "experts", "count", "flag"), "i32"
    ),
}  # fmt: skip
POINTERS = {"pages": "*u8", "data": "*u8", "partial": "*fp32", "item_weight": "*fp32", "others": "*fp32"}
# Sizes that are multiples of 16 in all known models; the compiler gets this as a hint.
EVEN = ("hidden", "rows", "cols", "sz")


def compile_one(kernel, constants, types, warps, capability):
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
    return {"shared": built.metadata.shared, "bytes": len(built.asm["cubin"])}


def main() -> None:
    """Arguments: capabilities, encodings such as 4 or 16h, numbers of items, separated by commas; a type.

    No numbers of items: the kernels of packed dense layers, without and with a bias. The encoding "lookup":
    those that look pages up, for so many experts of a token, of 45 blocks.
    """
    capabilities, encodings, items = (argument.split(",") for argument in sys.argv[1:4])
    dtype = sys.argv[4]
    results = {}
    if encodings == ["lookup"]:
        for picks, capability in itertools.product(map(int, items), map(int, capabilities)):
            for plan in page_lookup.launches(picks, 45):
                kernel = getattr(triton_lookup, plan.kernel)
                built = compile_one(kernel, plan.constants, plan.types, plan.warps, capability)
                results[f"{plan.kernel} sm_{capability} {picks} experts"] = sizes_of(built)
        encodings = []
    if items == [""]:
        for bits, bias in itertools.product(map(int, encodings), (False, True)):
            for plan in packed_linear.launches(bits, dtype, has_bias=bias):
                for capability in map(int, capabilities):
                    kernel = getattr(triton_linear, plan.kernel)
                    built = compile_one(kernel, plan.constants, plan.types, plan.warps, capability)
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
                    kernel = getattr(triton_blocks, plan.kernel)
                    built = compile_one(kernel, plan.constants, plan.types, plan.warps, capability)
                    results[name] = sizes_of(built)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
