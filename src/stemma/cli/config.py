"""``stemma config``: check a configuration file, explain a key."""

from __future__ import annotations

import difflib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.markup import escape

from stemma.config.loading import ENV_PREFIX, SettingField, flag_of, load_settings, setting_fields
from stemma.config.readers import WORKS, KeyRow, installed_readers
from stemma.config.settings import EngineSettings, Settings
from stemma.errors import ConfigError
from stemma.model.load.located import is_here, present_path

app = typer.Typer(no_args_is_help=True, help="Check a configuration file, explain a setting or a key.")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="TOML, YAML, or MindIE's config.json (stemma-mindie).")],
) -> None:
    """Do what `stemma serve --config FILE` does before it reads weights; exit status 2 where it would end."""
    console = Console(soft_wrap=True, highlight=False)
    notes: list[str] = []
    settings = load_settings(file=file, environ=os.environ, note=notes.append)
    defaults = {name: setting.info.default for name, setting in setting_fields().items()}
    for name, setting in setting_fields().items():
        value: object = settings
        for part in setting.path:
            value = None if value is None else getattr(value, part)
        if value is not None and value != defaults[name]:
            console.print(f"  {name} = {escape(_shown(value))}")
    notes += _rehearse(settings)
    for line in notes:
        console.print(f"[yellow]{escape(line)}[/]")
    console.print(f"[green]{escape(str(file))} is right[/]")


def _rehearse(settings: Settings) -> list[str]:
    """Go `stemma serve`'s way up to the weights; return what couldn't be checked. Raises what it raises."""
    from stemma.cli.late_pool import without_late_pool
    from stemma.cli.serve import open_front, with_model
    from stemma.engine.preflight import check_engine, check_surroundings, remarks
    from stemma.native.library import prepare_kernels

    model = settings.engine.model
    is_fetched = not is_here(model) and present_path(model) is None
    if not is_fetched:
        settings = with_model(settings)
    prepare_kernels(model.isa)
    with ExitStack() as stack:
        open_front(settings, stack)
        settings, late = without_late_pool(settings)
        told = [] if late is None else [f"pool {late.name} doesn't answer: the server starts without it"]
        if not is_fetched:
            engine = check_engine(settings.engine)
            return [*told, *remarks(engine), *_room(engine)]
        check_surroundings(settings.engine)
    return [
        *told,
        f"the checkpoint {model.path} isn't on this machine: the server would fetch it, unchecked here",
    ]


def _room(engine: EngineSettings) -> list[str]:
    """Return a line if the disk has less room than the disk tier may take."""
    from stemma.cli.doctor.storage import examine_tiers

    tiers = engine.tiers.model_copy(update={"host_cache": None})  # memory is checked with the engine
    return examine_tiers(tiers, None).problems(0)


@app.command()
def explain(
    key: Annotated[
        str | None,
        typer.Argument(help="A setting (block_size) or a key of MindIE's (cacheBlockSize)."),
    ] = None,
) -> None:
    """Say what a setting or a key of MindIE's config.json means: range, default, what it does here."""
    console = Console(soft_wrap=True, highlight=False)
    fields = setting_fields()
    rows = [(reader.server, row) for reader in installed_readers() for row in reader.rows()]
    if key is None:
        for setting in fields.values():
            console.print(f"{setting.name}: {escape(_help(setting))}")
        for _, row in rows:
            console.print(f"{row.name}: {row.does}, {escape(row.detail)}")
        return
    wanted = key.rpartition(".")[2]
    found = [(of, row) for of, row in rows if row.key == wanted and row.name.endswith(key)]
    flat = wanted.removeprefix(ENV_PREFIX).lower().lstrip("-").replace("-", "_")
    if flat in fields:
        _print_setting(console, fields[flat])
    for server, row in found:
        _print_row(console, server, row)
    if flat not in fields and not found:
        known = [*fields, *(row.key for _, row in rows)]
        [nearest] = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
        raise ConfigError(f"nothing is called {key!r}; the nearest known name is {nearest!r}")


def _print_setting(console: Console, setting: SettingField) -> None:
    default = setting.info.default
    table = ".".join(setting.table)
    console.print(f"[bold]{setting.name}[/]: {escape(_help(setting))}")
    console.print(f"  default: {escape('required' if default is PydanticUndefined else _shown(default))}")
    console.print(
        f"  flag {flag_of(setting.name)}, variable {ENV_PREFIX}{setting.name.upper()}, "
        f"in the file: {escape(f'[{table}] ' if table else '')}{setting.path[-1]}"
    )


def _print_row(console: Console, server: str, row: KeyRow) -> None:
    console.print(f"[bold]{row.name}[/] ({server}): {row.does}")
    if row.description:
        console.print(f"  {escape(row.description)}")
    limits = f"; {row.limits}" if row.limits else ""
    console.print(f"  default: {escape(row.default)}{limits}")
    console.print(f"  {'becomes' if row.does == WORKS else 'because'}: {escape(row.detail)}")


def _help(setting: SettingField) -> str:
    return " ".join((setting.info.description or "").split())


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return str(value) if isinstance(value, Path) else json.dumps(value, default=str)
