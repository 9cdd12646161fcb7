"""The tools of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moechat.errors import UsageError

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MOST_TOOLS = 128


def is_tool_name(name: object) -> bool:
    """Whether a tool may have this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: ``[a-zA-Z0-9_-]{1,64}``.
        description: What it does, for the model; empty if none was given.
        parameters: JSON schema of its arguments, of type ``object``.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def schema_of(self, parameter: str) -> Mapping[str, Any] | None:
        """The schema of one parameter, its reference resolved; ``None`` if there is none."""
        return self.member_schema(self.parameters, parameter)

    def member_schema(self, schema: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
        """The schema of a member of an object within the parameters; ``None`` if there is none."""
        properties = schema.get("properties")
        member = properties.get(name) if isinstance(properties, Mapping) else None
        if member is None:
            member = schema.get("additionalProperties")
        return self.resolved(member) if isinstance(member, Mapping) else None

    def item_schema(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The schema of the items of an array within the parameters; ``None`` if there is none."""
        items = schema.get("items")
        return self.resolved(items) if isinstance(items, Mapping) else None

    def resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The schema that a ``$ref`` within the parameters refers to; ``None`` if it cannot be found."""
        for _ in range(8):
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            target: Any = self.parameters
            for step in reference.removeprefix("#").strip("/").split("/"):
                target = target.get(step) if isinstance(target, Mapping) else None
            if not isinstance(target, Mapping):
                return None
            schema = target
        return None

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def validated_tools(tools: object) -> tuple[Tool, ...]:
    """Check the list ``tools`` of a request to the chat API.

    Args:
        tools: A list of ``{"type": "function", "function": {"name": …, "description": …, "parameters": …}}``,
            or ``None``.

    Returns:
        The tools in their order; empty for ``None``.

    Raises:
        UsageError: It is no such list; the message names the place, such as ``tools[1].function.name``.
    """
    if tools is None:
        return ()
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise UsageError(f"tools is of type {type(tools).__name__}; it must be a list")
    if len(tools) > MOST_TOOLS:
        raise UsageError(f"there are {len(tools)} tools; at most {MOST_TOOLS} are allowed")
    found = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names: dict[str, int] = {}
    for index, tool in enumerate(found):
        if tool.name in names:
            raise UsageError(
                f"tools[{index}].function.name is {tool.name!r}, as that of tools[{names[tool.name]}]",
                hint="give every tool a name of its own",
            )
        names[tool.name] = index
    return found


def _tool(tool: object, place: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise UsageError(f"{place} is of type {type(tool).__name__}; it must be an object")
    if tool.get("type") != "function":
        raise UsageError(
            f"{place}.type is {tool.get('type')!r}; it must be 'function'",
            hint="tools that a server runs itself, such as web search, are not offered",
        )
    function = tool.get("function")
    place += ".function"
    if not isinstance(function, Mapping):
        raise UsageError(f"{place} is of type {type(function).__name__}; it must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not is_tool_name(name):
        raise UsageError(
            f"{place}.name is {name!r}; it must be 1 to 64 letters, digits, underscores and hyphens"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise UsageError(f"{place}.description is of type {type(description).__name__}; it must be a text")
    return Tool(name, description or "", _parameters(function.get("parameters"), f"{place}.parameters"))


def _parameters(schema: object, place: str) -> Mapping[str, Any]:
    if schema is None or schema == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise UsageError(f"{place} is of type {type(schema).__name__}; it must be a JSON schema, an object")
    kind = schema.get("type", "object")
    if kind != "object":
        raise UsageError(f"{place}.type is {kind!r}; it must be 'object'")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise UsageError(f"{place}.properties is of type {type(properties).__name__}; it must be an object")
    for name, value in properties.items():
        if not isinstance(value, Mapping | bool):
            raise UsageError(
                f"{place}.properties.{name} is of type {type(value).__name__}; it must be a JSON schema"
            )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise UsageError(f"{place}.required must be a list of names")
    # Templates expect properties; a schema that names none allows any.
    anything = {} if "properties" in schema else {"additionalProperties": True}
    return {**anything, **schema, "type": "object", "properties": properties}
