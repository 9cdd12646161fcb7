"""Answers of a hub that never end, come byte by byte, are compressed, or lead in circles."""

from __future__ import annotations

import time

import pytest
from cli_support import Cli
from hub_server import REPOSITORY, Faults, Hub
from library_support import wait_until

from moechat.fetch import bounded
from moechat.fetch.bounded import MAX_ANSWER_BYTES

MIB = 1 << 20


def refused(program: Cli, hub: Hub, *, status: int, within_s: float, most_bytes: int = 8 * MIB) -> str:
    """The error of a download, which must come in time; the hub can have sent so many bytes."""
    start = time.monotonic()
    done = program.call("download", REPOSITORY)
    seconds = time.monotonic() - start
    hub.faults = Faults()  # ends what never ends
    wait_until(lambda: not hub.sending)
    assert done.status == status, done.err
    assert "error: " in done.err
    assert "MOECHAT_DEBUG" not in done.err
    assert seconds < within_s
    assert sum(request.sent for request in hub.requests) < most_bytes
    return done.err


def test_a_description_without_end_is_refused_at_its_limit(inside: Cli, hub: Hub) -> None:
    hub.faults = Faults(endless="model")
    # What the buffers of the connection hold counts too.
    error = refused(inside, hub, status=5, within_s=20, most_bytes=MAX_ANSWER_BYTES + 8 * MIB)
    assert "does not answer like a model hub: its answer has more than 32 MiB" in error
    assert "check HF_ENDPOINT" in error


def test_of_an_error_only_the_beginning_is_read(
    inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moechat.fetch.retry._FIRST_TRIES", 2)
    hub.faults = Faults(endless="error")
    assert "failed with status 500" in refused(inside, hub, status=5, within_s=10)


def test_bodies_of_redirects_are_not_read_and_circles_end(inside: Cli, hub: Hub) -> None:
    hub.faults = Faults(endless="redirect")
    assert "redirects" in refused(inside, hub, status=5, within_s=10)
    requests = [request for request in hub.requests if "/resolve/" in request.path]
    assert len(requests) <= 9
    hub.faults = Faults(circle=True)
    assert "redirects" in refused(inside, hub, status=5, within_s=10)


def test_a_file_that_is_longer_than_announced_is_refused_at_its_size(inside: Cli, hub: Hub) -> None:
    hub.faults = Faults(endless="file")
    error = refused(inside, hub, status=3, within_s=10)
    assert "on the server, the hub says" in error


@pytest.mark.parametrize("endless", ["model", "head"])
def test_an_answer_byte_by_byte_ends_in_time(
    inside: Cli, hub: Hub, endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "_ANSWER_S", 0.5)
    monkeypatch.setattr(bounded, "_HEAD_S", 0.5)
    hub.faults = Faults(endless=endless, pause_s=0.02)
    assert "stalled" in refused(inside, hub, status=5, within_s=5)


def test_a_head_byte_by_byte_over_a_reused_connection_ends_in_time(
    inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inside.call("download", REPOSITORY, "--dry-run").status == 0  # leaves connections open
    monkeypatch.setattr(bounded, "_HEAD_S", 0.5)
    hub.faults = Faults(endless="head", pause_s=0.02)
    assert "stalled" in refused(inside, hub, status=5, within_s=5)


def test_a_file_byte_by_byte_is_given_up_after_a_while(
    inside: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "_WINDOW_S", 0.2)
    monkeypatch.setattr("moechat.fetch.retry._MAX_OUTAGE_S", 1.0)
    hub.faults = Faults(endless="file", pause_s=0.02)
    assert "stalled" in refused(inside, hub, status=5, within_s=10)
    assert len([request for request in hub.requests if "/resolve/" in request.path]) > 1


def test_compressed_answers_are_refused(inside: Cli, hub: Hub) -> None:
    hub.faults = Faults(coding="gzip")
    assert "sends data as gzip, although" in refused(inside, hub, status=5, within_s=5)


def test_an_answer_of_many_small_values_is_refused(inside: Cli, hub: Hub) -> None:
    hub.say_raw = b"[" + b"{}," * (5 * MIB) + b"{}]"
    assert "does not answer like a model hub" in refused(
        inside, hub, status=5, within_s=10, most_bytes=64 * MIB
    )
