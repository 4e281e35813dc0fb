"""A Hugging Face hub on loopback that serves one repository from a directory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import orjson

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v2", COMMIT)


class Hub:
    """The repository that it has, and what it was asked for."""

    def __init__(self, repo: str, folder: Path) -> None:
        self.repo = repo
        self.folder = folder
        self.asked: list[str] = []
        self.sizes: dict[str, int] = {}
        """Sizes told instead of the real ones."""
        self.is_gated = False
        self.url = ""

    def files(self) -> list[str]:
        return sorted(str(f.relative_to(self.folder)) for f in self.folder.rglob("*") if f.is_file())


@contextmanager
def hub_of(repo: str, folder: Path) -> Iterator[Hub]:
    """Yield a running hub that has `repo` with the files of `folder`."""
    hub = Hub(repo, folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, with_body: bool) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.asked.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            if hub.is_gated and "resolve" in parts:
                self._send(403, {"X-Error-Code": "GatedRepo"}, b"", with_body)
            elif parts[:2] == ["api", "models"] and "/".join(parts[2:4]) == hub.repo:
                self._info(parts, with_body)
            elif "/".join(parts[:2]) == hub.repo and parts[2:3] == ["resolve"]:
                self._file(parts[3], "/".join(parts[4:]), with_body)
            else:
                self._send(404, {"X-Error-Code": "RepoNotFound"}, b"", with_body)

        def _info(self, parts: list[str], with_body: bool) -> None:
            if parts[4:5] == ["revision"] and parts[5] not in REVISIONS:
                self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"", with_body)
                return
            if parts[4:5] == ["tree"]:
                rows = [
                    {"type": "file", "path": f, "size": (hub.folder / f).stat().st_size, "oid": "0" * 40}
                    for f in hub.files()
                ]
                self._send(200, {"Content-Type": "application/json"}, orjson.dumps(rows), with_body)
                return
            body = {
                "id": hub.repo,
                "modelId": hub.repo,
                "sha": COMMIT,
                "siblings": [{"rfilename": f} for f in hub.files()],
            }
            self._send(200, {"Content-Type": "application/json"}, orjson.dumps(body), with_body)

        def _file(self, revision: str, name: str, with_body: bool) -> None:
            file = hub.folder / name
            if revision not in REVISIONS or not file.is_file():
                code = "EntryNotFound" if revision in REVISIONS else "RevisionNotFound"
                self._send(404, {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, b"", with_body)
                return
            body = file.read_bytes()
            etag = hashlib.sha256(body).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if name in hub.sizes:
                headers["X-Linked-Size"] = str(hub.sizes[name])
            self._send(200, headers, body, with_body)

        def _send(self, status: int, headers: dict[str, str], body: bytes, with_body: bool) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
