"""Grammars for texts that the program reads: chat templates, parts of tokenizers, prompts, settings."""

from __future__ import annotations

import json
import random
from typing import Any

from fault_injection.json_changes import changed, spelled

_PLAIN = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
# Ways out of Jinja's sandbox that advisories describe, each with an attempt to create a file.
_ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__cl'~'ass__'].__base__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "{{ ('{0.__class__.__mro__}'|attr('format'))(messages) }}",
    "{{ (messages|attr('__class__'))|attr('__mro__') }}",
    "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "{{ ['{0.__class__}']|map('format', messages)|list }}",
    "{{ messages|map(attribute='__class__.__mro__')|list }}",
    "{{ dict(a=1)|xmlattr }}{{ {'x onload=alert(1)': 1}|xmlattr }}",
    "{% include '/etc/passwd' %}{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ strftime_now.__globals__ }}{{ strftime_now.__self__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__.__builtins__.open('CANARY', 'w').write('x') }}",
    "{% set x = messages.append.__self__.__class__ %}{{ x }}",
    "{{ (1).__class__.__base__.__subclasses__()|length }}",
    "{{ messages.clear() }}{{ messages.__setitem__(0, 1) }}",
    "{% for c in ''.__class__.__base__.__subclasses__() %}{% if 'open' in c.__name__ %}"
    "{{ c('CANARY', 'w') }}{% endif %}{% endfor %}",
)
_DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
_NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "10",
    "1000",
    "99999",
    "10**6",
    "10**10",
    "10**100",
    "2**63",
    "1e308",
    "9**9**9",
)
_WORDS = (
    "'a'",
    "'é'",
    "''",
    "'%s'",
    "'%1000000000d'",
    "'\\x1b[2J'",
    "'</s>'",
    "none",
    "true",
    "messages",
    "bos_token",
)
_ATTRIBUTES = ("a", "format(1)", "items()", "split()", "__class__", "ljust(10**9)")
_FILTERS = (
    "upper", "trim", "tojson", "length", "list", "reverse", "join(',')", "center(N)", "indent(N)",
    "wordwrap(N)", "batch(N)|list", "slice(N)|list", "truncate(N)", "format(N)", "replace('', 'aaaa')",
    "int", "float", "round(N)", "filesizeformat", "pprint", "sum", "sort", "unique|list",
    "map('upper')|list", "groupby('role')", "xmlattr", "urlize", "striptags", "random", "string", "abs",
    "default(N)", "dictsort", "first", "last", "max", "min", "tojson(indent=N)",
)  # fmt: skip


def template(generator: random.Random, canary: str) -> str:
    """A chat template with statements from a grammar, with a way out of the sandbox, or with wrong syntax."""
    kind = generator.random()
    if kind < 0.25:
        return generator.choice(_ESCAPES).replace("CANARY", canary) + _PLAIN
    if kind < 0.3:
        place = generator.randrange(len(_PLAIN))
        return (
            _PLAIN[:place]
            + generator.choice(("{{", "{%", "}}", "%}", "{#", "\0", "'", "(" * 500))
            + _PLAIN[place:]
        )
    return _statement(generator, 3) + _PLAIN


def _statement(generator: random.Random, depth: int) -> str:
    inner = (
        _statement(generator, depth - 1)
        if depth > 0 and generator.random() < 0.6
        else f"{{{{ {_expression(generator, 2)} }}}}"
    )
    one = _expression(generator, 2)
    return generator.choice(
        (
            f"{{% for i in range({generator.choice(_NUMBERS)}) %}}{inner}{{% endfor %}}",
            f"{{% for i in {one} %}}{inner}{{% endfor %}}",
            f"{{% if {one} %}}{inner}{{% else %}}x{{% endif %}}",
            f"{{% set x = {one} %}}{inner}{{{{ x }}}}",
            _DOUBLING + inner,
            f"{{% macro m(a) %}}{inner}{{{{ m(a) }}}}{{% endmacro %}}{{{{ m(1) }}}}",
            f"{{% filter {_filter(generator)} %}}{inner}{{% endfilter %}}",
            f"{{{{ {one} }}}}{inner}",
            f"{{% generation %}}{inner}{{% endgeneration %}}",
            f"{{% for i in range(9) %}}{inner}{{% break %}}{{% endfor %}}",
            f"{{{{ raise_exception({one}) }}}}",
            f"{{{{ strftime_now('%Y' * {generator.choice(_NUMBERS)}) }}}}",
        )
    )  # fmt: skip


def _expression(generator: random.Random, depth: int) -> str:
    if depth == 0:
        return generator.choice((*_WORDS, *_NUMBERS))
    left, right = _expression(generator, depth - 1), _expression(generator, depth - 1)
    return generator.choice(
        (
            f"({left} {generator.choice('+-*~%/')} {right})",
            f"({left} ** {right})",
            f"({left} * {generator.choice(_NUMBERS)})",
            f"({left}|{_filter(generator)})",
            f"({left}|{_filter(generator)}|{_filter(generator)})",
            f"[{left}, {right}]",
            f"{{'a': {left}}}",
            f"({left})[{right}]",
            f"({left}).{generator.choice(_ATTRIBUTES)}",
            f"range({left})",
            f"({left} if {right} else {left})",
            f"lipsum(n={generator.choice(_NUMBERS)})",
            f"({left} {generator.choice(('in', '==', '<', 'and', 'is'))} {right})",
        )
    )


