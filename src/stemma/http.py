"""HTTP clients for our own calls: the only place that makes them.

They never go through a proxy that the environment names (`HTTP_PROXY`), nor take a password from `.netrc`:
calls carry keys and prompts, and go to servers that the operator named.
"""

from __future__ import annotations

from typing import Any

import httpx


def http_client(**options: Any) -> httpx.Client:
    """Return a client with httpx's `options`; use it as a context manager."""
    return httpx.Client(trust_env=False, **options)


def async_http_client(**options: Any) -> httpx.AsyncClient:
    """Return the same for an event loop."""
    return httpx.AsyncClient(trust_env=False, **options)
