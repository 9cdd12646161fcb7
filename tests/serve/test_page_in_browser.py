"""The page in a browser, with a real server and the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser
from serve_support import ServerProcess, serving

KEY = "secret-key-1234567890"
LAST = "document.querySelector('.message:last-child')"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key."""
    directory = tmp_path_factory.mktemp("page-key")
    (directory / "key.txt").write_text(KEY)
    with serving(directory, "demo", "--api-key-file", str(directory / "key.txt")) as server:
        yield server


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as made:
        yield made
        assert made.problems == []


def ask(tab: Browser, text: str) -> None:
    tab.run("document.querySelector('#prompt').focus()")
    tab.type(text)
    tab.press("Enter")


def opened(tab: Browser, server: ServerProcess, width: int = 1280) -> None:
    tab.open(f"{server.url}/", width=width)
    tab.until("document.querySelector('#model')?.options.length")


def test_a_chat_in_a_browser(tab: Browser, demo: ServerProcess) -> None:
    opened(tab, demo)
    tab.run("document.querySelector('#temperature').value = '0'")
    tab.run("document.querySelector('#max_tokens').value = '30'")
    ask(tab, "Tell me a story about a fox.")
    tab.until(f"{LAST}?.querySelector('.note').textContent.startsWith('30 tokens')")
    first = tab.run(f"{LAST}.querySelector('.body').textContent")
    assert first.startswith("Once upon a time")
    assert tab.run("document.activeElement.id") == "prompt"
    # Spoken once, at the end.
    assert first in tab.run("document.querySelector('#status').textContent")
    tab.run(f"[...{LAST}.querySelectorAll('button')].find(b => b.textContent === 'Answer again').click()")
    tab.until("!document.querySelector('#stop').hidden")
    tab.until("document.querySelector('#stop').hidden")
    assert tab.run(f"{LAST}.querySelector('.body').textContent") == first
    # The last question is edited, and asked again in its place.
    tab.run("[...document.querySelectorAll('.user button')].find(b => b.textContent === 'Edit').click()")
    assert tab.run("document.querySelector('#prompt').value") == "Tell me a story about a fox."
    tab.press("Escape")
    assert tab.run("document.querySelectorAll('.message').length") == 2
    tab.run("[...document.querySelectorAll('.user button')].find(b => b.textContent === 'Edit').click()")
    tab.press("Enter", shift=True)
    tab.type("And a dog.")
    tab.press("Enter")
    tab.until("document.querySelector('#send').hidden")
    tab.until("document.querySelector('#stop').hidden")
    assert tab.run("document.querySelectorAll('.message').length") == 2
    assert tab.run("document.querySelector('.user .body').textContent").endswith("fox.\nAnd a dog.")
    # The machine at work beside it.
    assert tab.run("document.querySelector('#map').getAttribute('aria-label')").startswith("128 experts")
    # Its states come a few times a second, on their own.
    tab.until("document.querySelector('#activity').textContent.includes('tokens/s')")
    tab.run("document.querySelector('#new').click()")
    assert tab.run("document.querySelectorAll('.message').length") == 0
    assert all(address.startswith(demo.url) for address in tab.addresses)
    assert any(address.endswith("/moechat/state/stream") for address in tab.addresses)


def test_escape_stops_an_answer(tab: Browser, demo: ServerProcess) -> None:
    opened(tab, demo)
    # Without room between tokens the demo would be done first.
    tab.run(
        "window.realFetch = fetch; window.fetch = (path, options) => realFetch(path, options.body ? {"
        "...options, body: JSON.stringify({...JSON.parse(options.body), logit_bias: {'0': -100}})} : options)"
    )
    ask(tab, "Tell me a story.")
    tab.press("Escape")
    tab.until(f"{LAST}?.querySelector('.note').textContent === 'Stopped'")
    assert tab.run("document.querySelector('#stop').hidden")
    demo.wait_idle()


