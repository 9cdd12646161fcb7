"""Chat templates in the confined process: as transformers renders them, and within limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import TESTS
from transformers.utils.chat_template_utils import render_jinja_template

import moechat
from moechat.confined.process import SHARED, ConfinedProcess, RefusedError
from moechat.confined.templates import free_variables, render, render_messages
from moechat.errors import ModelRulesError
from moechat.hardware.memory import CONFINED_BYTES, process_bytes, resident_bytes

TEMPLATES = {path.stem: path.read_text() for path in (TESTS / "data" / "reply_templates").glob("*.jinja")}
TEMPLATES["demo"] = (Path(moechat.__file__).parent / "hub" / "demo" / "chat_template.jinja").read_text()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Größe <&> of wind",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Bern"}},
}

LIMITS = {
    "a product": ("{{ 'a' * (10 ** 10) }}", "memory"),
    "a product computed while compiling": ("{% if 'a' * 10 ** 11 %}{% endif %}", "memory"),
    "a wide number": ("{{ '%1000000000d'|format(1) }}", "memory"),
    "a wide number by the operator": ("{{ '%1000000000d' % 1 }}", "memory"),
    "str.format": ("{{ '{:>10000000000}'.format(1) }}", "memory"),
    "center": ("{{ 'x'.center(10 ** 10) }}", "memory"),
    "ljust": ("{{ 'x'.ljust(10 ** 10) }}", "memory"),
    "zfill": ("{{ 'x'.zfill(10 ** 10) }}", "memory"),
    "to_bytes": ("{{ (1).to_bytes(10 ** 11, 'big') }}", "memory"),
    "indent": ("{{ 'a\nb'|indent(10 ** 10) }}", "memory"),
    "the time in a long form": ("{{ strftime_now('%Y' * 100000000) }}", "memory"),
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "memory",
    ),
    "doubling without a loop": ("{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 40, "memory"),
    "join": ("{{ range(99999)|map('string')|join('x' * 99999) }}", "memory"),
    "a long list": ("{{ ([0] * 10 ** 9)|length }}", "memory"),
    "replace": ("{{ ('a' * 99999).replace('a', 'b' * 99999)|length }}", "memory"),
    "three loops": ("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, "more than 2,000,"),
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "more than 2,000,",
    ),
    "a loop that recurses": (
        "{% for a in [[]] * 9 recursive %}{{ loop([[]] * 9) }}{% endfor %}",
        "deeper than 1,000 levels",
    ),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "deeper than 1,000"),
    "nested brackets": ("{{ " + "[" * 3000 + "]" * 3000 + " }}", "deeper than 1,000 levels"),
    "much output": ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "writes more than 8,388,"),
    "output at once": ("{{ 'x' * 20000000 }}", "writes more than 8,388,"),
    "a long template": ("x" * (1 << 20) + "y", "1,048,577 characters"),
}
# Calls in C that no handler of Python can interrupt; each takes the whole time that is allowed.
SLOW = {
    "equal nested lists": (
        "{% set a = [0] %}"
        + "{% set a = [a, a] %}" * 50
        + "{% set b = [0] %}"
        + "{% set b = [b, b] %}" * 50
        + "{{ a == b }}"
    ),
    "a nested list as text": "{% set a = [0] %}" + "{% set a = [a, a] %}" * 30 + "{{ a|string }}",
    "a sum": "{{ range(99999)|map('string')|list|map('wordcount')|sum * 0 }}" * 400,
}
# Each is the published way out of the sandbox of some version or program; see the advisories.
ESCAPES = {
    "CVE-2016-10745: format with attributes": (
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ '{x.__class__.__mro__}'.format(x=[]) }}",
    ),
    "CVE-2019-10906: format_map with attributes": (
        "{{ '{x.__class__.__mro__}'.format_map({'x': []}) }}",
        "{{ '{a.__class__}'.format_map(dict(a=messages)) }}",
    ),
    "CVE-2024-56326: an indirect format": (
        "{% set f = '{0.__class__.__mro__}'.format %}{{ f([]) }}",
        "{{ ['{0.__class__.__mro__}'.format]|map('safe')|list }}",
        "{{ ['{0.__class__}']|map('format', [])|list }}",
        "{{ ['{0.__class__.__base__}']|map(attribute='format')|first }}",
        "{% macro m(f) %}{{ f(()) }}{% endmacro %}{{ m('{0.__class__.__mro__}'.format) }}",
        "{% set n = namespace(f='{0.__class__.__mro__}'.format) %}{{ n.f(1) }}",
    ),
    "CVE-2025-27516: the attr filter": (
        "{{ ('{0.__class__.__mro__}'|attr('format'))([]) }}",
        "{{ ('{x.__class__.__mro__}'|attr('format_map'))({'x': 1}) }}",
        "{{ (messages|attr('__class__'))|attr('__mro__') }}",
    ),
    "CVE-2024-34359: a template of a GGUF file": (
        "{% for x in ().__class__.__base__.__subclasses__() %}{% if 'warning' in x.__name__ %}"
        "{{ x()._module.__builtins__['__import__']('os').popen('touch PLACE') }}{% endif %}{% endfor %}",
        "{{ self.__init__.__globals__.__builtins__.__import__('os').popen('touch PLACE').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch PLACE').read() }}",
        "{{ lipsum.__globals__['os'].popen('touch PLACE').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ joiner.__init__.__globals__.sys.modules }}",
        "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
        "{{ url_for.__globals__ }}",
        "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
        "{% set n = namespace(__init__=1) %}{{ n }}",
        "{{ (range|attr('__self__')) ~ loop.__init__.__globals__ }}",
        "{{ caller.__globals__ }}{{ varargs.__class__.__base__.__subclasses__() }}",
    ),
}
SECRETS = ("<class ", "__globals__", "builtin", "module", "subclass")


def messages(text: str = "Hello?") -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


class ThisTokenizer:
    """What the renderer needs of a tokenizer, with a template."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}

    def get_chat_template(self, tools: Any = None) -> str:
        return self._template


