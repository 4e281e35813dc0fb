"""The ``stemma`` command; one file (or package) per subcommand, and those of packages.

A subcommand is imported only when it runs, so that ``--help`` needs neither torch nor transformers.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stemma import guests
from stemma.errors import ConfigError, StemmaError

EXIT_USAGE = 2
Commands = dict[str, tuple[str, str]]
"""By name: where the command is (a function or a group of commands), and its help."""

COMMANDS: Commands = {
    "serve": (
        "stemma.cli.serve:command",
        "Serve a Hugging Face checkpoint, or `demo`: OpenAI's API, TGI's /generate, metrics.",
    ),
    "chat": (
        "stemma.cli.chat:command",
        "Chat in the terminal; after each answer, how many tokens came from the cache.",
    ),
    "launch": (
        "stemma.cli.launch:command",
        "Run a coding agent against a running server: claude, codex or opencode.",
    ),
    "demo": ("stemma.cli.demo:command", "Show the prefix cache at work on a small model, in under a minute."),
    "doctor": (
        "stemma.cli.doctor:command",
        "Print what a bug report needs: kernels, memory, versions, tiers; of a URL, what that server says.",
    ),
    "usage": (
        "stemma.cli.usage:command",
        "Sum the usage ledger: hit and miss tokens by tier, output tokens, and costs if prices are given.",
    ),
    "explain": (
        "stemma.cli.explain:command",
        "Tell what a request got from the cache, where it parts from what is cached, and why.",
    ),
    "top": (
        "stemma.cli.top:command",
        "Show requests, hits by tier, tiers and tenants of a running server. q or Ctrl-C ends it.",
    ),
    "cache": ("stemma.cli.cache:app", "Inspect and clean disk caches, export and import prefixes."),
    "keys": ("stemma.cli.keys:app", "API keys and the tenants that they belong to."),
    "config": ("stemma.cli.config:app", "Check a configuration file, explain a setting or a key."),
}
"""Of the core."""
GUESTS = {
    "stemma-lab": ("replay", "advise", "lint", "plan", "order", "lab", "pool", "eval", "bench"),
    "stemma-router": ("route", "cluster"),
    "stemma-mindie": ("certs",),
    "stemma-receipts": ("verify", "receipts-key"),
}
"""Packages of this repository that bring further commands, and their names: what to install for one."""
_HELP = {"help_option_names": ["--help", "-h"]}
GROUP = "stemma.commands"
"""Of entry points, one a package: a dictionary such as `COMMANDS`, in a module that imports little."""


class LazyCommands(TyperGroup):
    """Holds names and help of all commands, and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands: the core's, then those of packages, as these stand."""
        for name, (_, help_text) in guest_commands().items():
            self.commands.setdefault(name, _placeholder(name, help_text))
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called, and resolve it as typer does.

        Raises ConfigError if it belongs to a package that isn't installed.
        """
        name = args[0]
        if name in COMMANDS or name in guest_commands():
            self.commands[name] = load_command(name)
        for package, names in GUESTS.items():
            if name in names and name not in self.commands:
                raise ConfigError(f"stemma {name} comes with {guests.to_install(package)}")
        return super().resolve_command(ctx, args)


@cache
def guest_commands() -> Commands:
    """Return the commands of installed packages. None takes the place of one of the core's."""
    packages = guests.load_all(GROUP, lambda line: typer.echo(f"warning: {line}", err=True))
    found = {name: command for commands in packages.values() for name, command in commands.items()}
    return {name: command for name, command in found.items() if name not in COMMANDS}


def load_command(name: str) -> Any:
    """Import a subcommand and return it as typer runs it."""
    module, attribute = (COMMANDS.get(name) or guest_commands()[name])[0].split(":")
    target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return typer.main.get_group(target)
    single = typer.Typer(add_completion=False)
    single.command(name, cls=getattr(target, "command_class", None), context_settings=_HELP)(target)
    return typer.main.get_command(single)


def make_app() -> typer.Typer:
    """Return the command line: a file of this package per command, a line in `COMMANDS` for each."""
    app = typer.Typer(
        cls=LazyCommands,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(_describe)
    for name, (_, help_text) in COMMANDS.items():
        app.command(name, help=help_text)(_not_loaded)
    return app


def _placeholder(name: str, help_text: str) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(name, help=help_text)(_not_loaded)
    return typer.main.get_command(app)


def _not_loaded() -> None:
    raise AssertionError("LazyCommands puts the command itself in this place")


def main() -> None:
    """Run a command of `stemma`."""
    run(make_app())


def run(app: typer.Typer) -> None:
    """Run a command. An error that Stemma raises on purpose is one line on stderr and exit status 2."""
    try:
        app()
    except StemmaError as error:
        from rich.console import Console

        from stemma.terminal_text import visible_lines

        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        console.print(f"error: {visible_lines(str(error))}", style="red")
        sys.exit(EXIT_USAGE)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from stemma import __version__

        typer.echo(f"stemma {__version__}")
        raise typer.Exit


def _describe(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end."),
    ] = False,
) -> None:
    """Stemma serves language models and reuses every prefix it has computed."""
