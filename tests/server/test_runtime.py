from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from stemma.errors import ConfigError
from stemma.server.transport.planes import listen, url_of
from tests.server.scripted_process import scripted_server


def test_first_signal_drains_and_second_cuts_off(tokenizer_path: Path) -> None:
    """A stream goes on to its end while new requests get 503; the process then exits with 0."""
    with scripted_server(tokenizer_path, delay_s=0.05, drain_s=30) as (process, url):
        body = {"model": "scripted", "prompt": "ab", "max_tokens": 40, "stream": True}
        with httpx.Client() as client, client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            while httpx.get(f"{url}/health").status_code == 200:
                pass
            refused = httpx.post(f"{url}/generate", json={"inputs": "x"})
            rest = [line for line in lines if line]
        assert (refused.status_code, refused.json()["error_type"]) == (503, "Service Unavailable")
        assert '"finish_reason":"length"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(10) == 0


@pytest.mark.parametrize("num_signals", [1, 2])
def test_what_does_not_finish_is_cut_off(tokenizer_path: Path, num_signals: int) -> None:
    """After the drain's time limit, or at a second signal, the process exits with 1."""
    drain_s = 0.3 if num_signals == 1 else 600
    with scripted_server(tokenizer_path, delay_s=0.1, drain_s=drain_s) as (process, url):
        body = {"model": "scripted", "prompt": "ab", "max_tokens": 4000, "stream": True}
        with httpx.Client() as client, client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            if num_signals == 2:
                while httpx.get(f"{url}/health").status_code == 200:
                    pass
                process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 1


def test_listen() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        thread = threading.Thread(target=lambda: socket.create_connection(("127.0.0.1", port)).close())
        thread.start()
        listener.accept()[0].close()
        thread.join()
        with pytest.raises(ConfigError, match="can't listen on"):
            listen("127.0.0.1", port)
