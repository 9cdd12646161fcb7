"""Stopping a transfer from another thread."""

from __future__ import annotations

import socket
import threading

import pytest

from moechat.fetch.stop_switch import StopSwitch, TransferStopped

PATIENCE_S = 60


class Stream:
    """A network stream of the HTTP client, as far as it matters."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def get_extra_info(self, name: str) -> object:
        return self.connection if name == "socket" else None


@pytest.mark.parametrize("known_before", [True, False])
def test_stop_wakes_a_read_whenever_its_socket_becomes_known(known_before: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        received: list[bytes] = []
        reader = threading.Thread(target=lambda: received.append(ours.recv(1)))
        reader.start()
        switch = StopSwitch()
        if known_before:
            switch.trace("connection.connect_tcp.complete", {"return_value": Stream(ours)})
        switch.stop()
        if not known_before:
            assert reader.is_alive()
            switch.watch(Stream(ours))
        reader.join(PATIENCE_S)
        assert received == [b""]


def test_nothing_starts_after_stop() -> None:
    switch = StopSwitch()
    switch.check()
    switch.sleep(0)
    switch.stop()
    with pytest.raises(TransferStopped):
        switch.check()
    with pytest.raises(TransferStopped):
        switch.sleep(PATIENCE_S)