def theirs(template: str, conversation: list[dict[str, Any]], **values: Any) -> str:
    rendered, _ = render_jinja_template(
        conversations=[[{key: v for key, v in m.items() if v is not None} for m in conversation]],
        chat_template=template,
        bos_token="<s>",
        eos_token="</s>",
        **values,
    )
    return str(rendered[0])


def outcome(render: Any) -> str:
    try:
        return str(render())
    except Exception:
        return "refused"


def same(template: str, conversation: list[dict[str, Any]], tools: Any = None, **options: Any) -> str:
    """Renders by both; returns the text, or "refused"."""
    here = outcome(
        lambda: render_messages(
            ThisTokenizer(template), conversation, "model", tools=tools, options=options or None
        )
    )
    there = outcome(
        lambda: theirs(template, conversation, tools=tools, add_generation_prompt=True, **options)
    )
    assert here == there
    return here


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_of_many_models_render_as_by_transformers(name: str, tools: Any) -> None:
    template = TEMPLATES[name]
    answer = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Look <b>up</b>."}
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "{}", "tool_call_id": "abcdefghi", "name": "weather"}
    rendered = [
        same(template, messages("Wind in Zürich & <Bern>? \U0001f600"), tools),
        same(template, [*messages(), answer, *messages()[1:]], tools),
        same(template, [*messages(), calls, result, *messages()[1:]], tools, enable_thinking=True),
        same(template, messages(), tools, enable_thinking=False, documents=None, thinking=True),
        same(template, [{"role": "assistant", "content": "", "thinking": "Hm."}], tools),
        same(template, [{"role": "nobody", "content": ""}], tools),
    ]
    assert rendered[0] != "refused"


