"""Compiles the GPU kernels for GPUs that need not be present; prints the result of each as JSON."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moechat.geometry import ExpertGeometry, Gate, WeightType, nominal_bits
from moechat.models.decode.gated_delta import GatedDelta, Rows
from moechat.models.decode.norms import Norm
from moechat.models.decode.routers import Rule
from moechat.offload import page_lookup
from moechat.offload.kernels import (
    attention,
    gated_delta,
    launch,
    layer_steps,
    packed_linear,
    routing,
    steps,
)

# What lies in the outputs of the projections of linear attention; first what may be at odd places.
DELTA = ("beta", "decay", "q", "k", "v", "gate")
SCALARS = {
    "alpha": "fp32", "limit": "fp32", "scale": "fp32", "softcap": "fp32", "clear": "i32",
    **dict.fromkeys(("eps", "offset", "q_eps", "k_eps", "q_offset", "k_offset"), "fp32"),
    **dict.fromkeys(
        ("hidden", "items_padded", "rows", "cols", "tiles", "groups", "first_tile", "sz", "super_at", "place",
         "first", "experts", "count", "flag",
         "total_rows", "query_head", "query_token", "key_head", "key_token", "value_head", "value_token",
         "tail_head", "keys_head", "values_head", "q_stride", "row_stride", "q_heads", "k_heads", "q_head",
         "q_token", "k_head", "k_token", "rows_0", "rows_1", "rows_2", "rows_3", "kv_heads",
         *(f"{name}_{part}" for name in DELTA for part in ("start", "stride"))), "i32"
    ),
}  # fmt: skip
POINTERS = {
    "pages": "*u8", "data": "*u8", "partial": "*fp32", "item_weight": "*fp32", "others": "*fp32",
    "stats": "*fp32", "table": "*fp32", "numbers": "*i64",
}  # fmt: skip
# Sizes that are multiples of 16 in all known models; the compiler gets this as a hint.
EVEN = ("hidden", "rows", "cols", "sz", "super_at", "keys_head", "values_head", "q_stride")
EVEN += ("row_stride", "q_head", "q_token", "k_head", "k_token", "rows_0", "rows_1", "rows_2", "rows_3")
EVEN += tuple(f"{name}_{part}" for name in DELTA[2:] for part in ("start", "stride"))
# Attention of known models, by name: kv_heads, group, key_dim, value_dim, then options.
ATTENTION = {
    "mixtral": (8, 4, 128, 128, {}),
    "qwen3": (4, 8, 128, 128, {}),
    "gpt-oss": (8, 8, 64, 64, {"window": 128}),
    "deepseek-heads": (16, 1, 192, 128, {}),
    "deepseek-v2-latents": (1, 16, 512, 512, {"tail_dim": 64, "shared": True}),
    "deepseek-v3-latents": (1, 128, 512, 512, {"tail_dim": 64, "shared": True}),
}
# Small steps of known models, and of the largest that are served: columns of a norm; elements of a head,
# angles, elements that they rotate; experts; scoring; experts of a token; whether a correction is added.
STEPS = {
    "qwen3": (2048, (128, 128, 128), 128, "softmax", 8, False),
    "gpt-oss": (2880, (64, 32, 64), 128, "softmax-chosen", 4, False),
    "glm": (4096, (128, 64, 64), 128, "sigmoid", 8, True),
    "largest": (16384, (256, 256, 256), 512, "sigmoid", 16, True),
}

# Linear attention by the gated delta rule: heads of keys and of values, their elements, taps.
DELTAS = {"qwen3": (16, 32, 128, 128, 4), "largest": (2, 6, 256, 256, 4)}


def geometry_of(encoding):
    """Experts in an encoding such as 4 or 16h, or in kept ones: q4_k:q6_k for gate and up and for down."""
    kept = () if encoding[0].isdigit() else (tuple(encoding.split(":")),)
    half = WeightType.FP16 if encoding.endswith("h") else WeightType.BF16
    bits = nominal_bits(kept) if kept else int(encoding.rstrip("h"))
    sizes = (4096, 1536) if kept else (2880, 2880)
    gate = Gate(alpha=1.702, limit=7.0, offset=1.0)
    return ExpertGeometry(*sizes, 32, bits, half, gate, has_bias=True, kept=kept)


def build(kernel, constants, types, warps, capability, stages=None, even=EVEN):
    signature = {
        name: "constexpr"
        if name in constants
        else SCALARS.get(name) or types.get(name) or POINTERS.get(name, "*i32")
        for name in kernel.arg_names
    }
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in even]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(places[name],): value for name, value in constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps} if stages is None else {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=target, options=options)


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


def registers_of(built):
    """Registers of a thread, and bytes that it spills, as the assembler reports them; empty without one."""
    target = re.search(r"^\.target sm_(\w+)", built.asm["ptx"], re.MULTILINE)[1]
    knobs = triton.knobs.nvidia
    # Triton brings another one for Blackwell.
    assembler = knobs.ptxas_blackwell if int(target.rstrip("af")) >= 100 else knobs.ptxas
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(built.asm["ptx"])
        file.flush()
        command = [assembler.path, "-v", f"--gpu-name=sm_{target}", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"Used (\d+) registers", report)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    return {"registers": int(found[1]), "spilled": spilled}


def compile_attention(names, capabilities, dtype, results):
    """Kernels of attention; a name such as ``mixtral/8`` has packed keys, ``mixtral*3`` three tokens.

    ``mixtral@80`` is compiled for that capability alone, and its spilled registers are not counted, for which
    the assembler would run a second time.
    """
    for name in names:
        model, _, only = name.partition("@")
        model, _, tokens = model.partition("*")
        model, _, bits = model.partition("/")
        kv_heads, group, key_dim, value_dim, options = ATTENTION[model]
        shape = attention.AttentionShape(
            kv_heads, group, key_dim, value_dim, getattr(torch, dtype), packed=bool(bits), **options
        )
        count, sinks = int(tokens or 1), bool(options.get("window"))
        # Bytes of a head's packed rows are a multiple of 4 only.
        even = () if bits else ("key_head", "value_head", *EVEN)
        for capability in map(int, [only] if only else capabilities):
            cores = capability >= 80
            stages = attention.Launch.of(shape, count, tensor_cores=cores).stages
            for plan in attention.launches(shape, count, tensor_cores=cores, sinks=sinks):
                built = build(plan.kernel, plan.constants, plan.types, plan.warps, capability, stages, even)
                found = sizes_of(built) if only else {**sizes_of(built), **registers_of(built)}
                results[f"{plan.kernel.__name__} sm_{capability} {name}"] = found


def delta_of(k_heads, v_heads, k_dim, v_dim, taps):
    place = Rows(0, 0, k_dim)
    return GatedDelta(None, (), *[place] * 6, k_heads, v_heads, k_dim, v_dim, taps, eps=1e-6, index=0)


def compile_steps(names, capabilities, dtype, results):
    """Kernels of the small steps between the products."""
    kind = getattr(torch, dtype)
    for name, capability in itertools.product(names, map(int, capabilities)):
        columns, head, experts, scoring, chosen, corrected = STEPS[name]
        correction = torch.zeros(experts) if corrected else None
        rule = Rule(scoring, chosen, correction, True, 1.0, (0, 1, 2), kind, kind)
        norm = Norm(1e-6, 0.0, round_first=True)
        rows = (4 * columns, columns // 2, columns // 2)
        for plan in (
            *steps.launches(norm, columns, head, kind),
            *routing.launches(rule, columns, experts, kind),
            *layer_steps.launches(columns, rows, head, norm, kind, has_bias=name == "gpt-oss"),
            *(gated_delta.launches(delta_of(*DELTAS[name]), kind) if name in DELTAS else ()),
        ):
            built = build(plan.kernel, plan.constants, plan.types, plan.warps, capability)
            found = {**sizes_of(built), **registers_of(built)}
            results[f"{plan.kernel.__name__} {len(results)} sm_{capability} {name}"] = found


def main() -> None:
    """Arguments: capabilities, encodings as in :func:`geometry_of`, numbers of items, with commas; a type.

    No numbers of items: the kernels of packed dense layers, without and with a bias, for bits or encodings of
    GGUF files such as q4_k. ``attention`` in place of numbers of items: its kernels, for the models in place
    of encodings; ``steps``: likewise those of norms, rotary embedding and routers. The encoding "lookup":
    those that look pages up, for so many experts of a token, of 45 blocks.
    """
    capabilities, encodings, items = (argument.split(",") for argument in sys.argv[1:4])
    dtype = sys.argv[4]
    results = {}
    if encodings == ["lookup"]:
        for picks, capability in itertools.product(map(int, items), map(int, capabilities)):
            for plan in page_lookup.launches(picks, 45):
                built = build(plan.kernel, plan.constants, plan.types, plan.warps, capability)
                results[f"{plan.kernel.__name__} sm_{capability} {picks} experts"] = sizes_of(built)
    elif items == ["attention"]:
        compile_attention(encodings, capabilities, dtype, results)
    elif items == ["steps"]:
        compile_steps(encodings, capabilities, dtype, results)
    if encodings == ["lookup"] or items in (["attention"], ["steps"]):
        encodings = []
    elif items == [""]:
        for name, bias in itertools.product(encodings, (False, True)):
            bits = int(name) if name.isdigit() else name
            for plan in packed_linear.launches(bits, dtype, has_bias=bias):
                for capability in map(int, capabilities):
                    built = build(plan.kernel, plan.constants, plan.types, plan.warps, capability)
                    results[f"{plan.kernel.__name__} sm_{capability} {name}, bias {bias}"] = sizes_of(built)
        encodings = []
    for encoding in encodings:
        geometry = geometry_of(encoding)
        for count in map(int, items):
            for plan in launch.launches(geometry, count, dtype):
                for capability in map(int, capabilities):
                    name = f"{plan.kernel.__name__} sm_{capability} {encoding} bits, {count} items"
                    built = build(
                        plan.kernel,
                        plan.constants,
                        plan.types,
                        plan.warps,
                        capability,
                    )
                    results[name] = sizes_of(built)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
