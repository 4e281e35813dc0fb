"""Who asks: known to all code that works for one HTTP request, without being passed on."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stemma.budgets import Holding

if TYPE_CHECKING:  # proxies need callers, and no model
    from stemma.model.vision.prompt import ReadImage
    from stemma.server.door.ledger import Reserved


@dataclass(slots=True)
class Used:
    """Tokens of the answers that one request got whole."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(slots=True)
class Caller:
    """One HTTP request's id, tenant, and what it has taken from the budgets until it is answered."""

    x_request_id: str = ""
    """As the client sent it in `x-request-id`, or made by us."""
    tenant: str = ""
    """Known once the key was checked; empty: there are no tenants."""
    is_logged: bool = False
    """Whether a line of the request log tells of it."""
    holding: Holding = field(default_factory=Holding)
    reserved: Reserved | None = None
    """Its place among the tenant's requests, until the turns that it asks for take it over."""
    used: Used = field(default_factory=Used)
    images: dict[str, ReadImage] = field(default_factory=dict)
    """Its images that were read, by their URL: each once, however often a part of the prompt is rendered."""


_current: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Return who the running code works for; nobody in particular outside of a request."""
    return _current.get(None) or Caller()


def begin_call(one: Caller) -> None:
    """Let the code that this task runs from now on work for `one`."""
    _current.set(one)
