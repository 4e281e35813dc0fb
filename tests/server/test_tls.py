"""HTTPS and mutual TLS per plane: who gets in, who doesn't, and what SIGHUP changes."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from stemma.config.server_settings import ServerSettings, TLSSettings
from stemma.errors import ConfigError
from stemma.server.door.access import Access
from stemma.server.transport.planes import Plane, plane_of
from stemma.server.transport.tls import ReloadableContext, load_context
from tests.certificates import encrypted, revocation_list
from tests.server.scripted_process import scripted_server

HOSTS = ("127.0.0.1", "localhost")


class Files:
    """Certificates of a server and its clients in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = trustme.CA()
        self.server = self.ca.issue_cert(*HOSTS)
        self.client = self.ca.issue_cert(common_name="alice")
        self.write("ca.pem", self.ca.cert_pem.bytes())
        self.write("server.pem", self.server.cert_chain_pems[0].bytes())
        self.write("server.key", encrypted(self.server.private_key_pem, b"secret"))
        self.write("password", b"secret\n")
        self.write("crl.pem", revocation_list(self.ca))

    def write(self, name: str, content: bytes) -> Path:
        path = self.directory / name
        path.write_bytes(content)
        return path

    def settings(self, **changes: Any) -> TLSSettings:
        given: dict[str, Any] = {
            "cert": self.directory / "server.pem",
            "key": self.directory / "server.key",
            "key_password_file": self.directory / "password",
            "ca": (self.directory / "ca.pem",),
            "crl": (self.directory / "crl.pem",),
        }
        return TLSSettings(**(given | changes))

    def client_context(self, issued: trustme.LeafCert | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.ca.cert_pem.bytes().decode())
        if issued is not None:
            pair = self.write("client.pem", issued.private_key_and_cert_chain_pem.bytes())
            context.load_cert_chain(pair)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def ask(url: str, context: ssl.SSLContext) -> httpx.Response:
    with httpx.Client(verify=context) as client:
        return client.post(f"{url}/generate", json={"inputs": "ab"})


def is_refused_soon(url: str, context: ssl.SSLContext) -> bool:
    for _ in range(100):
        try:
            ask(url, context)
        except httpx.TransportError:
            return True
    return False


def test_mutual_tls_with_an_encrypted_key_revocation_and_reload(tokenizer_path: Path, files: Files) -> None:
    tls = json.loads(files.settings().model_dump_json())
    with scripted_server(tokenizer_path, settings={"tls": tls}) as (process, url):
        assert url.startswith("https://127.0.0.1:")
        known = files.client_context(files.client)
        assert ask(url, known).status_code == 200
        for stranger in (None, trustme.CA().issue_cert(common_name="alice")):
            with pytest.raises(httpx.TransportError):
                ask(url, files.client_context(stranger))
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health")

        with httpx.Client(verify=known) as old_connection:
            assert old_connection.get(f"{url}/health").status_code == 200
            files.write("crl.pem", revocation_list(files.ca, [files.client]))
            process.send_signal(signal.SIGHUP)
            assert is_refused_soon(url, files.client_context(files.client))
            assert old_connection.get(f"{url}/health").status_code == 200, "open connections stay"
        assert ask(url, files.client_context(files.ca.issue_cert(common_name="bob"))).status_code == 200

        files.write("server.pem", b"no certificate")
        process.send_signal(signal.SIGHUP)
        assert ask(url, files.client_context(files.ca.issue_cert(common_name="carol"))).status_code == 200
        process.terminate()
        assert process.wait(10) == 0