def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(tab: Browser, guarded: ServerProcess) -> None:
    tab.open(f"{guarded.url}/")
    for key, wrong in (("nonsense", False), (KEY, True)):
        tab.until("document.querySelector('#key-dialog').open")
        tab.until(
            f"document.querySelector('#key-text').textContent.includes('not accept') === {str(wrong).lower()}"
        )
        tab.press("Escape")
        tab.type(key)
        tab.press("Enter")
    tab.until("document.querySelector('#model').options.length")
    ask(tab, "Hello")
    tab.until(f"{LAST}?.querySelector('.note').textContent.includes('tokens')")
    assert tab.run("Object.values(sessionStorage)") == [KEY]
    assert tab.run("Object.values(localStorage)") == []
    assert tab.run("document.cookie") == ""
    tab.problems[:] = [problem for problem in tab.problems if "401" not in problem]


def test_where_no_token_waits_no_time_is_told(tab: Browser, demo: ServerProcess) -> None:
    opened(tab, demo)
    state = (
        "{model: {}, map: {counts: {memory: 1, missing: 1}}, more: {all_experts_bytes: 1024, exposed_ms: %s}}"
    )
    told = f"import('/page/figures.js').then(m => m.moreMemory({state}))"
    all_fit = "With 1.0 KiB more, every expert would be in memory."
    assert tab.run(told % "0.04") == all_fit
    assert tab.run(told % "0.06").startswith(f"{all_fit} The plan expects each token to wait 0.1 ms")


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_on_a_phone_the_machine_at_work_opens_into_view(
    tab: Browser, demo: ServerProcess, motion: str
) -> None:
    tab.open(f"{demo.url}/", width=390, height=844)
    tab.until("document.querySelector('#model')?.options.length")
    tab.until("!document.querySelector('#map-part').hidden")
    feature = {"name": "prefers-reduced-motion", "value": motion}
    tab.call("Emulation.setEmulatedMedia", features=[feature])
    tab.run("Element.prototype.real = Element.prototype.scrollIntoView")
    tab.run(
        "Element.prototype.scrollIntoView = function (how) { window.how = how.behavior; this.real(how); }; 1"
    )
    tab.run("document.querySelector('#machine-fold summary').click()")
    tab.until("document.querySelector('#map').getBoundingClientRect().top < innerHeight / 2")
    assert tab.run("document.querySelector('#machine-fold summary').getBoundingClientRect().top") >= -1
    assert tab.run("window.how") == {"no-preference": "smooth", "reduce": "instant"}[motion]


@pytest.mark.parametrize("width", [360, 768, 1024, 1920])
def test_nothing_is_wider_than_the_window(tab: Browser, demo: ServerProcess, width: int) -> None:
    opened(tab, demo, width)
    tab.until("!document.querySelector('#map-part').hidden")
    assert tab.run("document.querySelector('#machine-fold').open") == (width >= 960)
    tab.run("document.querySelector('#machine-fold').open = true")
    markdown = (
        "word" * 200 + "\\n\\n```\\n" + "code " * 200 + "\\n```\\n\\n|" + "a|" * 40 + "\\n|" + "-|" * 40
    )
    ask(tab, "x" * 500)
    tab.until("!document.querySelector('#send').hidden && document.querySelectorAll('.message').length == 2")
    tab.run(f"import('/page/markdown.js').then(m => m.update({LAST}.querySelector('.body'), '{markdown}'))")
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert (
        tab.run(
            "document.querySelector('#scroll').scrollWidth - document.querySelector('#scroll').clientWidth"
        )
        <= 0
    )
    # Every control can be named by a screen reader.
    assert (
        tab.run(
            "[...document.querySelectorAll('button, input, select, textarea')].filter(e => !e.labels?.length "
            "&& !e.textContent.trim() && !e.getAttribute('aria-label')).map(e => e.outerHTML)"
        )
        == []
    )
