"""Saved conversations on the page, in a browser, with a real server and the demo model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser
from history_support import conversation
from serve_support import PATIENCE_S, ServerProcess, serving

from moechat.history.conversation import Turn
from moechat.history.session_database import Sessions, sessions_path

LAST = "document.querySelector('.message:last-child')"
ITEMS = "[...document.querySelectorAll('#conversations li')]"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a home of its own, which these tests share."""
    directory = tmp_path_factory.mktemp("page-history")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECHAT_HOME", str(directory / "home"))
        with serving(directory, "demo") as server:
            yield server


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as made:
        yield made
        assert made.problems == []


@pytest.fixture
def sessions(server: ServerProcess) -> Iterator[Sessions]:
    """The database, as a chat on the terminal opens it; empty."""
    with Sessions(sessions_path()) as sessions:
        for line in sessions.summaries():
            sessions.delete(line.key)
        yield sessions


def opened(tab: Browser, server: ServerProcess, place: str = "", width: int = 1280) -> None:
    leave(tab)  # another place on the same page would not load it anew
    tab.open(f"{server.url}/{place}", width=width)
    tab.until("document.querySelector('#model')?.options.length")
    tab.until("document.querySelector('#activity').textContent !== 'Connecting'")
    tab.run("document.querySelector('#temperature').value = '0'")
    tab.run("document.querySelector('#max_tokens').value = '8'")


def leave(tab: Browser) -> None:
    tab.call("Page.navigate", url="about:blank")
    tab.until("location.href === 'about:blank'")


