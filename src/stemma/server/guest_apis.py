"""APIs that packages beside the core bring.

A package registers a `GuestApi` in the entry point group ``stemma.apis``, under the name of the server whose
clients it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from stemma import guests
from stemma.config.settings import Settings
from stemma.errors import ConfigError

if TYPE_CHECKING:  # what a command checks before it serves needs no web framework
    from fastapi import FastAPI

    from stemma.server.observe.metric_aliases import AliasNames
    from stemma.server.routes import Router

GROUP = "stemma.apis"
_BROUGHT_BY = {"mindie": "stemma-mindie", "batch": "stemma-batch", "receipts": "stemma-receipts"}
"""By the name of the entry point: the package of Stemma's repository."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuestApi:
    """What a package adds to the server."""

    routers: tuple[Router, ...]
    """Each of their routes says who may see it. Handlers find what they work with by `turn.context` and
    `operator.context`."""
    metric_names: AliasNames | None = None
    """How that server's dashboards call what `/metrics` shows."""
    begin: Callable[[FastAPI], AbstractAsyncContextManager[None] | None] | None = None
    """Makes what the routes need beside the contexts, once these are in the app's `state`; what it returns is
    open while the server serves. Raises ConfigError or StorageError."""


@cache
def guest_apis() -> dict[str, GuestApi]:
    """Return the APIs of installed packages, by name; of one that can't be imported the log tells why."""
    return guests.load_all(GROUP, _logger.warning)


def guest_routers() -> Iterator[Router]:
    """Yield the routers of installed packages."""
    for api in guest_apis().values():
        yield from api.routers


def begun_parts(app: FastAPI) -> list[AbstractAsyncContextManager[None]]:
    """Let each package make its parts; return what is open while the server serves.

    Raises ConfigError or StorageError.
    """
    begun = [api.begin(app) for api in guest_apis().values() if api.begin is not None]
    return [part for part in begun if part is not None]


def check_guests(settings: Settings) -> None:
    """Raise ConfigError if a package that a setting needs isn't there, and say what to install."""
    needed = {f"metric_aliases {name}": name for name in settings.server.metric_aliases}
    needed[f"dialect {settings.requests.dialect}"] = settings.requests.dialect
    if settings.server.batch_directory is not None:
        needed["batch_directory"] = "batch"
    if settings.server.receipts is not None:
        needed["receipts"] = "receipts"
    for setting, name in needed.items():
        if name in _BROUGHT_BY and guests.load(GROUP, name) is None:
            raise ConfigError(f"{setting} needs {guests.to_install(_BROUGHT_BY[name])}")