def test_a_new_authority_and_certificate_are_loaded(files: Files) -> None:
    """Both sides change: clients of the old CA are strangers from then on."""
    context = ReloadableContext(files.settings(crl=None))
    before = context.current
    other = Files(files.directory)
    context.reload()

    assert shake_hands(context, other.client_context(other.client)) is None
    assert "unable to get local issuer" in str(shake_hands(context, other.client_context(files.client)))
    assert shake_hands(before, files.client_context(files.client)) is None


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLError | None:
    """Return the server's error, if it has one."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(6):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return error
    return None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("server.key", None, "can't read .*server.key: No such file.*stemma certs dev"),
        ("server.pem", b"", "server.pem with .*server.key: no PEM, or key and certificate differ"),
        ("server.pem", trustme.CA().issue_cert(*HOSTS).cert_chain_pems[0].bytes(), "server.pem with .*"),
        ("password", b"wrong", "wrong passphrase"),
        ("password", b"\n", "no passphrase in its first line"),
        ("password", None, "can't read .*password"),
        ("ca.pem", b"nothing", "ca.pem is no CA certificate"),
        ("crl.pem", trustme.CA().cert_pem.bytes(), "crl.pem holds no revocation list"),
    ],
)
def test_a_file_at_fault_is_named(files: Files, name: str, content: bytes | None, message: str) -> None:
    if content is None:
        (files.directory / name).unlink()
    else:
        files.write(name, content)
    with pytest.raises(ConfigError, match=message):
        load_context(files.settings())


def test_an_encrypted_key_without_a_passphrase_does_not_ask_the_terminal(files: Files) -> None:
    with pytest.raises(ConfigError, match="is encrypted; name the file of its passphrase"):
        load_context(files.settings(key_password_file=None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"key": Path("k")}, "needs a certificate"),
        ({"cert": Path("c")}, "needs its key"),
        ({"cert": Path("c"), "key": Path("k"), "crl": (Path("r"),)}, "tls_crl needs tls_ca"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TLSSettings(**given)


@pytest.mark.parametrize(
    ("path", "plane"),
    [
        ("/generate", Plane.BUSINESS),
        ("/v1/models", Plane.BUSINESS),
        ("/v2/models/m/generate", Plane.BUSINESS),
        ("/v2/models/m/ready", Plane.MANAGEMENT),
        ("/v2/health/live", Plane.MANAGEMENT),
        ("/health/timed-3", Plane.MANAGEMENT),
        ("/admin/stats", Plane.MANAGEMENT),
        ("/stopService", Plane.MANAGEMENT),
        ("/metrics", Plane.METRICS),
        ("/health", None),
    ],
)
def test_planes_of_paths(path: str, plane: Plane | None) -> None:
    assert plane_of(path) is plane


def test_planes_have_ports_and_certificates_of_their_own(tokenizer_path: Path, files: Files) -> None:
    """Management over mutual TLS of another CA, metrics as the business plane (plain)."""
    port = free_port()
    tls = json.loads(files.settings(crl=None).model_dump_json())
    planes = {"management_port": port, "metrics_port": port + 1}
    settings = {"planes": planes, "management_tls": tls}
    with scripted_server(tokenizer_path, settings=settings) as (process, url):
        management, metrics = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        assert httpx.get(f"{url}/v1/models").status_code == 200
        wrong_port = httpx.get(f"{url}/admin/stats")
        assert wrong_port.status_code == 404
        assert "answers on the management port" in wrong_port.json()["error"]
        assert httpx.get(f"{metrics}/metrics").status_code == 200
        assert httpx.get(f"{metrics}/v1/models").status_code == 404
        with httpx.Client(verify=files.client_context(files.client)) as client:
            assert client.get(f"{management}/admin/stats").status_code == 200
            assert client.get(f"{management}/generate").status_code == 404
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{management}/admin/stats", verify=files.client_context(None))
        process.terminate()
        assert process.wait(10) == 0


def free_port() -> int:
    """Return the first of two neighbouring ports that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


def test_a_secret_that_others_can_read_is_warned_of(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = [files.directory / name for name in ("server.key", "password")]
    for path in secrets:
        path.chmod(0o600)
    key = tmp_path / "admin.key"
    key.write_text("s3cret")
    key.chmod(0o600)
    load_context(files.settings())
    Access(ServerSettings(admin_key_file=key))
    assert not caplog.records
    for path in (*secrets, key):
        path.chmod(0o644)
    load_context(files.settings())
    Access(ServerSettings(admin_key_file=key))
    warned = [
        str(record.args[0]) for record in caplog.records if isinstance(record.args, tuple) and record.args
    ]
    assert warned == [str(path) for path in (*secrets, key)]
    assert "s3cret" not in caplog.text
