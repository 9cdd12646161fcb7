"""The program of the confined process: renders chat templates and splits texts under limits.

Run as a script with ``python -I -S``, so it imports nothing of moechat. Requests come on stdin, each as a
length of 8 bytes and a ``marshal`` of a tuple; the parent is trusted. Replies go to stdout, each as a letter,
a length of 8 bytes and UTF-8:

====== =========================================================================================
letter content
====== =========================================================================================
``R``  ready; once, at the beginning
``O``  the result
``E``  the request was refused: the text of the error
``L``  a limit was reached: its name. The process ends after it, because its memory may be full
====== =========================================================================================

Time needs no reply: SIGPROF ends the process, also inside a call that no handler could interrupt. Before the
first request the process gives up files, sockets, children and core dumps. So code that escapes from the
sandbox finds neither secrets (the parent passes no environment) nor a way to open anything.
"""

from __future__ import annotations

import fcntl
import json
import marshal
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import Any

LENGTH = struct.Struct("<cQ")  # of a reply; requests have only the number
REQUEST = struct.Struct("<Q")
_MOST_OF_AN_ERROR = 2000
_STEPS_OF_A_CALL = 4  # calling a macro takes about as long as four iterations of a loop
_STEP = "a step"  # a filter, which costs less than a call; no template can write its name
_ENCODINGS = (
    *("ascii", "latin-1", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"),
    *("unicode_escape", "raw_unicode_escape", "idna", "punycode", "cp1252"),
)


class LimitReachedError(Exception):
    """A limit of the request; its text is the name in :class:`moechat.confined.limits.Limits`."""


class Steps:
    """Counts the turns of loops and the calls of macros of one rendering.

    Attributes:
        left: How many may still come.
    """

    def __init__(self) -> None:
        self.left = 0

    def take(self, count: int) -> str:
        """Count some.

        Raises:
            LimitReachedError: There were too many.
        """
        self.left -= count
        if self.left < 0:
            raise LimitReachedError("steps")
        return ""


def make_environment(steps: Steps) -> Any:
    """A sandbox in which templates render as transformers renders them, and that counts steps.

    Args:
        steps: Counted at the beginning of the body of every loop and macro.

    Returns:
        A ``jinja2.sandbox.ImmutableSandboxedEnvironment``.
    """
    from jinja2 import nodes, pass_context
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks answers for training; here its body is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    @pass_context  # so that it is never computed while the template is compiled
    def step(context: Any, count: int) -> str:
        return steps.take(count)

    class Environment(ImmutableSandboxedEnvironment):
        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            tree = super()._parse(source, name, filename)
            for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
                count = 1 if isinstance(node, nodes.For) else _STEPS_OF_A_CALL
                counted = nodes.Filter(nodes.Const(count), _STEP, [], [], None, None)
                statement = nodes.ExprStmt(counted).set_lineno(node.lineno)
                node.body.insert(0, statement.set_environment(self))  # type: ignore[attr-defined]
            return tree

    class Dict:
        """``dict`` without the attributes of the class."""

        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class PlainNamespace(Namespace):
        """``namespace`` whose attributes do not begin with an underscore."""

        def __init__(*args: Any, **values: Any) -> None:
            own, *rest = args
            for key in (content := dict(*rest, **values)):
                _require_plain(key)
            Namespace.__init__(own, content)

        def __setitem__(self, key: str, value: Any) -> None:
            _require_plain(key)
            super().__setitem__(key, value)

    def _require_plain(key: object) -> None:
        if isinstance(key, str) and key.startswith("_"):
            raise SecurityError(f"a namespace cannot have {key!r}: names must not begin with an underscore")

    def raise_exception(message: Any) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters |= {"tojson": tojson, _STEP: step}
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": Dict(),
        "namespace": PlainNamespace,
    }
    return environment