def ask(tab: Browser, text: str) -> None:
    count = tab.run("document.querySelectorAll('.message').length")
    tab.run("document.querySelector('#prompt').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.until(f"document.querySelectorAll('.message').length === {count + 2}")
    tab.until("document.querySelector('#stop').hidden")


def turns_become(sessions: Sessions, key: int, questions: list[str]) -> list[Turn]:
    """Wait until a conversation has these questions."""
    found: list[Turn] = []
    for _ in range(PATIENCE_S * 20):
        found = sessions.get(key).turns
        if [turn.question for turn in found] == questions:
            return found
        time.sleep(0.05)
    raise AssertionError(found)


def press_button(tab: Browser, label: str) -> None:
    """Press a button of the conversation that is shown."""
    buttons = "[...document.querySelectorAll('#conversations button')]"
    tab.run(f"{buttons}.find(b => b.textContent === '{label}').focus()")
    tab.press("Enter")


def test_a_conversation_of_the_terminal_goes_on_in_the_page_and_back(
    tab: Browser, server: ServerProcess, sessions: Sessions
) -> None:
    kept = conversation(("Tell me of a fox.", "It is **red**."))
    kept.system = "Be brief."
    sessions.keep(kept)
    opened(tab, server)
    tab.until(f"{ITEMS}.length === 1")
    tab.run("document.querySelector('#conversations a').focus()")
    tab.press("Enter")
    tab.until("document.querySelectorAll('.message').length === 2")
    assert tab.run(f"{LAST}.querySelector('strong').textContent") == "red"
    assert tab.run("document.querySelector('#system').value") == "Be brief."
    assert tab.run("document.title").startswith("Tell me of a fox.")
    ask(tab, "And a dog?")
    turns = turns_become(sessions, kept.key or 0, ["Tell me of a fox.", "And a dog?"])
    assert turns[1].answer == tab.run(f"{LAST}.querySelector('.body').textContent")
    assert (turns[1].mark, turns[1].model) == ("cut", "demo")
    # The terminal goes on meanwhile; the page sees it when people return to it.
    kept = sessions.get(kept.key or 0)
    kept.add(Turn("And a cat?", "Grey.", model="demo"))
    sessions.keep(kept)
    tab.run("window.dispatchEvent(new Event('focus'))")
    tab.until("document.querySelectorAll('.message').length === 6")
    assert tab.run(f"{LAST}.querySelector('.body').textContent") == "Grey."
    # Opened anew by its address.
    opened(tab, server, f"#c{kept.key}")
    tab.until("document.querySelectorAll('.message').length === 6")


def test_a_conversation_of_the_page_is_on_the_terminal(
    tab: Browser, server: ServerProcess, sessions: Sessions
) -> None:
    opened(tab, server)
    ask(tab, "Hello there")
    tab.until("location.hash.startsWith('#c')")
    (line,) = sessions.summaries()
    assert (line.title, line.turns) == ("Hello there", 1)
    assert tab.run("location.hash") == f"#c{line.key}"
    # Answered again: the terminal has the new answer only.
    tab.run("document.querySelector('#temperature').value = '5'")
    tab.run(f"[...{LAST}.querySelectorAll('button')].find(b => b.textContent === 'Answer again').click()")
    for _ in range(PATIENCE_S * 20):
        found = sessions.get(line.key, all_turns=True).turns
        if len(found) == 2:
            break
        time.sleep(0.05)
    assert [turn.key for turn in sessions.get(line.key).turns] == [found[1].key]
    # The last question is edited.
    tab.until("document.querySelector('#stop').hidden")
    tab.run("[...document.querySelectorAll('.user button')].find(b => b.textContent === 'Edit').click()")
    tab.type(", again")
    tab.press("Enter")
    turns_become(sessions, line.key, ["Hello there, again"])
    assert sessions.get(line.key).title == "Hello there, again"


def test_conversations_are_renamed_copied_found_and_deleted_with_the_keyboard(
    tab: Browser, server: ServerProcess, sessions: Sessions
) -> None:
    for question in ("a fox", "a dog"):
        sessions.keep(conversation((question, "in the garden"), ("more", "x")))
    opened(tab, server, "#c" + str(sessions.summaries()[1].key))
    fox = sessions.summaries()[1].key
    tab.until("document.querySelector('#conversations .current')")
    press_button(tab, "Rename")
    tab.until("document.querySelector('#rename').open")
    tab.type("Of foxes")
    tab.press("Enter")
    tab.until("document.querySelector('#conversations .current .title').textContent === 'Of foxes'")
    assert sessions.get(fox).title == "Of foxes"
    # The focus stays with the button.
    tab.until("document.activeElement.textContent === 'Rename'")
    # A copy up to the first answer.
    tab.run("[...document.querySelectorAll('[data-fork]')].find(b => b.textContent === 'Fork here').click()")
    tab.until(f"location.hash !== '#c{fox}'")
    tab.until("document.querySelectorAll('.message').length === 2")
    copied = int(tab.run("location.hash.slice(2)"))
    assert [turn.question for turn in sessions.get(copied).turns] == ["a fox"]
    # Back, as in any page.
    tab.run("history.back()")
    tab.until("document.querySelectorAll('.message').length === 4")
    tab.run("document.querySelector('#search').focus()")
    tab.type("dog garden")
    tab.until(f"{ITEMS}.length === 1")
    tab.until("document.querySelector('#status').textContent === '1 found'")
    assert "garden" in tab.run("document.querySelector('#conversations .found').textContent")
    tab.run("document.querySelector('#conversations a').focus()")
    tab.press("Enter")
    tab.until("document.querySelector('#conversations .current')")
    dog = int(tab.run("location.hash.slice(2)"))
    press_button(tab, "Delete")
    tab.until("document.querySelector('#delete').open")
    # Enter keeps it: the focus is on the button that changes nothing.
    tab.press("Enter")
    tab.until("!document.querySelector('#delete').open")
    assert sessions.get(dog).key == dog
    press_button(tab, "Delete")
    tab.until("document.querySelector('#delete').open")
    tab.run("document.querySelector('#delete [type=submit]').focus()")
    tab.press("Enter")
    tab.until("document.querySelector('#history-note').textContent === 'Nothing found.'")
    assert sorted(line.key for line in sessions.summaries()) == sorted([fox, copied])
    assert tab.run("document.querySelectorAll('.message').length") == 0
    assert tab.run("location.hash") == ""


def left_while_answering(tab: Browser, server: ServerProcess, sessions: Sessions) -> Turn:
    """The turn that is kept when the page closes after the first words of an answer of 900 tokens."""
    known = {line.key for line in sessions.summaries()}
    opened(tab, server)
    tab.run(
        "window.realFetch = fetch; "
        "window.more = {max_tokens: 900, logit_bias: {'0': -100}}; "
        "window.slow = (body) => JSON.stringify({...JSON.parse(body), ...more}); "
        "window.fetch = (path, options) => realFetch(path, path.includes('/v1/')"
        " ? {...options, body: slow(options.body)} : options)"
    )
    tab.run("document.querySelector('#prompt').focus()")
    tab.type("Tell me a story.")
    tab.press("Enter")
    tab.until(f"{LAST}?.querySelector('.body').textContent.length > 20")
    leave(tab)
    for _ in range(PATIENCE_S * 20):
        if lines := [line for line in sessions.summaries() if line.key not in known]:
            break
        time.sleep(0.05)
    (turn,) = sessions.get(lines[0].key).turns
    return turn


def test_what_was_written_is_kept_when_the_page_closes(
    tab: Browser, server: ServerProcess, sessions: Sessions
) -> None:
    # The demo takes two seconds for 900 tokens: on a busy machine it may be done before the page has left.
    turns: list[Turn] = []
    while len(turns) < 5 and "stopped" not in (turn.mark for turn in turns):
        turns.append(left_while_answering(tab, server, sessions))
    assert turns[-1].mark == "stopped"
    assert len(turns[-1].answer) > 20


def test_on_a_narrow_screen_the_list_opens_over_the_chat(
    tab: Browser, server: ServerProcess, sessions: Sessions
) -> None:
    sessions.keep(conversation(("a fox", "x" * 300)))
    opened(tab, server, width=360)
    hidden = "document.querySelector('#history').hidden"
    assert tab.run(hidden) is True
    tab.run("document.querySelector('#history-toggle').focus()")
    tab.press("Enter")
    assert tab.run("document.activeElement.id") == "search"
    assert tab.run("document.querySelector('#history-toggle').getAttribute('aria-expanded')") == "true"
    assert tab.run("document.querySelector('#chat').inert") is True
    tab.press("Escape")
    assert tab.run(hidden) is True
    assert tab.run("document.activeElement.id") == "history-toggle"
    assert tab.run("document.querySelector('#chat').inert") is False
    tab.press("Enter")
    tab.run("document.querySelector('#conversations a').click()")
    tab.until("document.querySelectorAll('.message').length === 2")
    assert tab.run(hidden) is True
    assert tab.run("document.documentElement.scrollWidth") <= 360


def test_a_conversation_too_long_for_the_model_goes_on_without_its_oldest_messages(
    tab: Browser, server: ServerProcess, sessions: Sessions
) -> None:
    kept = conversation(*((f"question {n} " + "word " * 100, "answer") for n in range(12)))
    sessions.keep(kept)
    opened(tab, server, f"#c{kept.key}")
    tab.until("document.querySelectorAll('.message').length === 24")
    ask(tab, "Short?")
    tab.problems[:] = [problem for problem in tab.problems if "400" not in problem]
    assert "tokens" in tab.run(f"{LAST}.querySelector('.note').textContent")
    assert tab.run("document.querySelectorAll('.left-out').length") > 2
    assert "no longer fit" in tab.run("document.querySelector('.left-out-note').textContent")
    assert (
        len(turns_become(sessions, kept.key or 0, [turn.question for turn in kept.turns] + ["Short?"])) == 13
    )


def test_without_history_conversations_stay_in_the_page(tab: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, "demo", "--no-save") as server:
        opened(tab, server)
        assert "saves no conversations" in tab.run("document.querySelector('#history-note').textContent")
        assert "until you close" in tab.run("document.querySelector('#empty-text').textContent")
        ask(tab, "Hello")
        tab.until(f"{ITEMS}.length === 1")
        tab.run("document.querySelector('#new').click()")
        ask(tab, "Again")
        tab.until(f"{ITEMS}.length === 2")
        tab.run(f"{ITEMS}[1].querySelector('a').click()")
        tab.until("document.querySelector('.user .body').textContent === 'Hello'")
        opened(tab, server, "#c1")
        assert tab.run(f"{ITEMS}.length") == 0
        assert tab.run("document.querySelectorAll('.message').length") == 0
        assert tab.run("Object.values(localStorage).concat(Object.values(sessionStorage))") == []
