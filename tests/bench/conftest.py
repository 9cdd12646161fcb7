"""A tiny synthetic model, loaded once, and a trace that fits it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_config

import moechat
from moechat.bench.synthetic_models import Shape, synthetic_store
from moechat.engine import Engine
from moechat.offload.settings import OffloadOptions
from moechat.routing import Trace


def tiny_shape() -> Shape:
    """Three layers of eight experts with two blocks each."""
    config = tiny_config("qwen3_moe", 0, num_hidden_layers=3)
    return Shape("tiny", 3, 3, 101, 101, config)


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_store(tiny_shape(), tmp_path_factory.mktemp("synthetic")).path


@pytest.fixture(scope="session")
def engine(tiny_store: Path) -> Engine:
    return moechat.load(tiny_store, offload=OffloadOptions(pages=0))


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded trace of another shape: 5 layers of 6 experts, 3 a token."""
    generator = np.random.default_rng(0)
    experts = generator.random((60, 5, 6)).argsort(axis=-1)[..., :3].astype(np.int32)
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    Trace(experts, np.array([0, 7, 60]), 6).write(path)
    return path
