"""Every command on a page is run, or says why not and is checked by what it names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from reference_pages import routes
from stemma.cli import load_command
from stemma.config.loading import load_settings, setting_fields
from stemma.model.files.tiny import write_tiny_model
from tests.docs.blocks import PAGES, Block, blocks

URL = "http://127.0.0.1:8000"
NOT_RUN = {
    "install.md": ["installs packages"],
    "first-minute.md": [
        "the test-suite runs it by itself (tests/e2e/test_cli.py)",
        "needs the agent, a package of npm's",
    ],
    "server.md": [
        "needs the file above and its model",
        "asks a second server, with HTTPS",
        "needs files (packages/router/tests/e2e/test_models.py runs it); settings are checked",
    ],
    "requests.md": [
        "needs a vision model; the body is checked",
        "needs a model of embeddings, and one that reranks; bodies are checked",
    ],
    "agents.md": [
        *3 * ["needs the agent, a package of npm's (`make agents` runs it)"],
        "needs the agents, packages of npm's and PyPI's (`make agents` runs them)",
    ],
    "tiers.md": ["needs a pool's master, mooncake_master"],
    "tenants.md": ["reads the ledger of the server above"],
    "adapters.md": [
        "needs a model's adapters; settings and the body are checked",
        "needs an adapter; bodies are checked",
    ],
    "observability.md": [
        "needs aiperf and Weka's traces",
        "needs a collector of OpenTelemetry's; settings are checked",
    ],
    "gpu.md": ["needs a GPU; settings are checked"],
    "fleet.md": [
        "needs Envoy (packages/router/tests/routing/test_envoy.py runs it)",
        "needs Ray (packages/router/tests/replicas runs it); settings are checked",
        "needs pools (packages/router/tests/e2e/test_cluster_up.py runs it)",
    ],
    "connectors.md": ["needs vLLM (packages/connect/tests/vllm runs it)", "needs SGLang"],
    "from-llama-cpp.md": ["needs a file; settings are checked"],
    "from-mindie.md": ["installs a package, and needs a configuration"],
}
"""What no test runs here, by page; a block that is added here needs its reason."""
SERVER_FLAGS = (
    *("--served-name", "demo", "--port", "0", "--block-size", "16", "--kv-cache-memory", "8MB"),
    *("--host-cache", "4MB", "--disk-cache", "disk", "--batch-directory", "batches", "--trust-imports"),
)
PRELUDE = """set -euo pipefail
curl() { command curl -sS --fail-with-body --max-time 60 "$@"; echo; }
"""


def test_every_block_says_how_it_is_checked() -> None:
    untold = [
        one for one in blocks() if one.how not in ("run", "serve") and not one.how.startswith("not run: ")
    ]
    assert [(one.page.name, one.text) for one in untold] == []


def test_what_is_not_run_is_known() -> None:
    told: dict[str, list[str]] = {}
    for one in blocks():
        if one.how.startswith("not run: "):
            told.setdefault(one.page.name, []).append(one.how.removeprefix("not run: "))
    assert told == NOT_RUN
    assert len([one for one in blocks() if one.how == "run"]) >= 15


@pytest.mark.parametrize("block", [pytest.param(one, id=one.page.stem) for one in blocks()])
def test_commands_exist_with_values_that_they_take(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"(?<![\w./-])[\w-]+(?:/[\w-]+)*\.(?:yaml|json|toml|txt|kv|db|csv)\b", block.text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for program, *words in block.commands():
        if program == "stemma":
            check_command(*words)
        elif program == "curl":
            check_request(words)


def check_command(name: str, *words: str) -> None:
    """Parse the words as the command does; of servers, read the settings."""
    command = load_command(name)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    given = command.make_context(name, [*words], ignore_unknown_options=name == "launch").params
    if name == "serve" and given["config"] is None:
        flags = {flag: value for flag, value in given.items() if flag in setting_fields() and value != []}
        load_settings(environ={}, flags={flag: value for flag, value in flags.items() if value is not None})


def check_request(words: list[str]) -> None:
    """Hold a request's method, path and body against the OpenAPI document."""
    options = dict(pairwise(words))
    [url] = [word for word in words if re.match(r"https?://", word)]
    path = re.sub(r"https?://[^/]*", "", url)
    sends = {"-d", "-F"} & options.keys()
    method = options.get("-X", "POST" if sends else "GET")
    [route] = [one for one in routes.routes() if one.path == path and method in (one.methods or ())]
    if "-d" not in options:
        return
    document = routes.document()
    schemas = [document["components"]["schemas"][name] for name in routes.body_names(route)]
    assert schemas, path
    body: Any = json.loads(options["-d"])
    jsonschema.validate(body, {"anyOf": schemas, "components": document["components"]})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the tiny model, in a process of its own, as the pages say to start one."""
    folder = tmp_path_factory.mktemp("server")
    write_tiny_model(folder / "model")
    command = (sys.executable, "-m", "stemma", "serve", "model", *SERVER_FLAGS)
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("Ready:"))
    finally:
        process.terminate()
        process.communicate(timeout=60)


SLOW = ("tiers", "install", "fleet", "observability")
"""Left to `make test-all`: each starts a dozen commands."""


@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("curl")), reason="needs bash and curl")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW))
        for page in PAGES
        if "<!-- run -->" in page.read_text()
    ],
)
def test_commands_run(page: Path, url: str, tmp_path: Path) -> None:
    """Those of a page, one after the other, in an empty folder."""
    script = "".join(one.text for one in blocks() if one.page == page and one.how == "run")
    script = re.sub(r"^stemma (explain|top) ", rf"stemma \1 --url {URL} ", script, flags=re.M)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", PRELUDE + script.replace(URL, url.rstrip("/"))],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
