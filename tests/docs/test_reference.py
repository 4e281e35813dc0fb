"""What the code has stands on the site's generated pages: settings, commands, routes, bodies, metrics."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from reference_pages import commands, metrics, python_api, routes, settings
from reference_pages.copied import COPIED, copy_of
from stemma.cli import COMMANDS, GUESTS, guest_commands, load_command
from stemma.config.loading import setting_fields
from stemma.config.settings import Settings
from stemma.server.app import create_app
from tests.server.conftest import engine, tokenizer, tokenizer_path  # noqa: F401
from tests.server.conftest import settings as settings_of_a_server  # noqa: F401
from tests.server.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
METRIC = re.compile(r'"(stemma_[a-z_]+[a-z])"')


@pytest.fixture(scope="module")
def metrics_page() -> str:
    return metrics.page()


def test_every_setting_has_its_flag_variable_type_and_default() -> None:
    page = settings.page()
    for name in setting_fields():
        flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        assert f"\n### `{name}`\n\n`{flag}`" in page
        assert f"`STEMMA_{name.upper()}`" in page
    assert "`--block-size` · `STEMMA_BLOCK_SIZE` · integer, from 1, up to 1,024 · default `64`" in page
    assert "`STEMMA_DISK_CACHE_SIZE` · size · default `10.0 GB`" in page
    assert "`--free-windows`, `--no-free-windows` · `STEMMA_FREE_WINDOWS` · on or off · default on" in page


def test_every_command_has_its_options_and_guests_their_package() -> None:
    page = commands.page()
    for name in (*COMMANDS, *guest_commands()):
        for path, command in commands.commands_below(name, load_command(name)):
            assert f"# `stemma {path}`\n" in page
            for one in command.params:
                if one.name not in (*setting_fields(), "help") and one.opts[0][:1] == "-" and not one.hidden:
                    assert f"`{one.opts[0]}`" in page
    for package in GUESTS:
        assert f"Comes with the package `{package}`." in page


def test_every_route_has_its_audience_and_every_body_its_fields() -> None:
    page, schemas = routes.page(), routes.document()["components"]["schemas"]
    assert len(routes.routes()) > 90
    for one in routes.routes():
        assert f"| `{' '.join(sorted(one.methods or ()))} {one.path}` | {one.audience.value} |" in page
        for name in routes.body_names(one):
            assert f"\n### {name}\n" in page
            assert all(f"| `{field}` |" in page for field in schemas[name].get("properties", {}))


def test_every_metric_that_the_source_names_is_there(metrics_page: str) -> None:
    """Of servers and routers: names of the files that make families."""
    folders = (ROOT / "src" / "stemma" / "server", ROOT / "packages" / "router" / "src")
    texts = [file.read_text() for folder in folders for file in folder.rglob("*.py")]
    named = {name for text in texts if "prometheus_client" in text for name in METRIC.findall(text)}
    assert len(named) > 60
    assert {name for name in named if f"| `{name}` |" not in metrics_page} == set()


async def test_every_name_that_a_server_tells_is_there(
    metrics_page: str,
    engine: ScriptedEngine,  # noqa: F811
    settings_of_a_server: Settings,  # noqa: F811
) -> None:
    server = settings_of_a_server.server.model_copy(update={"metric_aliases": ("vllm", "mindie")})
    app = create_app(engine, settings_of_a_server.model_copy(update={"server": server}))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/generate", json={"inputs": "ab"})).status_code == 200
        text = (await client.get("/metrics")).text
    told = {line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE")}
    assert len(told) > 60
    assert {
        one for one in told if f"| `{one}` |" not in metrics_page and not one.endswith("_created")
    } == set()


def test_pages_name_only_metrics_that_exist(metrics_page: str) -> None:
    """In what was written by hand; a name may stand for all that begin like it."""
    files = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name in ("how-to", "start")]
    for file in files:
        for name in re.findall(r"`(stemma_(?!connect)[a-z_]+)`", file.read_text()):
            plain = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert f"`{plain}" in metrics_page, (file.name, name)


def test_python_s_page_has_the_public_names() -> None:
    assert "\n::: stemma.engine.llm.LLM\n" in python_api.page()
    assert "SamplingParams\n" in python_api.page()


def test_copied_pages_link_within_the_site() -> None:
    for place, source in COPIED.items():
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", copy_of(source)):
            target = (ROOT / "docs" / place).parent / link
            assert target.exists() or f"reference/{link}" in COPIED, (source, link)