TEXTS = st.text(max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS},
        optional={"reasoning_content": TEXTS, "reasoning": TEXTS | st.none(), "name": TEXTS},
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    template=st.sampled_from(
        [*sorted(TEMPLATES.values()), "{{ messages }}{{ x }}{{ messages|tojson(indent=1) }}"]
    ),
    conversation=MESSAGES,
    value=VALUES,
)
def test_any_messages_and_options_render_as_by_transformers(
    template: str, conversation: list[dict[str, Any]], value: Any
) -> None:
    same(template, conversation, x=value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{% if loop.first %}{{ m }}{% else %}{% break %}"
        "{% endif %}{% else %}none{% endfor %}",
        "{% macro t(x, y=2) %}{{ x }}-{{ y }}{{ caller() if caller }}{% endmacro %}{{ t(1) }}"
        "{% call t(3) %}!{% endcall %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "  {% if true %}\n  a\n  {% endif %}\n{{- ' x ' -}}\n",
        "{% set n = namespace(a=1, self=3) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}"
        "{{ n.a }}",
        "{{ dict(a=1)|tojson }}{{ dict.fromkeys('ab') }}{{ messages|map(attribute='role')|join(',') }}",
        "{{ '%s and %d'|format('a', 3) }}{{ 'a{}'.format(1) }}{{ 'aXb'.split('X')[-1].strip() }}",
        "{{ ['b', 'a']|sort }}{{ messages|length }}{{ missing }}{{ missing is defined }}{{ 7 // 2 }}",
        "{{ strftime_now('%Y-%m-%d') }}{{ messages[-1]['content']|trim|upper }}{{ {'a': (1, 2)} }}",
        "{{ messages|selectattr('role', 'equalto', 'user')|list|tojson(ensure_ascii=True, indent=2) }}",
        "{{ lipsum(n=1)|length > 3 }}{{ 'a b c'|wordwrap(2) }}{{ [1, 2, 3]|batch(2)|list|pprint }}",
        "{{ 'é'.encode('utf-16') }}{{ 'é'.encode('latin-1') }}{{ [[1, [2]], 3]|string }}",
        "{% for a in [[1, [2]]] recursive %}{{ loop(a) if a is iterable else a }}{{ loop.depth }}"
        "{% endfor %}",
        "{{ raise_exception('no ' ~ bos_token) }}",
        "{{ undefined.attribute }}",
        "{% if %}",
    ],
)
def test_parts_of_the_language_render_as_by_transformers(template: str) -> None:
    same(template, messages())


def test_the_reason_of_a_refusal_is_that_of_the_template() -> None:
    with pytest.raises(RefusedError, match=r"^only one system message$"):
        render("{{ raise_exception('only one system message') }}", {}, "model")


@pytest.mark.parametrize("name", LIMITS)
def test_a_template_out_of_bounds_is_refused_with_the_limit(name: str) -> None:
    template, limit = LIMITS[name]
    begin = time.monotonic()
    with pytest.raises(ModelRulesError, match=limit) as refused:
        render(template, {"messages": messages()}, "this-model")
    assert "chat template of this-model" in str(refused.value)
    assert refused.value.exit_code == 3
    assert "publisher" in (refused.value.hint or "")
    assert time.monotonic() - begin < 20
    assert render("{{ x }}", {"x": "works"}, "model") == "works"


@pytest.mark.parametrize("name", SLOW)
def test_a_call_that_python_cannot_interrupt_ends_in_time(name: str) -> None:
    process = ConfinedProcess()
    begin = time.monotonic()
    from moechat.confined.limits import Limits
    from moechat.confined.process import LimitError

    short = Limits(output=1000, steps=1000, memory=1 << 28, cpu_s=0.3, wall_s=15)
    with pytest.raises(LimitError, match="time"):
        process.request(short, "render", SLOW[name], {}, short.output, short.steps)
    assert time.monotonic() - begin < 15
    process.close()


@pytest.mark.parametrize("name", ESCAPES)
def test_published_escapes_from_the_sandbox_do_not_work(name: str, tmp_path: Path) -> None:
    place = tmp_path / "touched"
    for template in ESCAPES[name]:
        try:
            text = render(template.replace("PLACE", str(place)), {"messages": messages()}, "model")
        except (RefusedError, ModelRulesError):
            continue
        assert not any(secret in text for secret in SECRETS), template
    assert not place.exists()


def test_code_that_escapes_finds_no_files_processes_or_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    process = ConfinedProcess()
    assert process.request(_wide(), "render", "x", {}, 9, 9) == "x"
    assert process.pid is not None
    child = psutil.Process(process.pid)
    assert "hf_secret" not in "".join(child.environ().values())
    assert child.cwd() == "/"
    assert child.rlimit(psutil.RLIMIT_NOFILE) == (0, 0)
    assert child.rlimit(psutil.RLIMIT_NPROC) == (0, 0)
    assert child.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert child.rlimit(psutil.RLIMIT_CORE) == (0, 0)
    assert child.memory_info().rss < 40 << 20
    process.close()


