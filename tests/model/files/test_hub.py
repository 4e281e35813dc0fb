"""Models by their name on the hub, against a hub on loopback, each in a process of its own as a user's is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub_server import Hub, hub_of

from stemma.config.settings import ModelSettings
from stemma.model.files.hub import HubName, hub_name
from stemma.model.files.tiny import write_tiny_model
from stemma.model.load.located import is_here

REPO = "some-org/tiny-1.5"
LOCATE = """
import sys
from pathlib import Path
from stemma.config.settings import ModelSettings
from stemma.errors import ModelError
from stemma.model.load.located import located_model
try:
    found = located_model(ModelSettings(path=Path(sys.argv[1]), revision=sys.argv[2] or None))
except ModelError as error:
    print("error:", error)
else:
    print(found.served_name, found.path)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_tiny_model(tmp_path / "repo", hidden_size=96, num_layers=2)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "modeling_own.py", "README.md"):
        (folder / name).write_bytes(b"not needed")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"not needed")
    with hub_of(REPO, folder) as running:
        yield running


def locate(hub: Hub, home: Path, name: str = REPO, revision: str = "", **environment: str) -> str:
    variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), **environment}
    run = subprocess.run(
        [sys.executable, "-c", LOCATE, name, revision],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_name_is_downloaded_once_and_only_what_loading_reads(hub: Hub, tmp_path: Path) -> None:
    served, _, path = locate(hub, tmp_path / "home").partition(" ")
    assert served == REPO
    names = {file.name for file in Path(path).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {
        "pytorch_model.bin",
        "consolidated.safetensors",
        "modeling_own.py",
        "README.md",
        "onnx",
    }
    hub.asked.clear()
    assert locate(hub, tmp_path / "home") == f"{REPO} {path}"
    assert hub.asked == []  # the cache is whole: nobody is asked


def test_what_the_cache_holds_is_served_offline(hub: Hub, tmp_path: Path) -> None:
    path = locate(hub, tmp_path / "home")
    assert locate(hub, tmp_path / "home", HF_HUB_OFFLINE="1") == path


def test_a_snapshot_without_its_weights_is_completed(hub: Hub, tmp_path: Path) -> None:
    path = Path(locate(hub, tmp_path / "home").partition(" ")[2])
    (path / "model.safetensors").unlink()
    assert locate(hub, tmp_path / "home") == f"{REPO} {path}"
    assert (path / "model.safetensors").is_file()


def test_a_revision(hub: Hub, tmp_path: Path) -> None:
    assert locate(hub, tmp_path / "home", revision="v2").startswith(REPO)
    assert "nobodys of some-org/tiny-1.5" in locate(hub, tmp_path / "home2", revision="nobodys")


def test_a_gguf_file(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "tiny-Q4_K_M.gguf").write_bytes(b"GGUF")
    found = locate(hub, tmp_path / "home", f"{REPO}:tiny-Q4_K_M.gguf")
    assert found.startswith(f"{REPO}:tiny-Q4_K_M.gguf ")
    assert found.endswith("/tiny-Q4_K_M.gguf")
    assert "has no tiny-Q8_0.gguf" in locate(hub, tmp_path / "home", f"{REPO}:tiny-Q8_0.gguf")


def test_all_parts_of_a_gguf_file(hub: Hub, tmp_path: Path) -> None:
    names = [f"big-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for name in names:
        (hub.folder / name).write_bytes(b"GGUF")
    path = Path(locate(hub, tmp_path / "home", f"{REPO}:{names[1]}").partition(" ")[2])
    assert path.name == names[1]
    assert all(path.with_name(name).is_file() for name in names)
    path.with_name(names[2]).unlink()
    assert locate(hub, tmp_path / "home", f"{REPO}:{names[1]}").endswith(str(path))
    assert path.with_name(names[2]).is_file()


def test_a_repository_of_gguf_files_says_how_to_name_one(hub: Hub, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "consolidated.safetensors"):
        (hub.folder / name).unlink()
    (hub.folder / "tiny-Q8_0.gguf").write_bytes(b"GGUF")
    assert f"as {REPO}:tiny-Q8_0.gguf" in locate(hub, tmp_path / "home")
    (hub.folder / "tiny-Q8_0.gguf").unlink()
    assert "as .bin or .pt files only" in locate(hub, tmp_path / "home")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("offline", "HF_HUB_OFFLINE is set"),
        ("unknown", "has no model other-org/other"),
        ("gated", "asks for consent"),
        ("huge", "free some, or set HF_HOME"),
        ("unreachable", "can't give it"),
    ],
)
def test_what_fails_is_one_line_that_says_what_to_do(
    hub: Hub, tmp_path: Path, fault: str, expected: str
) -> None:
    name, variables = REPO, {}
    if fault == "offline":
        variables = {"HF_HUB_OFFLINE": "1"}
    elif fault == "unknown":
        name = "other-org/other"
    elif fault == "gated":
        hub.is_gated = True
    elif fault == "huge":
        hub.sizes["model.safetensors"] = 2**60
    else:
        variables = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    said = locate(hub, tmp_path / "home", name, **variables)
    assert said.startswith("error:")
    assert expected in said
    assert "\n" not in said


def test_what_is_a_name_and_what_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name(Path("Qwen/Qwen2.5-0.5B")) == HubName("Qwen/Qwen2.5-0.5B")
    assert hub_name(Path("org/repo:sub/x.gguf"), "v1") == HubName("org/repo", "sub/x.gguf", "v1")
    for path in (
        "demo",
        "/Qwen/Qwen2.5",
        "../x/y",
        "~/models",
        "a/b/c",
        "org/repo.gguf",
        "org/repo:../../etc/x.gguf",
        "org/repo:/x.gguf",
        "org/repo:x.bin",
        "org/re po",
        "org/..x",
    ):
        assert hub_name(Path(path)) is None, path
    (tmp_path / "Qwen" / "here").mkdir(parents=True)
    assert hub_name(Path("Qwen/here")) is None
    assert is_here(ModelSettings(path=Path("Qwen/here")))
    assert not is_here(ModelSettings(path=Path("Qwen/there")))
    shutil.rmtree(tmp_path / "Qwen")
