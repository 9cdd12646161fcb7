"""A command group that builds each command on first use.

Building a command inspects the types of all its options. For all commands that would take a fifth of the time
of a short command. Help and completion of the group need only names and first lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class LazyGroup(TyperGroup):
    """A group whose ``commands`` are placeholders with name and help until they are used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._builders: dict[str, Callable[[], Any]] = {}
        self._prepare: list[Callable[[Any], None]] = []

    def add_commands_of(self, collected: typer.Typer) -> None:
        """Add all commands and groups registered in a Typer app."""
        for command in collected.registered_commands:
            self._add(command, partial(_build, command))
        for group in collected.registered_groups:
            assert group.typer_instance is not None
            self._add(group, partial(typer.main.get_command, group.typer_instance))

    def _add(self, info: Any, build: Callable[[], Any]) -> None:
        inner = getattr(info, "typer_instance", None)
        self.commands[info.name] = TyperCommand(
            name=info.name, help=inner.info.help if inner is not None else info.help, hidden=bool(info.hidden)
        )
        self._builders[info.name] = build

    def prepare(self, change: Callable[[Any], None]) -> None:
        """Apply a change to every command: to built ones now, to others when they are built."""
        self._prepare.append(change)
        for name in self.commands.keys() - self._builders.keys():
            change(self.commands[name])

    def built(self) -> Mapping[str, Any]:
        """Build all commands; returns them by name."""
        for name in list(self._builders):
            self._build(name)
        return self.commands

    def built_one(self, name: str) -> Any:
        """Build one command; returns it."""
        self._build(name)
        return self.commands[name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command named by the first argument."""
        self._build(args[0])
        return super().resolve_command(ctx, args)

    def _build(self, name: str) -> None:
        build = self._builders.pop(name, None)
        if build is None:
            return
        command = build()
        command.name = name
        for change in self._prepare:
            change(command)
        self.commands[name] = command


def _build(command: Any) -> Any:
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.registered_commands.append(command)
    return typer.main.get_command(single)
