"""``stemma serve MODEL``: load a checkpoint and serve it over HTTP."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from stemma import guests
from stemma.cli.lifeline import end_with
from stemma.cli.options import with_settings_flags
from stemma.cli.progress import open_progress
from stemma.cli.ready_line import ready_line
from stemma.config.loading import load_settings
from stemma.config.settings import EngineSettings, Settings
from stemma.config.sizes import format_size
from stemma.errors import ConfigError
from stemma.model.files.directory import check_directory
from stemma.model.load.demo import is_demo
from stemma.model.load.located import located_model, present_path
from stemma.model.load.plan import LoadPlan
from stemma.native.library import load_kernels, missed_level, prepare_kernels
from stemma.supervision import LoggingSupervisor

if TYPE_CHECKING:
    from stemma.engine.async_engine import AsyncEngine
    from stemma.engine.build import EngineParts
    from stemma.model.text.tokenizer import Tokenizer
    from stemma.server.door.access import Access
    from stemma.server.transport.planes import Listeners

Report: TypeAlias = Callable[[str, float], None]
"""Takes the stage of loading and the share of it that is done."""


@with_settings_flags
def command(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="TOML, or MindIE's config.json; flags and STEMMA_... variables beat it."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Engines behind one address (stemma-router[ray])."),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            help="Further models, each as MODEL or NAME=MODEL, loaded when asked for (stemma-router)."
        ),
    ] = None,
    max_loaded: Annotated[
        int | None, typer.Option(min=1, help="Of several models, how many are loaded at once. [default: 1]")
    ] = None,
    idle_unload: Annotated[
        str | None, typer.Option(help="Of several models, unload those that idle for, e.g., 10m.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="Of several models, another name for one: gpt-4o=qwen3.")
    ] = None,
    lifeline: Annotated[int | None, typer.Option(hidden=True, min=0)] = None,
    **flags: Any,
) -> None:
    """Serve a Hugging Face checkpoint, or `demo`: OpenAI's API, TGI's /generate, metrics."""
    if lifeline is not None:
        end_with(lifeline)
    if replicas is not None:
        _serve_replicas(load_settings(file=config, environ=os.environ, flags=flags), replicas)
        return
    if more or max_loaded or idle_unload or alias:
        several = {"max_loaded": max_loaded or 1, "idle_unload": idle_unload, "aliases": alias or []}
        _serve_models(config, flags, more or [], several)
        return
    serve_from(config, flags)


def _serve_models(config: Path | None, flags: Mapping[str, Any], more: list[str], several: Any) -> None:
    """Leave it to the package that runs several models. Raises ConfigError if it isn't installed."""
    if (serve := guests.load("stemma.models")) is None:
        raise ConfigError(f"several models need {guests.to_install('stemma-router')}")
    settings = load_settings(file=config, environ=os.environ, flags=flags)
    serve(settings, config, flags, [str(settings.engine.model.path), *more], **several)


def _serve_replicas(settings: Settings, count: int) -> None:
    """Leave it to the package that runs several engines. Raises ConfigError if it isn't installed."""
    if (serve := guests.load("stemma.replicas")) is None:
        raise ConfigError(f"--replicas needs {guests.to_install('stemma-router', 'ray')}")
    serve(settings, count)


def serve_from(config: Path | None, flags: Mapping[str, Any]) -> NoReturn:
    """Serve what a file, the environment and flags say, until a signal; end the process' command."""
    console = Console(soft_wrap=True, highlight=False)
    settings = load_settings(
        file=config,
        environ=os.environ,
        flags=flags,
        note=lambda line: console.print(f"[yellow]{escape(line)}[/]"),
    )
    from stemma.server.observe.logs import set_up_logs

    set_up_logs(settings.server)
    if present_path(settings.engine.model) is None and not is_demo(settings.engine.model.path):
        console.print(f"{escape(str(settings.engine.model.path))} isn't on this machine; downloading it")
    settings = with_model(settings)
    with ExitStack() as stack:
        prepare_kernels(settings.engine.model.isa)
        with _uncollected(), ThreadPoolExecutor(1, "stemma-imports") as beside:
            plan = _begin_loading(settings)
            stack.callback(plan.close)
            from stemma.model.load.model_list import import_models

            import_models()
            from stemma.engine.async_engine import AsyncEngine
            from stemma.server.door.access import is_loopback

            access, listeners = open_front(settings, stack)
            importing = beside.submit(_import_server)
            # What was imported stays: the look at the end is at the rest.
            gc.freeze()
            from stemma.cli.late_pool import without_late_pool

            startable, late = without_late_pool(settings)
            engine = _load(startable, partial(AsyncEngine.from_settings, plan=plan))
            if engine.pool is not None:
                engine.pool.wanted = late
            serve = importing.result().serve

        def on_ready(url: str) -> None:
            console.print(_summary(engine.parts, settings))
            console.print(_answers_line(engine.tokenizer, settings))
            is_open = not access.asks_for_key and not settings.tls.ca
            if is_open and not is_loopback(settings.server.host):
                console.print("[yellow]Others can reach this address; --api-key asks them for a key.[/]")
            for port in listeners.ports[1:]:
                console.print(f"{' and '.join(sorted(port.planes))}: {port.url}")
            console.print(ready_line(url, "Ctrl-C drains and stops"))

        raise typer.Exit(serve(engine, settings, listeners, on_ready))


