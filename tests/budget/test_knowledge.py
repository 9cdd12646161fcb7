"""What loading on a GPU takes its plan from: measured figures, or assumed ones with a notice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import one_gpu_here

from moechat.budget.knowledge import Knowledge, gather
from moechat.configurator.estimate import ModelShape, costs_of
from moechat.errors import MoechatWarning
from moechat.hardware import identity as identity_room
from moechat.hardware.known_gpus import gpu_machine
from moechat.hardware.measured_file import Measurement, save_measurement
from moechat.hardware.profile import Figure, HardwareProfile
from moechat.hardware.profile_file import reference_profile

SHAPE = ModelShape(
    layers=2,
    experts=8,
    top_k=2,
    bits=4,
    block_bytes=1 << 20,
    blocks_per_expert=4,
    expert_weights=1 << 23,
    dense_bytes=1 << 26,
    head_bytes=1 << 24,
    dense_itemsize=2,
    kv_bytes=4096,
    hidden_size=2048,
)


@pytest.fixture(autouse=True)
def _gpu_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    with one_gpu_here(monkeypatch):
        yield


def gathered() -> Knowledge:
    return gather(
        SHAPE,
        "mixtral",
        "fingerprint",
        "lru",
        dtype="bfloat16",
        threads=2,
        dense_bits=16,
        dense_bytes=1000,
        activation_bits=16,
        kv_bits=16,
        near="gpu",
        in_ram=1.0,
    )


def machine(*, measured: bool) -> HardwareProfile:
    """A profile of this machine, whose link was measured or not."""
    found = replace(reference_profile("rtx3060-12g"), key=identity_room.this_machine().key)
    link = found.links["gpu"]
    if not measured:
        return replace(found, links={"file": found.links["file"]})
    bandwidth = {size: Figure(rate.value, "measured", "") for size, rate in link.bandwidth.items()}
    return replace(found, links={**found.links, "gpu": replace(link, bandwidth=bandwidth)})


def test_a_gpu_that_was_not_measured_is_planned_with_assumed_figures_and_a_notice() -> None:
    with pytest.warns(MoechatWarning, match="RTX 3060 has not been measured.*moechat profile --refresh"):
        found = gathered()
    assert found.costs_from == "assumed"
    here = gpu_machine()
    assert here is not None
    assert found.costs == costs_of(here, SHAPE, near="gpu")


def test_a_profile_without_the_link_is_completed_with_assumed_figures() -> None:
    save_measurement(Measurement(machine(measured=False)))
    with pytest.warns(MoechatWarning, match="rests on assumed figures"):
        found = gathered()
    assert found.costs_from == "assumed"


def test_a_measured_gpu_is_planned_as_moechat_plan_plans_it() -> None:
    profile = machine(measured=True)
    save_measurement(Measurement(profile))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gathered()
    assert found.costs_from == "the machine's profile"
    assert found.costs == costs_of(profile, SHAPE, near="gpu")


def test_loading_counts_with_experts_that_cannot_be_pinned() -> None:
    profile = machine(measured=True)
    staged = {1 << 22: Figure(3e9, "measured", "")}
    pinned = Figure(SHAPE.all_expert_bytes / 2, "measured", "")
    links = {**profile.links, "gpu": replace(profile.links["gpu"], staged=staged, pinned=pinned)}
    refusing = replace(profile, links=links)
    save_measurement(Measurement(refusing))
    load = gathered().costs.load
    assert load == costs_of(refusing, SHAPE, near="gpu").load
    assert load > 1.5 * costs_of(profile, SHAPE, near="gpu").load
