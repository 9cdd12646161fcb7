"""What a decoded token costs the host, with kernels and graphs left out (see ``host_time.py``)."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from host_time import measure

# Layers, experts, blocks and picks of Qwen3-30B-A3B, cut to 16 layers.
SHAPE = (16, 128, 12, 8)


def test_a_token_with_all_experts_resident_is_two_graphs_and_one_wait(driver: object) -> None:
    driver.reset()
    found = measure(driver, SHAPE, 1.0, way="ahead", tokens=6)
    assert (found["graphs"], found["kernels"], found["waits"], found["copies"]) == (2, 0, 1, 0)


def test_a_layer_whose_experts_are_resident_is_not_copied_to_the_host(driver: object) -> None:
    driver.reset()
    host = measure(driver, SHAPE, 0.9, way="python", tokens=24)
    ahead = measure(driver, SHAPE, 0.9, way="ahead", tokens=24)
    assert host["copies"] == SHAPE[0]
    assert ahead["copies"] <= SHAPE[0] / 3
    # Far less than the host's part: a layer that is looked up costs a call or two.
    assert ahead["us"] < host["us"]
    assert ahead["us"] / SHAPE[0] < 60


def test_layers_that_lack_a_block_every_other_time_cost_no_launches_of_graphs_in_vain(driver: object) -> None:
    driver.reset()
    host = measure(driver, SHAPE, 0.5, way="host", tokens=24)
    ahead = measure(driver, SHAPE, 0.5, way="ahead", tokens=24)
    assert ahead["graphs"] <= host["graphs"] + 4