def _import_server() -> Any:
    """Return the module `runtime`, and import what packages add to the server."""
    import_module("stemma.server.guest_apis").guest_apis()
    return import_module("stemma.server.runtime")


def _answers_line(tokenizer: Tokenizer, settings: Settings) -> str:
    from stemma.server.answers.families import answer_format, said

    server = settings.server
    form = answer_format(server.tool_parser, server.reasoning_parser, tokenizer)
    line, is_warning = said(form, tokenizer)
    return f"[yellow]{escape(line)}[/]" if is_warning else escape(line)


def with_model(settings: Settings) -> Settings:
    """Return the settings with a checked path of this machine in place of a name; `demo` stays.

    Raises ModelError.
    """
    model = settings.engine.model
    if is_demo(model.path):
        return settings
    model = located_model(model)
    check_directory(model.path)
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"model": model})})


def open_front(settings: Settings, stack: ExitStack) -> tuple[Access, Listeners]:
    """Return who may ask, and the open ports, which `stack` closes.

    Raises ConfigError for keys, certificates, a ledger or addresses that a server can't have, and for a
    package that a setting needs and that isn't installed.
    """
    from stemma.server.door.access import Access
    from stemma.server.guest_apis import check_guests
    from stemma.server.transport.planes import listen, listen_planes

    check_guests(settings)
    access = Access(settings.server)
    if settings.server.ledger is not None:
        from stemma.insight.ledger import check_ledger

        check_ledger(settings.server.ledger)
    return access, stack.enter_context(listen_planes(settings, listen))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import and load without Python's collector; then let it look once, and at what stays never again.

    It looks through all objects each time their number has grown by a quarter: that is a third of the time
    that the imports take, and finds nothing, since what is imported stays.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        if was_enabled:
            gc.enable()


def _begin_loading(settings: Settings) -> LoadPlan:
    """Begin beside the imports what needs files alone."""
    engine = settings.engine
    is_whole = engine.parallel.num_ranks == 1 and engine.speculation.mode != "mtp"
    return LoadPlan(engine.model, LoggingSupervisor(), is_whole=is_whole)


def _load(settings: Settings, start: Callable[[EngineSettings, Report], AsyncEngine]) -> AsyncEngine:
    """Load the checkpoint, telling the progress, and start the engine."""
    with open_progress("loading") as progress:
        return start(settings.engine, progress)


def _tiers(settings: Settings) -> str:
    """Return what lies below the device tier, e.g. ``host 8.0 GB, disk 100.0 GB; ``, or what would."""
    tiers, pool = settings.engine.tiers, settings.engine.cache.pool
    parts = []
    if tiers.host_cache is not None:
        parts.append(f"host {format_size(tiers.host_cache)}")
    if tiers.disk_cache is not None:
        parts.append(f"disk {format_size(tiers.disk_cache_size)} in {tiers.disk_cache}")
    if pool is not None:
        parts.append(f"pool {pool.name}")
    if not parts and settings.engine.cache.enable_prefix_cache:
        parts.append("no tiers below: --disk-cache auto keeps prefixes over restarts")
    return ", ".join(parts) + "; " if parts else ""


def _kernels_note(isa: str) -> str:
    """Return what is lost where the processor's level doesn't run, or nothing."""
    missed = missed_level(isa)
    if missed is None:
        return ""
    kernels = load_kernels(isa)
    runs = "no kernels run" if kernels is None else f"kernels run at {kernels.level}"
    return f"; [yellow]{runs}, not at {missed} as this processor could: `stemma doctor` says why[/]"


def _summary(parts: EngineParts, settings: Settings) -> str:
    cache = settings.engine.cache
    num_blocks = parts.engine.stats().num_blocks
    layout = parts.model.layout(cache.block_size, cache.kv_cache_dtype, cache.kv_layout)
    size = format_size(num_blocks * layout.block_bytes)
    formats = f" ({parts.model.info.formats})" if parts.model.info.formats else ""
    reuse = f"{cache.index} index, {cache.eviction} eviction" if cache.enable_prefix_cache else "cache off"
    ranks = f" on each of {parts.num_ranks} ranks" if parts.num_ranks > 1 else ""
    kind = ("" if layout.stored == "plain" else f"{layout.stored} ") + ("nz " if layout.tiled else "")
    return (
        f"[bold]{parts.model_name}[/] {parts.model.info.architecture} {layout.dtype}, "
        f"weights {format_size(parts.model.weight_bytes)}{formats}{ranks}; "
        f"{kind}KV {size} = {num_blocks * cache.block_size:,} tokens in blocks of {cache.block_size}; "
        f"{reuse}; {_tiers(settings)}"
        f"context {parts.engine.limits.max_tokens}{_kernels_note(settings.engine.model.isa)}"
    )
