"""`stemma serve A B=path`: several models behind one address (docs/how-to/models.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from stemma.cli.server_process import ServerProcess
from stemma.config.durations import parse_duration
from stemma.config.loading import flag_of, setting_fields
from stemma.config.settings import EngineSettings, Settings
from stemma.errors import ConfigError
from stemma_router.models.loaded import Models

_ALONE = (
    *("kv_events", "kv_events_replay", "record_trace", "public_prefixes", "batch_directory", "served_name"),
    *("management_port", "metrics_port", "management_host", "tls_cert", "memory_limit"),
)
"""Settings of one server: two would take the same port, file or bytes."""
_FRONT = ("host", "port")
"""Settings of the front alone."""


def serve_models(
    settings: Settings,
    config: Path | None,
    flags: Mapping[str, Any],
    models: Sequence[str],
    *,
    max_loaded: int,
    idle_unload: str | None,
    aliases: Sequence[str],
) -> None:
    """Serve several models until a signal. `settings` are those of the front, and what all models share.

    Raises ConfigError for names that are given twice, and for settings that only one server can have.
    """
    from stemma.server.door.access import Access
    from stemma_router.commands.route import end_by_exception, serve_proxy
    from stemma_router.models.front import is_well, make_front
    from stemma_router.routing.relay import Relay, RouteOptions, relay_client

    check_shareable(settings)
    paths = named_models(models)
    makers = {
        name: partial(_process, path, child_flags(settings, config, flags, name, len(paths), max_loaded))
        for name, path in paths.items()
    }
    idle_s = None if idle_unload is None else parse_duration(idle_unload)
    server = settings.server
    access = Access(server)
    options = RouteOptions(
        server.host, server.max_body_bytes, access.admin_key, server.body_memory, server.answer_memory, access
    )
    relay = Relay(relay_client(), options)
    answers = partial(is_well, relay.client)
    state = Models(makers, max_loaded=min(max_loaded, len(paths)), idle_s=idle_s, answers=answers)
    app = make_front(state, _pairs(aliases, "--alias"), relay, options)
    Console(soft_wrap=True, highlight=False).print(
        f"{len(paths)} models, {min(max_loaded, len(paths))} loaded at most, each when it is asked for: "
        + ", ".join(paths)
    )
    end_by_exception()
    serve_proxy(app, server)


def check_shareable(settings: Settings) -> None:
    """Raise ConfigError for a setting that only one server can have, wherever it was set."""
    given = settings.model_dump(exclude_defaults=True)
    for name in _ALONE:
        value: Any = given
        for part in setting_fields()[name].path:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            raise ConfigError(f"{flag_of(name)} is for one model: several can't share it; leave it out")


def named_models(models: Sequence[str]) -> dict[str, str]:
    """Return what is served by name: ``NAME=PATH``, or a path whose last part is its name.

    Raises ConfigError for a name that is given twice, or that can't name a directory.
    """
    found: dict[str, str] = {}
    for given in models:
        name, separator, path = given.partition("=")
        if not separator:
            name, path = Path(given).stem if given.endswith(".gguf") else Path(given).name, given
        if not (name and path) or name.startswith("."):
            raise ConfigError(f"expected a model or NAME=MODEL, got {given!r}")
        if name in found:
            raise ConfigError(f"two models are called {name!r}: give one another name, NAME={path}")
        found[name] = path
    return found


def child_flags(
    settings: Settings,
    config: Path | None,
    flags: Mapping[str, Any],
    name: str,
    num_models: int,
    max_loaded: int,
) -> list[str]:
    """Return the flags of one model's server: the given ones, in its own directory and share of memory."""
    given = {flag: value for flag, value in flags.items() if value is not None and flag in setting_fields()}
    own: dict[str, Any] = {"served_name": name, "host": "127.0.0.1"}
    num_loaded = min(max_loaded, num_models)
    if num_loaded > 1 and settings.engine.cache.kv_cache_memory is None:
        own |= {"kv_cache_fraction": _memory_share(settings.engine) / num_loaded}
    tiers = settings.engine.tiers
    if tiers.disk_cache is not None:
        own |= {"disk_cache": tiers.disk_cache / name.replace("/", "--")}
        own |= {"disk_cache_size": tiers.disk_cache_size // num_models}
    kept = {flag: value for flag, value in given.items() if flag not in ("model", *_FRONT)}
    words = [] if config is None else [f"--config={config}"]
    for flag, value in {**kept, **own}.items():
        words += _written(flag_of(flag), value)
    return words


def _memory_share(engine: EngineSettings) -> float:
    """Return the share of memory that one model alone would have, by the device's own default."""
    from stemma.memory.device.accelerator import resolve_device
    from stemma.memory.device.sizing import CARD_FRACTION, HOST_FRACTION

    is_host = resolve_device(engine.model.device).type == "cpu"
    return engine.cache.kv_cache_fraction or (HOST_FRACTION if is_host else CARD_FRACTION)


def _written(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]


def _pairs(given: Sequence[str], flag: str) -> dict[str, str]:
    found = {}
    for pair in given:
        name, separator, model = pair.partition("=")
        if not (name and separator and model):
            raise ConfigError(f"{flag}: expected NAME=MODEL, got {pair!r}; one model's name is --served-name")
        found[name] = model
    return found


def _process(path: str, flags: Sequence[str]) -> ServerProcess:
    return ServerProcess(Path(path), flags)
