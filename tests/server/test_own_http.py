"""Our own HTTP calls never go through a proxy that the environment names."""

from __future__ import annotations

import ast
import socket
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stemma
from stemma.cli import make_app
from stemma.cli.admin_client import ask
from stemma.cli.client import make_http
from stemma.http import async_http_client, http_client

SOURCES = Path(stemma.__file__).parent
MAKERS = {"Client", "AsyncClient", "get", "post", "put", "delete", "request", "stream", "head", "patch"}


def test_no_other_place_makes_a_client() -> None:
    found = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "httpx" and node.func.attr in MAKERS:
                    found.append(f"{path.relative_to(SOURCES)}: {node.func.attr}")
    assert found == ["http.py: Client", "http.py: AsyncClient"]


@pytest.fixture
def environment_proxy(monkeypatch: pytest.MonkeyPatch):
    """Return the connections that a proxy got which the environment names, for all and for one host."""
    got: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            got.append(connection.recv(4096))
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield got
    is_over.set()
    thread.join()
    listener.close()


def test_keys_and_prompts_do_not_go_to_a_proxy(
    environment_proxy: list[bytes], live_url: str, tmp_path: Path
) -> None:
    found = ask(live_url, "GET", "/admin/cache/tiers", "root")
    assert found
    assert ask(live_url, "GET", "/admin/stats", "root")
    with http_client() as client:
        assert client.get(f"{live_url}/health").status_code == 200
    bundle = tmp_path / "x.stemma"
    bundle.write_bytes(b"no bundle")
    for arguments in (
        [
            "cache",
            "export",
            str(tmp_path / "y"),
            "--server",
            live_url,
            "--prompt",
            "x",
            "--admin-key",
            "root",
        ],
        ["cache", "import", str(bundle), "--server", live_url, "--admin-key", "root"],
    ):
        CliRunner().invoke(make_app(), arguments)
    assert environment_proxy == []


async def test_nor_do_those_of_the_chat(environment_proxy: list[bytes], live_url: str) -> None:
    for client in (make_http(live_url), async_http_client()):
        async with client:
            assert (await client.get(f"{live_url}/health")).status_code == 200
    assert environment_proxy == []
