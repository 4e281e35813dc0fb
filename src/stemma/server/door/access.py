"""Access control: keys, and for servers without a key the checks that keep other sites' web pages out.

A browser on this machine can reach a server that listens only on loopback. Without a key three things
distinguish its pages from programs: `Host` (DNS rebinding: a page's own domain name points here), `Origin` (a
page of another site) and the content type (a form can't send JSON).
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.requests import Request

from stemma.config.server_settings import ServerSettings
from stemma.config.words import read_key
from stemma.errors import ConfigError, Forbidden, Unauthorized, WrongMediaType
from stemma.server.door.caller import caller
from stemma.server.door.keyfile import KeyFile, Tenant
from stemma.server.door.sockets import note_key

logger = logging.getLogger(__name__)

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+)(:(?P<port>[0-9]{1,5}))?")
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers that proxies add: the peer is then not the client."""
_BODY_METHODS = ("POST", "PUT", "PATCH")
JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"
FORM_TYPE = "multipart/form-data"


def host_name(header: str) -> str | None:
    """Return the name in a `Host` header without port and brackets, lower case; None: it is malformed."""
    found = _HOST.fullmatch(header)
    return None if found is None else found["name"].strip("[]").lower()


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine for itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Access:
    """The keys of one server. Raises ConfigError if a key file can't be used."""

    def __init__(self, settings: ServerSettings) -> None:
        self.api_key = read_key(settings.api_key, settings.api_key_file, "api_key")
        self.admin_key = read_key(settings.admin_key, settings.admin_key_file, "admin_key")
        self.keys = None if settings.api_keys_file is None else KeyFile(settings.api_keys_file)
        """Keys of tenants; None: everybody is one."""
        if self.keys is not None and self.api_key is not None:
            raise ConfigError("give api_keys_file or api_key, not both")
        self._is_local = is_loopback(settings.host)
        self._allowed_origins = frozenset(settings.allowed_origins)

    def check(self, request: Request, media_type: str = JSON_TYPE) -> None:
        """Raise unless `request` carries an API key or, if there is none, no web page sent it.

        `media_type`: of its body. A page may send a form, but browsers tell where it comes from.
        """
        if self.keys is not None:
            request.state.tenant = _tenant(request, self.keys)
            caller().tenant = request.state.tenant.name
            note_key(request.scope)
            return
        if self.api_key is not None:
            _check_key(_given_key(request), self.api_key, "API key")
            note_key(request.scope)
            return
        if self._is_local:
            _check_host(request)
            if _may_be_a_page(request):
                _check_media_type(request, (media_type,))
        self._check_origin(request)

    def check_page(self, request: Request) -> None:
        """Raise for what a web page may have sent, whatever keys it has: `Host` and `Origin` alone."""
        if self._is_local:
            _check_host(request)
        self._check_origin(request)

    def check_admin(self, request: Request, media_type: str = JSON_TYPE) -> None:
        """Raise unless `request` carries the admin key or, if there is none, is local."""
        if self.admin_key is not None:
            _check_key(_bearer(request), self.admin_key, "admin key")
            note_key(request.scope)
            return
        if self.keys is not None:
            raise Forbidden("with a file of API keys, administration needs an admin key: see --admin-key")
        peer = request.client.host if request.client is not None else ""
        if not is_loopback(peer) or any(name in request.headers for name in _FORWARDED):
            raise Forbidden("administration from other machines needs an admin key: see --admin-key")
        _check_host(request)
        self._check_origin(request)
        _check_media_type(request, (media_type,))
        if self.api_key is not None:
            _check_key(_bearer(request), self.api_key, "API key")

    def reload_keys(self) -> None:
        """Read the file of keys again, if there is one; if it can't be used, log why and keep what it had."""
        if self.keys is None:
            return
        try:
            self.keys.reload()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)

    @property
    def asks_for_key(self) -> bool:
        """Whether only who has a key may ask."""
        return self.api_key is not None or self.keys is not None

    def _check_origin(self, request: Request) -> None:
        origin = request.headers.get("origin")
        if origin is None or origin in self._allowed_origins or "*" in self._allowed_origins:
            return
        try:
            is_same = urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
        except ValueError:
            is_same = False
        if not is_same:
            raise Forbidden("pages of this origin may not call this server: see --allowed-origins")


def access_of(request: Request) -> Access:
    """Return the keys of the app that serves `request`."""
    access: Access = request.app.state.access
    return access


def has_key(request: Request, key: str | None) -> bool:
    """Whether `request` carries `key`; without one nobody has it."""
    try:
        if key is not None:
            _check_key(_bearer(request), key, "key")
    except Unauthorized:
        return False
    return key is not None


def tenant_of(request: Request) -> Tenant | None:
    """Return who sent `request`, which passed `Access.check`; None where there are no tenants."""
    found: Tenant | None = getattr(request.state, "tenant", None)
    return found


def owner_of(request: Request) -> str:
    """Return whose the things are that `request`, which passed `Access.check`, asks the server to keep."""
    tenant = tenant_of(request)
    return "" if tenant is None else tenant.name


def _tenant(request: Request, keys: KeyFile) -> Tenant:
    keys.refresh()
    tenant = keys.tenant_of(_given_key(request))
    if tenant is None:
        raise Unauthorized("missing or wrong API key; send it as 'Authorization: Bearer KEY'")
    return tenant


def _given_key(request: Request) -> str:
    """Return the key that came as a bearer token or, as Anthropic's clients send it, in its own header."""
    if "authorization" not in request.headers:
        return request.headers.get("x-api-key", "").strip()
    return _bearer(request)


def _bearer(request: Request) -> str:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _check_key(given: str, key: str, what: str) -> None:
    # Headers are bytes; Starlette shows them as Latin-1.
    if not given or not hmac.compare_digest(given.encode("latin-1"), key.encode()):
        raise Unauthorized(f"missing or wrong {what}; send it as 'Authorization: Bearer KEY'")


def _may_be_a_page(request: Request) -> bool:
    """Whether a web page may have sent `request`: browsers tell `Origin`, and only programs no type."""
    return any(name in request.headers for name in ("content-type", "origin", "sec-fetch-site"))


def _check_host(request: Request) -> None:
    name = host_name(request.headers.get("host", ""))
    if name is None or not is_loopback(name):
        raise Forbidden("without a key this server answers to the names of this machine only, e.g. localhost")


def _check_media_type(request: Request, allowed: Iterable[str]) -> None:
    if request.method not in _BODY_METHODS:
        return
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in allowed:
        raise WrongMediaType(f"send the body as 'Content-Type: {' or '.join(allowed)}'")