def _filter(generator: random.Random) -> str:
    return generator.choice(_FILTERS).replace("N", generator.choice(_NUMBERS))


def tokenizer_part(generator: random.Random, key: str) -> dict[str, Any]:
    """A normalizer or pre-tokenizer with a pattern from a grammar, or a sequence of such."""
    pattern = {"Regex": _pattern(generator, 3)}
    if key == "normalizer":
        one: dict[str, Any] = {
            "type": "Replace",
            "pattern": pattern,
            "content": generator.choice(("", "a", "aa", "\x1b", "a" * 1000)),
        }
        double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
        parts: list[dict[str, Any]] = [
            one,
            *[double] * generator.choice((0, 1, 12, 24, 30)),
            {"type": "NFKC"},
        ]
        return {"type": "Sequence", "normalizers": parts[: generator.randint(1, len(parts))]}
    split = {
        "type": "Split",
        "pattern": pattern,
        "behavior": generator.choice(("Isolated", "Removed", "MergedWithNext", "Contiguous")),
        "invert": generator.random() < 0.5,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}


def _pattern(generator: random.Random, depth: int) -> str:
    if depth == 0:
        return generator.choice(
            ("a", ".", "\\s", "\\w", "[^a]", "[a-z]", "\\p{L}", "", "^", "$", "\\b", "é", "(?i:a)")
        )
    inner, other = _pattern(generator, depth - 1), _pattern(generator, depth - 1)
    return generator.choice(
        (
            f"({inner})+",
            f"({inner})*",
            f"({inner}+)+$",
            f"({inner}|{other})*b",
            f"({inner}){{0,{generator.choice((1, 10, 1000, 100000))}}}",
            f"{inner}{other}",
            f"(?={inner}){other}",
            f"(?<!{inner}){other}",
            f"(?>{inner})",
            f"({inner})\\1",
            f"[{inner}",
        )
    )


def prompts(generator: random.Random) -> bytes:
    """Lines of a file for ``--jsonl``."""
    lines = []
    base: Any = {
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
        "id": 7,
        "temperature": 0.5,
        "max_tokens": 1,
        "stop": ["x"],
        "template_options": {"enable_thinking": True},
    }
    others: tuple[Any, ...] = (
        {"prompt": "Hi", "seed": 3},
        {"turns": ["Hi", "And?"]},
        {"text": "x"},
        {"question": "?"},
    )
    for _ in range(generator.randint(1, 4)):
        chosen = base if generator.random() < 0.6 else generator.choice(others)
        lines.append(spelled(changed(chosen, generator), generator).replace(b"\n", b" "))
    return generator.choice((b"\n", b"\r\n", b"\n\n")).join(lines) + generator.choice(
        (b"", b"\n", b"\xff", b"\0")
    )


def settings(generator: random.Random) -> bytes:
    """A file of settings."""
    keys = (
        "ram",
        "vram",
        "bits",
        "ctx",
        "temperature",
        "stop",
        "threads",
        "dense-bits",
        "system",
        "top-k",
        "quiet",
        "x",
    )
    tables = (
        "run",
        "plan",
        "list",
        "presets.coder",
        "remotes.big",
        "no.such",
        "presets",
        "run.run",
        "config",
        '"a b"',
        "serve",
    )
    lines = [f"{generator.choice(keys)} = {_toml(generator, 3)}" for _ in range(generator.randint(0, 3))]
    for _ in range(generator.randint(0, 3)):
        lines.append(f"[{generator.choice(tables)}]")
        more = (*keys, "model", "url", "api-key-variable", "template-option", "update-check")
        lines += [f"{generator.choice(more)} = {_toml(generator, 3)}" for _ in range(generator.randint(0, 4))]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    if generator.random() < 0.1 and data:
        place = generator.randrange(len(data))
        data = data[:place] + bytes([generator.randrange(256)]) + data[place + 1 :]
    return data


def _toml(generator: random.Random, depth: int) -> str:
    simple = (
        "1", "-1", "0", "4", "1e400", "nan", "inf", "99999999999999999999999", "true", "false", '"8G"',
        '"auto"', '""', '"demo"', '"\\u0000"', '"' + "a" * 10_000 + '"', "1979-05-27T07:32:00Z",
        "07:32:00", '"""x\ny"""', "'it'", "0xFF", "=", "[", "1.0.0",
    )  # fmt: skip
    kind = generator.random()
    if depth == 0 or kind < 0.7:
        text = generator.choice(simple)
        return (
            json.dumps("".join(chr(generator.randrange(32, 0x2FF)) for _ in range(9)))
            if text == '""'
            else text
        )
    if kind < 0.85:
        return f"[{', '.join(_toml(generator, depth - 1) for _ in range(generator.randint(0, 3)))}]"
    if kind < 0.87:
        return "[" * 5000 + "]" * 5000
    return f"{{ a = {_toml(generator, depth - 1)}, enable_thinking = {_toml(generator, depth - 1)} }}"
