"""The page of the command line, from the commands themselves; guests with the package that brings them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from reference_pages.markdown import prose, table
from stemma.cli import COMMANDS, GUESTS, guest_commands, load_command
from stemma.config.loading import setting_fields

_HEAD = """# Command line

Commands of the core, then those of packages. `stemma COMMAND --help` prints the same.
"""
_MANY_SETTINGS = 100
_ALL = "\nEvery [setting](settings.md) is an option of this command.\n"


def page() -> str:
    """Return the page: a section for each command and each of its own commands."""
    parts = [_HEAD]
    for name in (*COMMANDS, *guest_commands()):
        for path, command in commands_below(name, load_command(name)):
            parts.append(_section(path, command, _package(name)))
    return "".join(parts)


def commands_below(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield (``cache export``, command) of a command and of those in it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands_below(f"{path} {name}", inner)


def _package(name: str) -> str | None:
    return next((package for package, names in GUESTS.items() if name in names), None)


def _section(path: str, command: Any, package: str | None) -> str:
    level = "##" if " " not in path else "###"
    parts = [f"\n{level} `stemma {path}`\n\n{prose(command.help)}\n"]
    if package is not None and level == "##":
        parts.append(f"\nComes with the package `{package}`.\n")
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    settings = [one for one in command.params if one.name in setting_fields()]
    options = [one for one in command.params if _is_shown(one)]
    if arguments:
        words = " ".join(_argument(one) for one in arguments)
        parts.append(f"\n`stemma {path} {words}`\n")
    if len(settings) > _MANY_SETTINGS:
        parts.append(_ALL)
        options = [one for one in options if one not in settings]
    if options:
        parts.append(
            "\n"
            + table(
                ("option", "takes", "default", ""), (_row(one, typer.Context(command)) for one in options)
            )
        )
    return "".join(parts)


def _is_shown(one: Any) -> bool:
    return one.param_type_name == "option" and not one.hidden and one.name != "help"


def _argument(one: Any) -> str:
    name = (one.metavar or one.name).upper().strip("[]")
    name += "..." if one.nargs == -1 else ""
    return name if one.required else f"[{name}]"


def _row(one: Any, context: typer.Context) -> tuple[str, str, str, str]:
    flags = ", ".join(f"`{flag}`" for flag in (*one.opts, *one.secondary_opts))
    takes = "" if one.is_flag else one.display_type(context).strip("<>").replace("|", ", ")
    default = one.default
    shown = "" if default in (None, False, "", ()) or callable(default) else f"`{default}`"
    return flags + (", may be repeated" if one.multiple else ""), takes, shown, prose(one.help)
