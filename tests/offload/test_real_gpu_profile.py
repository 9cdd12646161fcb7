"""Measures the GPU of this machine; plausible figures, in time, and nothing kept."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_this_machines_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from moechat import _native
    from moechat.hardware.gpu import find_gpus
    from moechat.hardware.measure import measure
    from moechat.hardware.measure_budget import Budget
    from moechat.offload.cuda_card import open_card

    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    device = find_gpus().best
    assert device is not None
    short = Budget(
        scratch_bytes=64 << 20,
        link_seconds=0.05,
        latency_seconds=0.01,
        stream_seconds=0.1,
        compute_seconds=0.05,
        many_seconds=0.02,
        together_seconds=0.05,
    )
    free = _native.cuda_memory(0)[0]
    found = measure(budget=short, open_card=open_card)
    assert {part: why for part, why in found.missing.items() if "gpu" in part or "pinned" in part} == {}
    profile = found.profile
    gpu, link = profile.gpu, profile.links["gpu"]
    assert gpu is not None
    assert gpu.capability == device.capability
    if device.memory_bandwidth is not None:
        assert 0.6 < gpu.bandwidth.value / device.memory_bandwidth < 1.02
    # 16 lanes of generation 6 carry 121 GB/s.
    largest = link.bandwidth[max(link.bandwidth)].value
    assert 1e9 < largest < 125e9
    assert link.latencies[64 << 10].value < 1e-3
    assert link.together is not None
    assert link.together.value <= largest
    assert max(link.staged.values(), key=lambda figure: figure.value).value < 1.05 * largest
    assert 1e-6 < gpu.launch.value < 100e-6
    assert gpu.graph_node is not None
    assert gpu.graph_node.value < gpu.launch.value
    for bits in (2, 3, 4, 6, 8, 16):
        rates = gpu.expert_rate[bits]
        # Blocks come from memory: a rate above it means that a cache was measured.
        assert 0.02 < rates[1].value / gpu.bandwidth.value < 1.1, bits
        flops = gpu.expert_flops[bits]
        assert flops[512].value > flops[1].value
        assert flops[512].value < 1.2 * gpu.flops.value
    for bits in (16, 8, 4):
        assert gpu.dense_rate[bits].value < 1.1 * gpu.bandwidth.value
    assert link.pinned is not None
    assert link.pinned.value >= 256 << 20
    # What measuring took is given back, but for kernels and libraries.
    assert _native.cuda_memory(0)[0] > free - (1 << 30)
