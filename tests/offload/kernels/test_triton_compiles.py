"""The GPU kernels become machine code for every generation of GPUs, without a GPU."""

import json
import os
import subprocess
import sys

import pytest
from places import SUPPORT

pytest.importorskip("triton")

CHILD = SUPPORT / "compile_child.py"
# Shared memory that every generation since Turing gives a program.
MOST_SHARED = 64 * 1024


def compiled(capabilities: str, encodings: str, items: str, dtype: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(CHILD), capabilities, encodings, items, dtype],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_encoding_compiles_for_few_and_many_tokens():
    results = compiled("86", "2,3,4,6,8,16,16h", "1,40", "bfloat16")
    assert len(results) == 7 * (2 + 3)
    few = [one for name, one in results.items() if name.startswith("blocks ")]
    assert len(few) == 7
    # Codes are subnormal numbers, which must not be flushed to 0; loads take 16 bytes.
    assert all(one["conversions"] == one["flushing"] == one["spilled"] == 0 for one in few)
    assert all(one["wide_loads"] >= 16 for one in few)
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}


@pytest.mark.parametrize(("dtype", "capability"), [("float16", "75"), ("float32", "89")])
def test_other_types_compile(dtype, capability):
    results = compiled(capability, "4,16", "1,40", dtype)
    assert len(results) == 2 * (2 + 3)
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}


@pytest.mark.parametrize(
    ("dtype", "capabilities"), [("bfloat16", "86,120"), ("float16", "75"), ("float32", "90")]
)
def test_packed_dense_layers_compile(dtype, capabilities):
    results = compiled(capabilities, "4,6,8", "", dtype)
    assert len(results) == 3 * 2 * 2 * len(capabilities.split(","))
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}


def test_dense_layers_in_kept_encodings_compile():
    # Codes of one and of two planes, with a table of either kind, and every kind of scale words; grids of 8
    # and of 4 columns, with signs and with deltas.
    names = "q8_0,q5_1,q2_k,q3_k,q4_k,q6_k,iq4_xs,mxfp4,int4_32,nvfp4,fp8,iq2_xxs,iq3_s,iq1_m"
    results = compiled("86", names, "", "bfloat16")
    assert len(results) == 14 * 2 * 2
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}
    # E2M1 codes are subnormal numbers, which must not be flushed to 0.
    assert all(one["flushing"] == one["spilled"] == 0 for one in results.values())


# Few and many columns with a scale, one plane and two, with each table and without, a grid.
KEPT = ("iq2_xxs:q6_k", "q4_k:mxfp4", "int4_32:nvfp4")
OTHERS = ("q8_0:q8_0", "q5_1:q5_k", "iq4_xs:mxfp4", "q6_k:iq4_nl", "q3_k:q2_k", "q4_0:q4_1", "q5_k:q5_0")
OTHERS += ("nvfp4:int8", "q2_k:q3_k", "q4_k:q6_k", "mxfp4:q8_0")
GRIDS = ("iq2_s:iq2_xs", "iq3_s:iq1_m", "iq1_s:iq3_xxs", "iq1_m:iq2_xxs")


def check_kept(capability, pairs, items):
    dtype = "float16" if capability == "75" else "bfloat16"
    results = compiled(capability, ",".join(pairs), items, dtype)
    few = {name: one for name, one in results.items() if name.startswith("blocks ")}
    assert len(few) >= len(pairs)
    assert all(one["flushing"] == 0 for one in few.values())
    # Q6_K beside the table of IQ4 needs more registers than a thread has where the compiler is of Blackwell.
    most = 72 if capability == "120" else 32
    assert {name: one for name, one in few.items() if one["spilled"] > most} == {}
    assert all(one["wide_loads"] >= 16 for one in few.values())
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}


def test_experts_in_kept_encodings_compile():
    check_kept("86", KEPT, "1")
    check_kept("86", KEPT[:1], "3,40")


# Every pair for one generation: all for each would take a quarter of an hour.
@pytest.mark.slow
@pytest.mark.parametrize(("number", "capability"), list(enumerate(["75", "86", "90", "120"])))
def test_experts_in_every_encoding_compile(number, capability):
    pairs = (*KEPT, *OTHERS, *GRIDS)
    check_kept(capability, pairs[number::4], "1,3,40")


def test_lookups_of_pages_compile():
    results = compiled("75,90,120", "lookup", "1,8", "float32")
    assert len(results) == 3 * 2 * 2
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}


@pytest.mark.parametrize(
    ("dtype", "capabilities"), [("bfloat16", "86,120"), ("float16", "75"), ("float32", "90")]
)
def test_small_steps_compile_without_spilled_registers(dtype: str, capabilities: str) -> None:
    results = compiled(capabilities, "qwen3,gpt-oss,glm,largest", "steps", dtype)
    # And linear attention, of two of the models.
    assert len(results) == (4 * 15 + 2 * 3) * len(capabilities.split(","))
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}
    assert {name: one for name, one in results.items() if one["spilled"]} == {}
    if dtype != "float32":
        wide = [one["wide_loads"] for name, one in results.items() if name.startswith("rms_norm")]
        assert min(wide) >= 2, "rows and weights are read 16 bytes at a time"


@pytest.mark.parametrize(
    ("dtype", "capability", "models"),
    [
        ("bfloat16", "86", "mixtral,gpt-oss,mixtral/8"),
        ("bfloat16", "120", "deepseek-v2-latents,qwen3*8"),
        ("float16", "75", "mixtral,deepseek-v2-latents/8"),
        ("float32", "90", "deepseek-heads"),
    ],
)
def test_attention_compiles_without_spilled_registers(dtype: str, capability: str, models: str) -> None:
    results = compiled(capability, models, "attention", dtype)
    assert len(results) == 3 * len(models.split(","))
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}
    assert {name: one for name, one in results.items() if one["spilled"]} == {}


MODELS = ("mixtral", "qwen3", "gpt-oss", "deepseek-heads", "deepseek-v2-latents", "deepseek-v3-latents")
EVERY = [f"{model}{form}" for model in MODELS for form in ("", "/8", "*4")]
# Each has matrix instructions of its own: none, those of warps, those of groups of warps.
GENERATIONS = {"float16-75": ("75",), "bfloat16-80,89,120": ("80", "89", "120"), "bfloat16-90": ("90",)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GENERATIONS)
def test_attention_of_every_shape_compiles_for_every_generation(kind: str) -> None:
    # Where generations have the same instructions they share the shapes, each with every model and form.
    alike = GENERATIONS[kind]
    names = [f"{name}@{alike[(place // 3 + place) % len(alike)]}" for place, name in enumerate(EVERY)]
    results = compiled(alike[0], ",".join(names), "attention", kind.partition("-")[0])
    assert len({key.partition("sm_")[2].partition("@")[0] for key in results}) == len(EVERY)
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}


@pytest.mark.slow
def test_old_and_new_generations_compile_any_number_of_tokens():
    results = compiled("75,90,120", "4", "1,8,16,64", "bfloat16")
    assert len(results) == 3 * (2 * 2 + 2 * 3)
    assert {name: one for name, one in results.items() if one["shared"] > MOST_SHARED} == {}
