"""The door: every request of a tenant that makes the server work is counted in here, whatever it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from stemma.server.access import tenant_of
from stemma.server.admission.caller import caller
from stemma.server.admission.ledger import Admission


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