def test_the_variables_of_a_template_are_found_without_running_it() -> None:
    assert free_variables("{{ a }}{% set b = 'x' * 10 ** 10 %}{{ b }}{% if c.d %}{% endif %}") == {"a", "c"}
    assert free_variables("x" * ((1 << 20) + 1)) is None
    with pytest.raises(RefusedError):
        free_variables("{{ a ")


def test_threads_get_their_own_answers() -> None:
    wrong: list[tuple[int, str]] = []

    def ask(number: int) -> None:
        for turn in range(20):
            text = render("{{ x * 3 }}", {"x": f"{number}.{turn} "}, "model")
            if text != f"{number}.{turn} " * 3:
                wrong.append((number, text))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_interrupted_request_leaves_no_answer_for_the_next() -> None:
    """Ctrl-C while a template renders: the child that would answer later is replaced."""
    render("x", {}, "model")
    before = SHARED.pid
    main = threading.main_thread().ident
    assert main is not None
    previous = signal.signal(signal.SIGALRM, _interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            render("{{ range(99999)|map('string')|list|map('wordcount')|sum }}" * 400, {}, "model")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert render("{{ x }}", {"x": "mine"}, "model") == "mine"
    assert SHARED.pid != before


def test_a_child_that_was_killed_is_replaced() -> None:
    render("x", {}, "model")
    assert SHARED.pid is not None
    os.kill(SHARED.pid, signal.SIGKILL)
    psutil.Process(SHARED.pid).wait(10)
    assert render("{{ x }}", {"x": "again"}, "model") == "again"


PARENT = """
import sys, time
import moechat
from moechat.confined.process import SHARED
from moechat.confined.templates import render
print(render("{{ x }}", {"x": "ready"}, "model"), SHARED.pid, flush=True)
sys.stdin.read(1)
render("{{ range(99999)|map('string')|list|map('wordcount')|sum }}" * 4000, {}, "model")
"""


@pytest.mark.parametrize("busy", [False, True])
def test_the_child_ends_with_a_parent_that_is_killed(busy: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    word, number = parent.stdout.readline().split()
    assert word == "ready"
    child = psutil.Process(int(number))
    if busy:
        parent.stdin.write("x")
        parent.stdin.flush()
        used = child.cpu_times().user
        while child.cpu_times().user <= used:
            time.sleep(0.01)
    parent.kill()
    parent.wait()
    child.wait(5)
    parent.stdin.close()
    parent.stdout.close()


def test_bytes_that_arrive_while_the_child_computes_do_not_end_it() -> None:
    """The kernel may tell of the bytes of a request when the child has read them already and computes."""
    assert render("{{ x }}", {"x": "ready"}, "model") == "ready"
    child = psutil.Process(SHARED.pid)
    sums: list[str] = []
    text = "{{ range(99999)|map('string')|list|map('wordcount')|sum }}"
    asked = threading.Thread(target=lambda: sums.append(render(text * 4, {}, "model")))
    used = child.cpu_times().user
    asked.start()
    try:
        while child.cpu_times().user <= used:
            time.sleep(0.005)
        Path(f"/proc/{child.pid}/fd/0").write_bytes(b"x")
        asked.join()
    finally:
        SHARED.close()  # the byte would be taken for the beginning of the next request
    assert sums == ["99999" * 4]


def test_ctrl_c_of_the_terminal_does_not_reach_the_child() -> None:
    render("x", {}, "model")
    assert SHARED.pid is not None
    assert os.getsid(SHARED.pid) == SHARED.pid != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(SHARED.pid, number)
    before = SHARED.pid
    assert render("{{ x }}", {"x": "still here"}, "model") == "still here"
    assert SHARED.pid == before


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.errors import MoechatError

    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    process = ConfinedProcess()
    process.start()  # says nothing yet
    with pytest.raises(MoechatError, match="cannot be started"):
        process.request(_wide(), "render", "x", {}, 9, 9)


def _wide() -> Any:
    from moechat.confined.limits import Limits

    return Limits.of_template(0)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_budget_counts_the_confined_process() -> None:
    assert render(TEMPLATES["demo"], {"messages": [{"role": "user", "content": "Hi"}]}, "demo")
    child = psutil.Process(SHARED.pid)
    own = child.memory_full_info().uss
    assert 0.5 * CONFINED_BYTES < own < CONFINED_BYTES
    before = resident_bytes()
    assert before + CONFINED_BYTES <= process_bytes() <= resident_bytes() + CONFINED_BYTES