class Worker:
    """Answers requests."""

    def __init__(self) -> None:
        self._steps = Steps()
        self._environment = make_environment(self._steps)
        self._template = lru_cache(maxsize=8)(self._environment.from_string)
        self._tokenizers: dict[str, Any] = {}

    def render(self, template: str, values: dict[str, Any], output: int, steps: int) -> str:
        """A chat template with its variables.

        Args:
            template: Its text.
            values: Of plain types.
            output: Most characters of the result.
            steps: Most turns of loops and calls of macros.
        """
        self._steps.left = steps
        parts: list[str] = []
        left = output
        for part in self._template(template).generate(values):
            left -= len(part)
            if left < 0:
                raise LimitReachedError("output")
            parts.append(part)
        return "".join(parts)

    def variables(self, template: str) -> str:
        """The variables that a template reads without setting them: a JSON list."""
        from jinja2 import meta

        return json.dumps(sorted(meta.find_undeclared_variables(self._environment.parse(template))))

    def split(self, key: str, description: str, text: str) -> str:
        """Normalise and split a text as a tokenizer does, without its vocabulary; nothing is returned.

        Args:
            key: Of the tokenizer.
            description: What ``tokenizers.Tokenizer`` is made from; empty if it came with the key before.
            text: The text.
        """
        from tokenizers import Tokenizer

        if description:
            self._tokenizers = {key: Tokenizer.from_str(description)}
        self._tokenizers[key].encode(text, add_special_tokens=False)
        return ""


def _preload() -> None:
    """Import what templates and tokenizers may need later: then no file can be opened any more."""
    for module in ("jinja2.constants", "jinja2.debug", "jinja2.meta", "pprint", "textwrap", "tokenizers"):
        import_module(module)
    for encoding in _ENCODINGS:
        "".encode(encoding)
        b"".decode(encoding)
    time.tzset()  # reads the file of the local time zone
    datetime.now().strftime("%c %Z")


def _give_up_rights() -> None:
    for kind in (
        resource.RLIMIT_NOFILE,
        resource.RLIMIT_NPROC,
        resource.RLIMIT_FSIZE,
        resource.RLIMIT_CORE,
    ):
        resource.setrlimit(kind, (0, 0))


def _address_space(statm: int) -> int:
    """Bytes of address space of this process."""
    return int(os.pread(statm, 64, 0).split()[0]) * resource.getpagesize()


def _answer(worker: Worker, request: tuple[Any, ...]) -> tuple[bytes, str]:
    name, *arguments = request
    try:
        return b"O", getattr(worker, name)(*arguments)
    except LimitReachedError as error:
        return b"L", str(error)
    except MemoryError:
        return b"L", "memory"
    except RecursionError:
        return b"L", "depth"
    except Exception as error:
        return b"E", str(error)[:_MOST_OF_AN_ERROR]
    except BaseException as error:  # a panic of the tokenizers' library
        return b"L", f"panic: {error}"[:_MOST_OF_AN_ERROR]


def _read(count: int) -> bytes:
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:  # the parent has ended
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write(letter: bytes, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    rest = memoryview(LENGTH.pack(letter, len(data)) + data)
    while rest:
        rest = rest[os.write(1, rest) :]


def main() -> None:
    """Answer requests until stdin ends."""
    # Ctrl-C is for the parent; this process ends when the parent closes the pipe.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    lifeline = int(sys.argv[1])
    sys.path.extend(sys.argv[2:])
    worker = Worker()
    _preload()
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    _give_up_rights()
    # Nothing is ever written to this pipe. It closes when the parent ends: SIGIO ends this process then, even
    # while it computes. On stdin that would be a race: the kernel may signal bytes after they were read.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    _write(b"R", "")
    while True:
        (size,) = REQUEST.unpack(_read(REQUEST.size))
        memory, cpu_s, *request = marshal.loads(_read(size))
        allowed = _address_space(statm) + memory
        if most != resource.RLIM_INFINITY:
            allowed = min(allowed, most)
        resource.setrlimit(resource.RLIMIT_AS, (allowed, most))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        letter, text = _answer(worker, tuple(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        _write(letter, text)
        if letter == b"L":
            os._exit(0)


if __name__ == "__main__":
    main()
