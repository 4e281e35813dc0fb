"""The cluster file: what is accepted, what is refused, and settings that travel as a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from stemma.config.loading import load_settings, tables_of
from stemma.errors import ConfigError
from stemma_router.cluster_file import read_cluster_file

SETTINGS = """
settings:
  model: {path: models/tiny}
  cache: {block_size: 16, kv_cache_memory: 8MB}
"""


def read(tmp_path: Path, text: str, environ: dict[str, str] | None = None):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return read_cluster_file(file, environ)


def test_replicas_with_a_fixed_or_a_growing_number(tmp_path: Path) -> None:
    cluster = read(tmp_path, SETTINGS + "replicas: {count: 3}")
    assert (cluster.replicas.at_most, cluster.replicas.router) == (3, "cache-aware")
    assert cluster.settings.engine.cache.kv_cache_memory == 8_000_000
    text = SETTINGS + "replicas: {autoscaling: {max_replicas: 8, target_ongoing_requests: 4}}"
    assert read(tmp_path, text, {"STEMMA_BLOCK_SIZE": "32"}).settings.engine.cache.block_size == 32
    assert read(tmp_path, text).replicas.at_most == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "replicas or prefill_decode"),
        ("replicas: {}", "count or autoscaling"),
        ("replicas: {count: 2, autoscaling: {max_replicas: 3}}", "count or autoscaling"),
        ("replicas: {count: 2, routr: round-robin}", "routr"),
        ("replicas: {count: 2, router: best}", "router"),
        ("replicas: {autoscaling: {max_replicas: 2, min_replicas: 3}}", "min_replicas"),
        ("replicas: {autoscaling: {max_replicas: 2, target_ongoing: 3}}", "target_ongoing"),
        ("replicas: {count: 2, ray: {adress: auto}}", "adress"),
        ("prefill_decode: {num_prefill: 1, num_decode: 2, pools: [{name: a}, {name: b}]}", "every pool"),
        ("prefill_decode: {pools: [{name: a}]}\nreplicas: {count: 2}", "replicas or prefill_decode"),
        ("more: 1\nreplicas: {count: 2}", "more"),
        ("replicas: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, SETTINGS + text)


def test_unknown_settings_and_other_contents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        read(tmp_path, "settings: {model: {path: x}, cache: {blok_size: 3}}\nreplicas: {count: 1}")
    for text in ("- a", "1: 2", "settings: 5", "!!python/object/apply:os.system ['true']"):
        with pytest.raises(ConfigError):
            read(tmp_path, text)
    with pytest.raises(ConfigError, match="can't read"):
        read_cluster_file(tmp_path / "none.yaml")


def test_settings_are_the_same_after_a_file(tmp_path: Path) -> None:
    given = {
        "model": "x",
        "role": "prefill",
        "pool": "directory",
        "pool_config": tmp_path / "pool.json",
        "kv_cache_memory": "3MB",
        "speculation": "off",
        "lora": ["a=/tmp/a"],
        "admin_key": "s3cret",
        "metric_aliases": "vllm,mindie",
        "disk_cache": tmp_path / "disk",
        "management_port": 0,
    }
    settings = load_settings(flags=given)
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(tables_of(settings)))
    assert load_settings(file=file) == settings
