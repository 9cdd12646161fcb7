"""Fixtures of the library tests: a hub on this machine with a tiny real model, and the real program."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import Cli
from hub_checkpoint import write_hub_checkpoint
from hub_server import REPOSITORY, Hub


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random chat model of five layers in several shards, with a model card and files not to load."""
    directory = tmp_path_factory.mktemp("hub") / "moe-chat"
    write_hub_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def served(checkpoint: Path) -> Iterator[Hub]:
    with Hub().running() as hub:
        hub.add(REPOSITORY, checkpoint)
        yield hub


@pytest.fixture
def hub(served: Hub) -> Iterator[Hub]:
    """The hub, without faults and without earlier requests."""
    served.reset()
    yield served
    served.reset()


@pytest.fixture(scope="session")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the store that converting the directory gives."""
    from library_support import Reference

    from moechat.calibration.calibration import calibration_of
    from moechat.models.checkpoint_mapping import plan_checkpoint
    from moechat.store.checkpoint import Checkpoint
    from moechat.store.convert import convert

    opened = Checkpoint.open(checkpoint)
    destination = tmp_path_factory.mktemp("reference") / "store"
    plan = plan_checkpoint(opened)
    calibration = calibration_of(opened, plan, 4, pytest.fail)
    assert calibration is not None
    convert(opened, plan, destination, bits=4, source_name="reference", calibration=calibration)
    return Reference(destination)


@pytest.fixture(scope="session")
def hf_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of huggingface_hub, which reads its place at import: one for all programs of a fork server."""
    return tmp_path_factory.mktemp("hf") / "home"


@pytest.fixture
def program(tmp_path: Path, hub: Hub, hf_home: Path) -> Cli:
    """The program with an empty library, connected to the hub."""
    shutil.rmtree(hf_home, ignore_errors=True)
    work = tmp_path / "work"
    work.mkdir()
    return Cli(
        directory=work,
        home=tmp_path / "home",
        extra={
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(hf_home),
            "HF_TOKEN": "",
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "NO_PROXY": "127.0.0.1",
        },
    )


@pytest.fixture
def inside(program: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The same for :meth:`Cli.call`: huggingface_hub has read the variables of this process long ago."""
    from huggingface_hub import close_session, constants

    from moechat.calibration import duration
    from moechat.fetch import retry

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.4)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", program.extra["HF_HOME"] + "/hub")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", program.extra["HF_HOME"] + "/token")
    monkeypatch.setattr(retry, "_FIRST_WAIT_S", 0.01)
    # A plan times samples of the conversion: small ones do here.
    for name, size in (("_NEURONS", 64), ("_COLUMNS", 256), ("_TOKENS", 64)):
        monkeypatch.setattr(duration, name, size)
    monkeypatch.setattr(retry, "_MAX_OUTAGE_S", 20.0)  # a busy machine may be as slow as a bad hub
    close_session()
    return program
