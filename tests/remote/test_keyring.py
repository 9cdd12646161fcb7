"""Keys from the system's keyring: used where no variable has one, and never in the way."""

from __future__ import annotations

from collections.abc import Iterator

import keyring
import pytest
from keyring.backend import KeyringBackend
from keyring.errors import KeyringLocked

from moechat.errors import UsageError
from moechat.remote.keys import VARIABLE, api_key

HOST = "gpu-box:8000"


class Memory(KeyringBackend):
    """A keyring of this process."""

    priority = 1  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[str, str], str] = {}
        self.locked = False

    def get_password(self, service: str, username: str) -> str | None:
        if self.locked:
            raise KeyringLocked("the user has closed it")
        return self.kept.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.kept[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        del self.kept[service, username]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.delenv(VARIABLE, raising=False)
    before, memory = keyring.get_keyring(), Memory()
    keyring.set_keyring(memory)
    yield memory
    keyring.set_keyring(before)


def test_the_key_of_a_host_comes_from_the_keyring(kept: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring.set_password("moechat", HOST, "from-the-keyring")  # as `keyring set moechat HOST` does
    assert api_key(HOST) == "from-the-keyring"
    assert api_key("other:8000") == ""
    monkeypatch.setenv(VARIABLE, "from-the-variable")
    assert api_key(HOST) == "from-the-variable"
    monkeypatch.setenv("MY_KEY", "of-this-server")
    assert api_key(HOST, "MY_KEY") == "of-this-server"


def test_a_locked_keyring_counts_as_one_without_the_key(kept: Memory) -> None:
    keyring.set_password("moechat", HOST, "from-the-keyring")
    kept.locked = True
    assert api_key(HOST) == ""


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(kept: Memory) -> None:
    keyring.set_password("moechat", HOST, "two words")
    with pytest.raises(UsageError, match=f"keyring's entry for {HOST}") as error:
        api_key(HOST)
    assert "two words" not in str(error.value)
