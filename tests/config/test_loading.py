from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stemma.config.loading import flag_of, load_settings, setting_fields
from stemma.config.settings import EngineSettings, ModelSettings, PoolSettings, Settings
from stemma.errors import ConfigError

TOML = """
[model]
path = "from/file"

[cache]
block_size = 16
kv_cache_memory = "2GB"

[server]
port = 9000
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "stemma.toml"
    path.write_text(TOML)
    return path


def test_defaults() -> None:
    expected = Settings(engine=EngineSettings(model=ModelSettings(path=Path("m"))))

    assert load_settings(flags={"model": "m"}) == expected


def test_a_flag_beats_a_variable_beats_the_file(file: Path) -> None:
    environ = {"STEMMA_BLOCK_SIZE": "32", "STEMMA_PORT": "9001", "HOME": "/"}
    settings = load_settings(file=file, environ=environ, flags={"port": 9002, "block_size": None})

    assert settings.engine.model.path == Path("from/file")
    assert settings.engine.cache.kv_cache_memory == 2 * 10**9
    assert settings.engine.cache.block_size == 32
    assert settings.server.port == 9002


def test_the_switch_of_the_kernels_is_no_setting() -> None:
    assert load_settings(environ={"STEMMA_NATIVE": "0", "STEMMA_MODEL": "m"}).engine.model.path == Path("m")


def test_variables_are_parsed() -> None:
    environ = {
        "STEMMA_MODEL": "m",
        "STEMMA_ENABLE_PREFIX_CACHE": "false",
        "STEMMA_AGEING_S": "2.5",
        "STEMMA_KV_CACHE_MEMORY": "1GiB",
        "STEMMA_MAX_MODEL_LEN": "",
    }
    settings = load_settings(environ=environ)

    assert not settings.engine.cache.enable_prefix_cache
    assert settings.engine.scheduler.ageing_s == 2.5
    assert settings.engine.cache.kv_cache_memory == 2**30
    assert settings.engine.model.max_model_len is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"flags": {"model": "m", "block_sise": 1}},
            "unknown setting 'block_sise'; the nearest known one is 'block_size'",
        ),
        (
            {"environ": {"STEMMA_BLOKC_SIZE": "1"}},
            "unknown setting 'STEMMA_BLOKC_SIZE'; the nearest known one is 'STEMMA_BLOCK_SIZE'",
        ),
        ({"flags": {"model": "m", "block_size": 0}}, "--block-size = 0: Input should be greater than"),
        ({"flags": {"model": "m", "kv_cache_memory": "4 apples"}}, "not a size: '4 apples'"),
        (
            {"environ": {"STEMMA_PORT": "x", "STEMMA_MODEL": "m"}},
            "STEMMA_PORT = 'x': Input should be a valid",
        ),
        ({}, "no model given"),
        ({"file": Path("no/such/file.toml")}, "can't read no/such/file.toml: No such file"),
    ],
)
def test_errors_name_the_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(**given)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[cache]\nblok_size = 1",
            "unknown setting 'cache.blok_size'; the nearest known one is 'cache.block_size'",
        ),
        (
            "[cash]\nblock_size = 1",
            "unknown setting 'cash.block_size'; the nearest known one is 'cache.block_size'",
        ),
        ("block_size = 1", "unknown setting 'block_size'"),
        ("cache = 1", "unknown setting 'cache'"),
        ("[cache", "is not valid TOML"),
        ("[cache]\nindex = 'b-tree'", "cache.index = 'b-tree': Input should be 'radix' or 'hash'"),
    ],
)
def test_errors_in_the_file_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file=path, flags={"model": "m"})

    assert message in str(caught.value)
    assert "bad.toml" in str(caught.value)


def test_a_component_that_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text("[cache.pool]\nname = 'directory'\nasync_write = false\n")
    from_file = load_settings(file=path, flags={"model": "m", "pool_config": Path("c.toml")})

    assert load_settings(flags={"model": "m"}).engine.cache.pool is None
    assert from_file.engine.cache.pool == PoolSettings(
        name="directory", config=Path("c.toml"), async_write=False
    )
    with pytest.raises(ConfigError, match=r"cache.pool.name: Field required"):
        load_settings(flags={"model": "m", "pool_config": Path("c.toml")})


def test_every_setting_has_a_flat_name_and_says_what_it_is() -> None:
    fields = setting_fields()

    assert fields["model"].path == ("engine", "model", "path")
    assert fields["block_size"].table == ("cache",)
    assert fields["pool"].path == ("engine", "cache", "pool", "name")
    assert fields["pool_config"].table == ("cache", "pool")
    assert flag_of("max_batch_tokens") == "--max-batch-tokens"
    assert "model" in fields
