"""The Dockerfile's stages and the compose example fit each other and the code. Nothing is built."""

from __future__ import annotations

import http.server
import re
import shutil
import subprocess
import sys
import threading
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml

from stemma.cli import load_command
from stemma.config.loading import load_settings, setting_fields

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "examples" / "compose"
MONITORING = ROOT / "examples" / "monitoring"
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
STAGES = {
    found[2]: (found[1], found[3])
    for found in re.finditer(r"^FROM (\S+) AS (\w+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
}
"""By name: what a stage begins with, and its lines."""
IMAGES = ("cpu", "gpu")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


FILE = loaded(COMPOSE / "compose.yaml")
SERVICES = FILE["services"]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_nobody_without_the_build(image: str) -> None:
    parent, lines = STAGES[image]
    assert parent == "base"
    assert re.findall(r"^USER (.*)", lines, re.MULTILINE)[-1] == "10001:10001"
    assert "g++" not in STAGES["base"][1] + lines
    assert "HEALTHCHECK" in STAGES["base"][1]


def test_what_images_begin_with_is_pinned_and_nothing_secret_is_in_them() -> None:
    assert list(STAGES)[-1] == "cpu"  # what is built if no stage is named
    assert {parent for parent, _ in STAGES.values()} == {"python:${PYTHON}", "base"}
    assert re.search(r"^ARG PYTHON=3\.\d+\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert not re.search(
        r"^(?:ARG|ENV).*(?:KEY|TOKEN|SECRET|PASSWORD)", DOCKERFILE, re.MULTILINE | re.IGNORECASE
    )


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_the_healthcheck_says_what_the_server_says(status: int | None, code: int) -> None:
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            self.send_response(HTTPStatus(status or 500))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    command = yaml.safe_load(re.findall(r"^    CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        port = server.server_address[1] if status else 1
        environ = {"HEALTH_URL": f"http://127.0.0.1:{port}/health", "http_proxy": "http://127.0.0.1:1"}
        done = subprocess.run(
            [sys.executable, *command[1:]], env=environ, capture_output=True, timeout=30, check=False
        )
        server.shutdown()
    assert done.returncode == code


def test_compose_names_only_what_is_there() -> None:
    for file in ("compose.yaml", "gpu.yaml"):
        build = loaded(COMPOSE / file)["services"]["stemma"]["build"]
        assert (COMPOSE / build["context"]).resolve() == ROOT
        assert build["target"] in STAGES
    used = [volume.split(":") for one in SERVICES.values() for volume in one["volumes"]]
    assert {source for source, *_ in used if "/" not in source} == set(FILE["volumes"])
    assert [source for source, *_ in used if "/" in source and not (COMPOSE / source).is_file()] == []
    assert {way for source, _, *way in used if "/" in source for way in way} == {"ro"}


def test_compose_pins_confines_and_publishes_to_this_machine_alone() -> None:
    for one in SERVICES.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", one["image"])
        assert one["read_only"]
        assert one["cap_drop"] == ["ALL"]
        assert [port for port in one["ports"] if not port.startswith("127.0.0.1:")] == []


def test_the_composed_server_has_flags_that_there_are() -> None:
    server = SERVICES["stemma"]
    arguments = [part.replace("${MODEL:-demo}", "demo") for part in server["command"]]
    params = load_command(arguments[0]).make_context(arguments[0], arguments[1:]).params
    flags = {name: params[name] for name in setting_fields() if params.get(name) is not None}
    settings = load_settings(file=None, environ={}, flags=flags)
    assert server["ports"] == [f"127.0.0.1:8000:{settings.server.port}"]
    assert float(server["stop_grace_period"].removesuffix("s")) > settings.server.drain_timeout_s + 10
    [(_, home)] = [volume.split(":") for volume in server["volumes"]]
    assert settings.engine.tiers.disk_cache is not None
    assert settings.engine.tiers.disk_cache.is_relative_to(home)
    assert f"install -d -o 10001 -g 10001 {home}" in STAGES["base"][1]  # a volume has its image's owner


def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus(tmp_path: Path) -> None:
    scraped, beside = loaded(COMPOSE / "prometheus.yml"), loaded(MONITORING / "prometheus.yml")
    assert scraped["scrape_configs"][0]["static_configs"] == [{"targets": ["stemma:8000"]}]
    beside["scrape_configs"][0]["static_configs"] = scraped["scrape_configs"][0]["static_configs"]
    assert scraped == beside
    [source] = loaded(COMPOSE / "grafana" / "source.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"]
    [provider] = loaded(COMPOSE / "grafana" / "dashboards.yaml")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    boards = [mounts[f"../monitoring/grafana-{name}.json"] for name in ("dashboard", "fleet")]
    assert {Path(board).parent for board in boards} == {Path(provider["options"]["path"])}
    if promtool := shutil.which("promtool"):
        for file in (COMPOSE / "prometheus.yml", MONITORING / "alerts.yml"):
            shutil.copy(file, tmp_path)
        subprocess.run([promtool, "check", "config", tmp_path / "prometheus.yml"], check=True, timeout=60)
