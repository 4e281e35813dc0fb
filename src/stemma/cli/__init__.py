"""The ``stemma`` command; one file (or package) per subcommand.

Subcommands import torch, transformers and the server only when they run, so that ``--help`` is quick.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from stemma.errors import StemmaError

EXIT_USAGE = 2


def make_app() -> typer.Typer:
    """Return the command line: a file of this package per command, a line here for each."""
    from stemma.cli import (
        bench,
        cache,
        certs,
        chat,
        config,
        demo,
        doctor,
        keys,
        order,
        plan,
        pool,
        route,
        serve,
        usage,
    )
    from stemma.cli.replay import replay_command

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_describe)
    app.command("serve")(serve.command)
    app.command("chat")(chat.command)
    app.command("bench")(bench.command)
    app.command("demo")(demo.command)
    app.command("doctor")(doctor.command)
    app.command("replay")(replay_command)
    app.command("plan")(plan.command)
    app.command("order")(order.command)
    app.command("route")(route.command)
    app.command("usage")(usage.command)
    app.add_typer(cache.app, name="cache")
    app.add_typer(keys.app, name="keys")
    app.add_typer(pool.app, name="pool")
    app.add_typer(config.app, name="config")
    app.add_typer(certs.app, name="certs")
    return app


def main() -> None:
    """Run a command of `stemma`."""
    run(make_app())


def run(app: typer.Typer) -> None:
    """Run a command. An error that Stemma raises on purpose is one line on stderr and exit status 2."""
    try:
        app()
    except StemmaError as error:
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        console.print(f"error: {error}", style="red")
        sys.exit(EXIT_USAGE)


def _describe() -> None:
    """Stemma serves language models and reuses every prefix it has computed."""
