"""What tests look at of a server's process, and the files that one with TLS needs."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

from tests.server.scripted_process import Server


def memory(server: Server) -> int:
    """Return the resident bytes of a server."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def tls_files(folder: Path) -> tuple[dict[str, str], ssl.SSLContext]:
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1", "localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "key.pem").chmod(0o600)
    files = {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    return files, ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
