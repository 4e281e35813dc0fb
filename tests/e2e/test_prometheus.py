"""A real Prometheus scrapes a real server: every panel of the dashboard has data, and the rules hold."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from reference_pages import metrics
from stemma.cli.ready_line import READY
from stemma.server.door.keyfile import add_key
from tests.e2e.conftest import start_server

MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
BOARDS: dict[str, dict[str, Any]] = {
    name: json.loads((MONITORING / f"grafana-{name}.json").read_text()) for name in ("dashboard", "fleet")
}
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool (Debian: apt-get install prometheus)",
)
START_S, PATIENCE_S = 30.0, 15.0
KEY = "the-operator"
ROUTE = (sys.executable, "-m", "stemma", "route", "--port", "0", "--admin-key", KEY, "--server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def expressions() -> list[tuple[str, str]]:
    """The queries of all panels with the dashboards' variables filled in."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "10s").replace("$job", ".*"))
        for board in BOARDS.values()
        for panel in board["panels"]
        for target in panel["targets"]
    ]


@pytest.fixture(scope="module")
def prometheus(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with every tier but the pool, a router, traffic through both, a Prometheus that sees both."""
    folder = tmp_path_factory.mktemp("prometheus")
    events = f"tcp://127.0.0.1:{free_port()}"
    ada = add_key(folder / "keys.toml", "ada")
    served, stop = start_server(
        tiny_model,
        kv_cache_memory="1MB",
        host_cache="256KB",  # with the device's it must not hold all readers
        disk_cache=folder / "disk",
        disk_cache_size="64MB",
        api_keys_file=folder / "keys.toml",
        admin_key=KEY,
        kv_events=events,
    )
    proxy = subprocess.Popen([*ROUTE, f"{served.url},events={events}"], stdout=subprocess.PIPE, text=True)
    proxy_url = next(line for line in proxy.stdout or () if READY in line).split(READY)[1].split()[0]
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    scrape = config["scrape_configs"][0]
    scrape["static_configs"] = [{"targets": [served.url.removeprefix("http://")]}]
    scrape["authorization"] = {"credentials": KEY}
    targets = [{"targets": [proxy_url.removeprefix("http://")]}]
    config["scrape_configs"].append({**scrape, "job_name": "stemma-router", "static_configs": targets})
    shutil.copy(MONITORING / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("wb"),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        # The first scrape comes some seconds after the start; rates need samples from before the traffic.
        wait_until(lambda: values(url, "up") == [1.0, 1.0], (folder / "log").read_text)
        send_traffic(served.url, ada)
        send_traffic(proxy_url, ada, is_streamed=True)
        yield url
    finally:
        for one in (process, proxy):
            one.terminate()
            one.wait(20)
        stop()


def wait_until(is_so, explain) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError(explain())


def send_traffic(url: str, key: str, *, is_streamed: bool = False) -> None:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        for turn in range(8):
            for reader in range(12):
                prompt = f"Reader {reader} of the quiet library. " * 12 + f"Question {turn}?"
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": is_streamed}
                assert client.post("/v1/completions", json=body).status_code == 200
            refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": -1})
            assert refused.status_code == 400
            time.sleep(0.25)


def values(url: str, expression: str) -> list[float]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=10).json()
    assert answer["status"] == "success", (expression, answer)
    return [float(one["value"][1]) for one in answer["data"]["result"]]


@pytest.mark.slow
@needs_prometheus
def test_every_panel_has_data(prometheus: str) -> None:
    missing = dict.fromkeys(expressions())
    deadline = time.monotonic() + PATIENCE_S
    while missing and time.monotonic() < deadline:
        for title, expression in list(missing):
            if any(value == value for value in values(prometheus, expression)):  # NaN: nothing yet
                del missing[title, expression]
        time.sleep(0.2)
    targets = httpx.get(f"{prometheus}/api/v1/targets").json()["data"]["activeTargets"]
    assert not missing, ([one["lastError"] for one in targets], missing)
    (up,) = values(prometheus, 'up{job="stemma"}')
    assert up == 1.0
    assert values(prometheus, 'sum(rate(stemma_cached_tokens_total{tier="disk"}[1m]))')[0] > 0.0
    assert values(prometheus, 'sum(vllm:prefix_cache_hits_total{model_name="tiny"})')[0] > 0.0


@pytest.mark.slow
@needs_prometheus
def test_the_rules_are_loaded_and_their_own_tests_pass(prometheus: str) -> None:
    groups = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert all(rule["health"] in ("ok", "unknown") for rule in rules.values())
    assert rules["StemmaDown"]["state"] == "inactive"
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            ["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


PANELS = {"stat", "timeseries"}
"""Types of panels used here: core ones of Grafana."""
UNITS = {"percentunit", "percent", "s", "ms", "bytes", "decbytes", "Bps", "short", "none", "reqps", "ops"}
"""Ids of Grafana's units."""


@pytest.mark.parametrize("name", BOARDS)
def test_the_dashboards_keep_grafanas_rules(name: str) -> None:
    """What Grafana's published JSON model asks for. The files have never been loaded in a Grafana."""
    board = BOARDS[name]
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["job"]["datasource"] == source
    assert isinstance(board["schemaVersion"], int)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", board["uid"])
    assert board.get("id") is None  # an import must not name a row of somebody else's database
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in PANELS, panel["title"]
        assert panel["datasource"] == source
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert cells, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        unit = panel["fieldConfig"]["defaults"].get("unit", "none")
        assert unit in UNITS, unit
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target.get("datasource", source) == source
            used = set(re.findall(r"\$\{?(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables.keys(), target["expr"]


def test_dashboard_and_rules_name_only_metrics_that_exist() -> None:
    """Without Prometheus too: all are on the page of metrics, which is made from what servers tell."""
    documented = metrics.page()
    texts = [expression for _, expression in expressions()]
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    texts += [rule["expr"] for rule in rules]
    for text in texts:
        for name in re.findall(r"stemma_\w+", text):
            plain = re.sub(r"_(bucket|sum|count|total)$", "", name)
            assert f"`{plain}" in documented, name
