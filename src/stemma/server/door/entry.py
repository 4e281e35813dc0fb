"""The door: every request of a tenant that makes the server work is counted in here, whatever it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from stemma.server.door.access import owner_of, tenant_of
from stemma.server.door.answer_memory import AnswerSize
from stemma.server.door.caller import caller
from stemma.server.door.ledger import Admission


def hold(request: Request, field: str, num_bytes: int) -> None:
    """Take what an answer that no turn gives will need, until it has left; `field` asks for it.

    Raises InvalidRequest, RateLimited or Overloaded.
    """
    admission: Admission = request.app.state.admission
    admission.hold(AnswerSize({field: num_bytes}), owner_of(request), caller().holding)


@contextmanager
def counted_in(request: Request) -> Iterator[None]:
    """Count a request as one of its tenant's meanwhile, or until its turns end, which take it over.

    Raises RateLimited: nothing of it has been read then.
    """
    admission: Admission = request.app.state.admission
    one = caller()
    one.reserved = admission.enter(tenant_of(request))
    try:
        yield
    finally:
        if one.reserved is not None:
            one.reserved.close()
