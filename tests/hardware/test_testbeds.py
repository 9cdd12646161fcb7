"""The machines of papers: what a paper states is taken from it, and nobody is offered them as PCs."""

from __future__ import annotations

import re
import tomllib

import numpy as np
import pytest
from places import ROOT
from profile_rates import rewritten

from moechat.configurator.estimate import costs_of
from moechat.hardware.known_gpus import known_gpus
from moechat.hardware.profile_file import read_profile, reference_names
from moechat.routing.trace import Trace
from moechat.simulate.simulated_model import model_for

TESTBEDS = ROOT / "profiles" / "testbeds"
GB = 1e9
# As stated: GB/s of the link, GiB of RAM (None: not stated). Data sheets: GiB of VRAM, GB/s of it, dense
# 16-bit TFLOPS.
STATED = {
    "a6000-moepic": (32, 512, 48, 768, 154.8),
    "a5000-moe-infinity": (32, 1024, 24, 768, 111.1),
    "rtx3090-finemoe": (32, 480, 24, 936, 71),
    "rtx4090-melinoe": (32, 270, 24, 1008, 165.2),
    "h20-expertflow": (128, None, 96, 4000, 148),
}


def test_all_testbeds_are_checked_and_none_is_offered_as_a_machine_to_buy() -> None:
    assert sorted(STATED) == sorted(path.stem for path in TESTBEDS.glob("*.toml"))
    assert not set(STATED) & set(reference_names())
    assert not any("A6000" in name or "A5000" in name or "H20" in name for name in known_gpus())


@pytest.mark.parametrize("name", STATED)
def test_what_the_paper_states_is_taken_from_it_and_the_rest_says_where_it_is_from(name: str) -> None:
    link, ram, vram, bandwidth, tflops = STATED[name]
    path = TESTBEDS / f"{name}.toml"
    profile = read_profile(path)
    assert profile.gpu is not None
    largest = profile.links["gpu"].bandwidth[256 << 20]
    assert (largest.value, largest.origin) == (link * GB, "published")
    assert "stated" in largest.source or "states" in largest.source
    if ram is not None:
        assert (profile.ram.value, profile.ram.origin) == (ram << 30, "published")
    else:
        assert profile.ram.origin == "estimate"
    gpu = profile.gpu
    assert 0.97 * vram <= gpu.vram.value / (1 << 30) <= vram
    assert 0.85 * bandwidth <= gpu.bandwidth.value / GB <= bandwidth
    assert 0.5 * tflops <= gpu.flops.value / 1e12 <= tflops
    paper = tomllib.loads(path.read_text("utf-8"))["sources"]["paper"]
    assert re.search(r"section|appendix|table", paper)


@pytest.mark.parametrize("name", STATED)
def test_cpu_rates_are_those_of_their_derivation(name: str) -> None:
    text = (TESTBEDS / f"{name}.toml").read_text(encoding="utf-8")
    assert rewritten(name, text) == text, "run scripts/bench/profile_rates.py"


def test_costs_follow_the_stated_link() -> None:
    profile = read_profile(TESTBEDS / "a6000-moepic.toml")
    trace = Trace(np.zeros((1, 1, 1), dtype=np.int32), np.array([0, 1]), 1)
    shape = model_for("mixtral-8x7b", trace, 2).on("gpu").shape
    assert costs_of(profile, shape, near="gpu").load == pytest.approx(shape.expert_bytes / 32e9, rel=0.02)
