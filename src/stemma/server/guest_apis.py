"""APIs that packages beside the core bring.

A package registers a `GuestApi` in the entry point group ``stemma.apis``, under the name of the server whose
clients it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from stemma import guests
from stemma.errors import ConfigError
from stemma.server.observe.metric_aliases import AliasNames
from stemma.server.routes import Router

GROUP = "stemma.apis"
_BROUGHT_BY = {"mindie": "stemma-mindie"}
"""By the name of a server: the package of Stemma's repository that answers its clients."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuestApi:
    """What a package adds to the server."""

    routers: tuple[Router, ...]
    """Each of their routes says who may see it. Handlers find what they work with by `turn.context` and
    `operator.context`."""
    metric_names: AliasNames | None = None
    """How that server's dashboards call what `/metrics` shows."""


@cache
def guest_apis() -> dict[str, GuestApi]:
    """Return the APIs of installed packages, by name; of one that can't be imported the log tells why."""
    return guests.load_all(GROUP, _logger.warning)


def guest_routers() -> Iterator[Router]:
    """Yield the routers of installed packages."""
    for api in guest_apis().values():
        yield from api.routers


def check_dialect(setting: str, name: str) -> None:
    """Raise ConfigError if `setting` names a server whose package can't be had, and say what to install."""
    if name in _BROUGHT_BY and guests.load(GROUP, name) is None:
        raise ConfigError(f"{setting}: {name!r} comes with {guests.to_install(_BROUGHT_BY[name])}")
