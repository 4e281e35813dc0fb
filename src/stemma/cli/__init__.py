"""The ``stemma`` command; one file (or package) per subcommand.

A subcommand is imported only when it runs, so that ``--help`` needs neither torch nor transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stemma.errors import StemmaError

EXIT_USAGE = 2

COMMANDS = {
    "serve": (
        "serve:command",
        "Serve a Hugging Face checkpoint, or `demo`: OpenAI's API, TGI's /generate, metrics.",
    ),
    "chat": ("chat:command", "Chat in the terminal; after each answer, how many tokens came from the cache."),
    "launch": (
        "launch:command",
        "Run a coding agent against a running server: claude, codex or opencode.",
    ),
    "bench": (
        "bench:command",
        "Measure a server: first token, tokens per second, and how much of the prompts came from its cache.",
    ),
    "eval": (
        "evaluate:command",
        "Score a model: perplexity of a text, answers to MMLU's questions, computed anew and from the cache.",
    ),
    "demo": ("demo:command", "Show the prefix cache at work on a small model, in under a minute."),
    "doctor": (
        "doctor:command",
        "Print what a bug report needs: kernels, memory, versions, tiers. Takes the flags of serve.",
    ),
    "replay": (
        "replay:replay_command",
        "Replay a trace through the index and the eviction policies that serve requests.",
    ),
    "advise": (
        "advise:command",
        "Say what to change for this traffic: memory, tiers, policy, prompts, or the cache itself.",
    ),
    "plan": (
        "plan:command",
        "Predict hit ratio, time to first token and cost of tiers of given sizes for recorded traffic.",
    ),
    "order": (
        "order:command",
        "Replay a trace with a service-time model: hits and waiting by scheduling order.",
    ),
    "lab": ("lab:app", "Compare eviction policies on traces; run the router before simulated servers."),
    "route": (
        "route:command",
        "Send each request to the best of equal servers, or to a prefill and then to a decode server.",
    ),
    "cluster": ("cluster:app", "Several engines of one model, started from one file."),
    "usage": (
        "usage:command",
        "Sum the usage ledger: hit and miss tokens by tier, output tokens, and costs if prices are given.",
    ),
    "explain": (
        "explain:command",
        "Tell what a request got from the cache, where it parts from what is cached, and why.",
    ),
    "top": (
        "top:command",
        "Show requests, hits by tier, tiers and tenants of a running server. q or Ctrl-C ends it.",
    ),
    "cache": ("cache:app", "Inspect and clean disk caches, export and import prefixes."),
    "keys": ("keys:app", "API keys and the tenants that they belong to."),
    "pool": ("pool:app", "Blocks shared by machines."),
    "config": ("config:app", "Check a configuration file, explain a setting or a key."),
    "certs": ("certs:app", "Make certificates to try HTTPS with."),
}
"""By name: where in this package the command is (a function or a group of commands), and its help."""


class LazyCommands(TyperGroup):
    """Holds names and help of all commands, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called, and resolve it as typer does."""
        if args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import a subcommand and return it as typer runs it."""
    module, attribute = COMMANDS[name][0].split(":")
    target = getattr(import_module(f"stemma.cli.{module}"), attribute)
    if isinstance(target, typer.Typer):
        return typer.main.get_group(target)
    single = typer.Typer(add_completion=False)
    single.command(name)(target)
    return typer.main.get_command(single)


def make_app() -> typer.Typer:
    """Return the command line: a file of this package per command, a line in `COMMANDS` for each."""
    app = typer.Typer(
        cls=LazyCommands, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False
    )
    app.callback()(_describe)
    for name, (_, help_text) in COMMANDS.items():
        app.command(name, help=help_text)(_not_loaded)
    return app


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
