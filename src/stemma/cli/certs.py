"""``stemma certs``: certificates to try HTTPS with."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stemma.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Make certificates to try HTTPS with.")
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
    from stemma.server.transport.dev_ca import DevCA

    ca = DevCA()
    client = ca.issue_client("stemma development client")
    files: dict[str, tuple[bytes, bool]] = {
        "ca.pem": (ca.pem, False),
        "client.pem": (client.certificate_pem, False),
        "client.key.pem": (client.key_pem(), True),
    }
    for plane in ("", "management/", "metrics/"):
        server = ca.issue_server(hosts)
        passphrase = secrets.token_urlsafe(24).encode()
        ca_file = f"security/{plane}ca/{plane.replace('/', '_')}ca.pem"
        lists = f"security/{plane}certs/" if plane else "security/certs/"
        files |= {
            ca_file: (ca.pem, False),
            f"security/certs/{plane}server.pem": (server.certificate_pem, False),
            f"security/keys/{plane}server.key.pem": (server.key_pem(passphrase), True),
            f"security/pass/{plane}key_pwd.txt": (passphrase + b"\n", True),
            f"{lists}server_crl.pem": (ca.revocation_list(), False),
        }
    return files
