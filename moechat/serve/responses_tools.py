"""Tools of OpenAI's responses: functions, those in namespaces, and custom tools, whose input is free text.

A model knows functions only. So a tool in a namespace becomes a function whose name begins with the
namespace, and a custom tool becomes a function with one text argument. The client sees calls under its own
names. Tools that OpenAI's servers run themselves are left out: the model is not told of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moechat.reply_formats.tools import is_tool_name
from moechat.serve.api_errors import ApiError
from moechat.serve.fields import Fields

_INPUT = "input"
_LONGEST_NAME = 64
_SEPARATOR = "__"
# Run by OpenAI's servers, and sent by some programs whatever the server is. Those of web search have dates.
_HOSTED = ("file_search", "code_interpreter", "image_generation", "tool_search")
_HOSTED_PREFIX = "web_search"


@dataclass(frozen=True)
class GivenTool:
    """A tool as the client knows it.

    Attributes:
        name: Its name there.
        namespace: Of the tool; empty if it has none.
        custom: Its input is text, not arguments in JSON.
    """

    name: str
    namespace: str = ""
    custom: bool = False

    @property
    def function(self) -> str:
        """The name of the function that the model knows."""
        return function_name(self.namespace, self.name)

    def called(self, arguments: str) -> dict[str, Any]:
        """The fields of a call, from the arguments that the model gives its function."""
        place = {"namespace": self.namespace} if self.namespace else {}
        given = {"input": _input(arguments)} if self.custom else {"arguments": arguments}
        return {"name": self.name, **place, **given}


def function_name(namespace: str, name: str) -> str:
    """The name of the function that stands for a tool of a namespace; without one the tool's own."""
    if not namespace:
        return name
    joined = namespace.removesuffix(_SEPARATOR) + _SEPARATOR + name
    if len(joined) <= _LONGEST_NAME:
        return joined
    # Shortened in the same way in every request, and different for different tools.
    digest = hashlib.sha256(joined.encode()).hexdigest()[:8]
    return f"{joined[: _LONGEST_NAME - 9]}_{digest}"


def input_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def _input(arguments: str) -> str:
    """The input of a custom tool; arguments that a limit has cut are no JSON, and are given as they are."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = given.get(_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


@dataclass(frozen=True)
class GivenTools:
    """The tools of a request.

    Attributes:
        functions: The tools as functions of OpenAI's chats.
        by_function: The tool of each function, by its name.
    """

    functions: list[dict[str, Any]]
    by_function: Mapping[str, GivenTool]

    @classmethod
    def parse(cls, fields: Fields) -> GivenTools:
        """Read ``tools``.

        Raises:
            ApiError: One is of a kind that cannot be had here, or has the wrong form.
        """
        functions: list[dict[str, Any]] = []
        by_function: dict[str, GivenTool] = {}
        for number, tool in enumerate(fields.items("tools") or []):
            place = f"tools[{number}]"
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind in _HOSTED or (isinstance(kind, str) and kind.startswith(_HOSTED_PREFIX)):
                continue
            inner, namespace = [(tool, place)], ""
            if kind == "namespace":
                namespace = _namespace(tool, place)
                inner = [(one, f"{place}.tools[{at}]") for at, one in enumerate(tool["tools"])]
            for one, at in inner:
                given, function = _tool(one, namespace, at)
                if given.function in by_function:
                    raise _wrong(f"{at}.name", f"{given.name} is the name of an earlier tool, too")
                functions.append({"type": "function", "function": function})
                by_function[given.function] = given
        return cls(functions, by_function)

    def of(self, function: str) -> GivenTool:
        """The tool that a function stands for; one that the client has not given keeps its name."""
        return self.by_function.get(function) or GivenTool(function)


def _namespace(tool: dict[str, Any], place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{place}.name", "a namespace needs a name")
    if not isinstance(tool.get("tools"), list):
        raise _wrong(f"{place}.tools", "it must be a list of tools")
    return name


def _tool(tool: Any, namespace: str, place: str) -> tuple[GivenTool, dict[str, Any]]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        named = f"tools of the type {kind[:40]}" if isinstance(kind, str) else "tools without a type"
        raise _wrong(place, f"{named} are not supported; those of the types function and custom are")
    name = tool.get("name")
    if not isinstance(name, str) or not is_tool_name(function_name(namespace, name)):
        raise _wrong(f"{place}.name", "it must be 1 to 64 letters, digits, underscores and hyphens")
    given = GivenTool(name, namespace, kind == "custom")
    description = tool.get("description")
    if kind == "custom":
        text = {"type": "string", "description": "the whole input of the tool, as it is"}
        parameters: Any = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}
        description = _with_format(description, tool.get("format"))
    else:
        parameters = tool.get("parameters")
    function = {"name": given.function, "description": description, "parameters": parameters}
    return given, {key: value for key, value in function.items() if value is not None}


def _with_format(description: Any, form: Any) -> Any:
    """The description of a custom tool, with the grammar of its input where it has one."""
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return description
    rules = f"The input follows this grammar ({form.get('syntax')}):\n{form.get('definition')}"
    return f"{description}\n\n{rules}" if isinstance(description, str) and description else rules


def _wrong(place: str, wanted: str) -> ApiError:
    return ApiError(400, f"{place}: {wanted}", param=place)
