"""``stemma certs``: certificates to try HTTPS with."""

from __future__ import annotations

import os
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stemma.errors import ConfigError

if TYPE_CHECKING:
    import trustme

app = typer.Typer(no_args_is_help=True, help="Make certificates to try HTTPS with.")
VALID_DAYS = 397
"""Longer than this, some clients refuse a server's certificate."""
_CLOCK_SKEW = timedelta(minutes=5)
_ALWAYS_HOSTS = ("127.0.0.1", "localhost", "::1", "127.0.0.2")


@app.callback()
def _group() -> None:
    """Keep ``dev`` a subcommand while it is the only one."""


@app.command()
def dev(
    directory: Annotated[
        Path, typer.Argument(help="Where MindIE's security/ and the client's files go.")
    ] = Path(),
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Another name or address of the server; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Make a development CA with certificates for a server and a client.

    The files lie where MindIE's config.json looks by default: security/ with encrypted keys and their
    passphrases for three planes, beside ca.pem, client.pem and client.key.pem for curl. The CA's own key is
    not kept. Not for production.
    """
    files = _make([*_ALWAYS_HOSTS, *(host or ())])
    present = [name for name in files if (directory / name).exists()]
    if present and not force:
        raise ConfigError(f"{directory / present[0]} exists already; --force overwrites it")
    for name, (content, is_secret) in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        mode = 0o600 if is_secret else 0o644
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{len(files)} files in {directory.resolve()}; valid for {', '.join(_ALWAYS_HOSTS)}")
    console.print("server: stemma serve --config config.json, or stemma serve MODEL with")
    console.print(
        "        --tls-cert security/certs/server.pem --tls-key security/keys/server.key.pem \\\n"
        "        --tls-key-password-file security/pass/key_pwd.txt --tls-ca security/ca/ca.pem"
    )
    console.print(
        "client: curl --cacert ca.pem --cert client.pem --key client.key.pem https://127.0.0.1:1025/..."
    )


def _make(hosts: list[str]) -> dict[str, tuple[bytes, bool]]:
    """Return each file's content and whether it is secret."""
    import trustme

    ca = trustme.CA(organization_name="Stemma", organization_unit_name="development CA")
    expiry = datetime.now(UTC) + timedelta(days=VALID_DAYS)
    client = ca.issue_cert(common_name="stemma development client", not_after=expiry)
    ca_pem, revoked = ca.cert_pem.bytes(), _empty_revocation_list(ca, expiry)
    files: dict[str, tuple[bytes, bool]] = {
        "ca.pem": (ca_pem, False),
        "client.pem": (client.cert_chain_pems[0].bytes(), False),
        "client.key.pem": (client.private_key_pem.bytes(), True),
    }
    for plane in ("", "management/", "metrics/"):
        server = ca.issue_cert(*hosts, not_after=expiry)
        passphrase = secrets.token_urlsafe(24).encode()
        ca_file = f"security/{plane}ca/{plane.replace('/', '_')}ca.pem"
        lists = f"security/{plane}certs/" if plane else "security/certs/"
        files |= {
            ca_file: (ca_pem, False),
            f"security/certs/{plane}server.pem": (server.cert_chain_pems[0].bytes(), False),
            f"security/keys/{plane}server.key.pem": (_encrypted(server, passphrase), True),
            f"security/pass/{plane}key_pwd.txt": (passphrase + b"\n", True),
            f"{lists}server_crl.pem": (revoked, False),
        }
    return files


def _encrypted(issued: trustme.LeafCert, passphrase: bytes) -> bytes:
    """Return the key of a certificate, PEM; trustme leaves it plain."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), password=None)
    encryption = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _empty_revocation_list(ca: trustme.CA, expiry: datetime) -> bytes:
    """Return the authority's list, PEM, of no certificates; trustme makes none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = serialization.load_pem_private_key(ca.private_key_pem.bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(ca.cert_pem.bytes()).subject
    made_at = datetime.now(UTC) - _CLOCK_SKEW
    builder = x509.CertificateRevocationListBuilder(issuer, last_update=made_at, next_update=expiry)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
