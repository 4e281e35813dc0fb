"""HTTPS of one plane: certificates from files, read again on SIGHUP without losing a connection."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any, Self

from stemma.config.server_settings import TLSSettings
from stemma.config.words import warn_if_others_read
from stemma.errors import ConfigError

logger = logging.getLogger(__name__)


class ReloadableContext(ssl.SSLContext):
    """A server's context whose connections each get the certificates that were loaded last."""

    settings: TLSSettings
    current: ssl.SSLContext

    def __new__(cls, settings: TLSSettings) -> Self:
        """Load the files. Raises ConfigError that names the file at fault."""
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made.settings = settings
        made.current = load_context(settings)
        return made

    def __init__(self, settings: TLSSettings) -> None:
        pass

    def reload(self) -> None:
        """Read the files again; connections from now on get them. A file that is wrong changes nothing."""
        try:
            self.current = load_context(self.settings)
        except ConfigError as error:
            logger.error("certificates not reloaded, the old ones stay: %s", error)
        else:
            logger.info("certificates reloaded: %s", self.settings.cert)

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection; asyncio calls it once for each."""
        return self.current.wrap_bio(*args, **kwargs)


def load_context(settings: TLSSettings) -> ssl.SSLContext:
    """Return a server's context over TLS 1.2 or newer. Raises ConfigError that names the file at fault.

    With a CA, clients must present a certificate that it signed and that no CRL names.
    """
    assert settings.cert is not None
    assert settings.key is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path in (settings.cert, settings.key, *(settings.ca or ()), *(settings.crl or ())):
        _require(path)
    _load_pair(context, settings)
    for secret in (settings.key, settings.key_password_file):
        if secret is not None:
            warn_if_others_read(secret)
    for path in settings.ca or ():
        _load_authority(context, path, "CA certificate")
    if settings.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    for path in settings.crl or ():
        _load_authority(context, path, "revocation list")
    if settings.crl:
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    return context


def _require(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"TLS: can't read {path}: {error.strerror or error}. "
            "`stemma certs dev` (of stemma-mindie) makes certificates to try it; --config with httpsEnabled "
            "false does without"
        ) from error


def _load_pair(context: ssl.SSLContext, settings: TLSSettings) -> None:
    """Load certificate and key; the passphrase is read only if the key is encrypted."""
    assert settings.cert is not None
    asked = False

    def passphrase() -> bytes:
        nonlocal asked
        asked = True
        return _passphrase(settings)

    try:
        context.load_cert_chain(settings.cert, settings.key, password=passphrase)
    except (ssl.SSLError, ValueError) as error:
        why = "wrong passphrase, or the key is damaged" if asked else "no PEM, or key and certificate differ"
        raise ConfigError(f"TLS: {settings.cert} with {settings.key}: {why} ({error})") from error


def _passphrase(settings: TLSSettings) -> bytes:
    path = settings.key_password_file
    if path is None:
        raise ConfigError(f"TLS: {settings.key} is encrypted; name the file of its passphrase")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS: can't read {path}: {error.strerror or error}") from error
    found = content.split(b"\n", 1)[0].rstrip(b"\r")
    if not found:
        raise ConfigError(f"TLS: {path} has no passphrase in its first line")
    return found


def _load_authority(context: ssl.SSLContext, path: Path, what: str) -> None:
    before = context.cert_store_stats()
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"TLS: {path} is no {what} in PEM: {error}") from error
    gained = "crl" if what == "revocation list" else "x509_ca"
    if context.cert_store_stats()[gained] == before[gained]:
        raise ConfigError(f"TLS: {path} holds no {what}")
