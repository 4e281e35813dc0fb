"""``mindieservice_daemon``: the server as MindIE's start command, configured by its ``config.json``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stemma.cli import run
from stemma.errors import ConfigError

CONFIG_VARIABLE = "MIES_CONFIG_JSON_PATH"
DEFAULT_CONFIG = Path("conf/config.json")


def command(
    config_file: Annotated[
        Path | None,
        typer.Option("--config-file", help=f"Default: {CONFIG_VARIABLE}, or {DEFAULT_CONFIG}."),
    ] = None,
) -> None:
    """Serve what config.json says. The same as `stemma serve --config config.json`."""
    from stemma.cli.serve import serve_from

    named = os.environ.get(CONFIG_VARIABLE)
    path = config_file or (Path(named) if named else DEFAULT_CONFIG)
    if not path.is_file():
        raise ConfigError(f"no configuration at {path}; name one with {CONFIG_VARIABLE} or --config-file")
    serve_from(path, {})


def main() -> None:
    """Run it; errors as in `stemma`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run(app)


if __name__ == "__main__":
    main()
