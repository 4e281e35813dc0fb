"""MindIE's config.json: the manuals' own examples, defaults, ranges, and what each key becomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reference_pages import mindie_keys
from stemma.config.loading import load_settings, setting_fields
from stemma.config.readers import NO_EFFECT, WORKS
from stemma.config.settings import Settings
from stemma.errors import ConfigError
from stemma_mindie.config.document import read_mindie_config
from stemma_mindie.config.explain import key_rows
from stemma_mindie.config.translate import translate_mindie
from stemma_router.cluster_file import read_cluster_file

PRINTED = Path(__file__).parents[3] / "tests" / "data" / "mindie"
CACHE_ON = '{"plugin_type":"prefix_cache"}'

Load = Callable[..., Settings]


def config(
    model: dict[str, Any] | None = None, deploy: dict[str, Any] | None = None, **sections: Any
) -> dict[str, Any]:
    """Return a small configuration: HTTPS off, one model."""
    one = {"modelWeightPath": "/weights", "plugin_params": CACHE_ON, **(model or {})}
    backend = {"ModelDeployConfig": {**(deploy or {}), "ModelConfig": [one]}, **sections.pop("backend", {})}
    server = {"httpsEnabled": False, **sections.pop("server", {})}
    return {"ServerConfig": server, "BackendConfig": backend, **sections}


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def load(tmp_path: Path, notes: list[str]) -> Load:
    def write_and_load(content: dict[str, Any] | str, **given: Any) -> Settings:
        file = tmp_path / "config.json"
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        file.write_text(text, encoding="utf-8")
        return load_settings(file=file, note=notes.append, **given)

    return write_and_load


def test_the_prefix_cache_manuals_example(load: Load, notes: list[str], tmp_path: Path) -> None:
    printed = (PRINTED / "prefix_cache_as_printed.txt").read_text(encoding="utf-8").rstrip().rstrip(",")
    settings = load("{" + printed + "}")

    assert settings.engine.model.path == Path("/data/weights/DeepSeek-R1_w8a8")
    assert settings.engine.model.served_name == "DeepSeek-R1_w8a8"
    assert settings.engine.model.max_model_len == 2560
    assert settings.engine.cache.enable_prefix_cache
    assert settings.engine.cache.block_size == 128
    assert settings.engine.tiers.host_cache == 5 * 2**30
    assert settings.engine.speculation.mode == "off"
    assert (settings.requests.max_input_tokens, settings.requests.truncation) == (2048, "error")
    assert settings.requests.max_output_tokens == 512
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 1025)
    assert settings.planes.management_host == "127.0.0.2"
    assert settings.server.request_timeout_s == 600
    assert settings.server.max_connections == 3000
    assert settings.engine.scheduler.max_waiting == 2800
    assert (settings.planes.management_port, settings.planes.metrics_port) == (1026, 1027)
    assert settings.tls.cert == tmp_path / "security/certs/server.pem"
    assert settings.tls.ca == (tmp_path / "security/ca/ca.pem",)
    assert settings.tls.crl is None, "the default file isn't there"
    [line] = notes
    assert line == "config.json: accepted without effect: backendType"
    assert settings.engine.cache.kv_layout == "nz"


def test_the_pool_manuals_example_with_its_faults_corrected(load: Load, notes: list[str]) -> None:
    printed = (PRINTED / "pool_as_printed.txt").read_text(encoding="utf-8").rstrip().rstrip(",")
    corrected = "{" + printed.replace('"backend""', '"backend":"') + "}}"
    with pytest.raises(ConfigError, match=r"line \d+, column \d+: multiNodesInferEnabled: .*stemma route"):
        load(corrected)
    one_machine = corrected.replace('"multiNodesInferEnabled" : true', '"multiNodesInferEnabled" : false')
    settings = load(one_machine.replace('"dp": 2', '"dp": 1').replace('"moe_ep": 4', '"moe_ep": 2'))
    parallel = settings.engine.parallel
    assert (parallel.tensor_parallel_size, parallel.expert_parallel_size) == (8, 2)

    pool = settings.engine.cache.pool
    assert pool is not None
    assert (pool.name, pool.config) == ("kv_pool_backend_name", Path("/path/to/your/config/file"))
    assert not pool.async_write, "absent asyncWrite means synchronous"
    assert settings.engine.tiers.host_cache is None, "cpuMemSize 0"
    assert settings.engine.model.max_model_len == 20000
    [line] = notes
    for key in ("npuDeviceIds", "interNodeTLSEnabled", "enable_mlapo_prefetch"):
        assert f" {key}" in line


def test_a_flag_beats_a_variable_beats_the_file(load: Load) -> None:
    environ = {"STEMMA_BLOCK_SIZE": "32", "MIES_CONTAINER_IP": "127.0.0.9"}
    settings = load(config(), environ=environ, flags={"max_num_seqs": 7})

    assert settings.engine.cache.block_size == 32
    assert settings.server.host == "127.0.0.9"
    assert settings.engine.scheduler.max_num_seqs == 7


@pytest.mark.parametrize(
    ("given", "expected"), [(False, "error"), (0, "error"), (True, "right"), (-1, "right"), (1, "left")]
)
def test_truncation_is_a_bool_or_a_number(load: Load, given: bool | int, expected: str) -> None:
    assert load(config(deploy={"truncation": given})).requests.truncation == expected


def test_without_plugin_params_plugins_are_off(load: Load) -> None:
    content = config()
    del content["BackendConfig"]["ModelDeployConfig"]["ModelConfig"][0]["plugin_params"]
    settings = load(content)

    assert not settings.engine.cache.enable_prefix_cache
    assert settings.engine.speculation.mode == "off"
    assert settings.engine.tiers.host_cache is None


def test_splitfuse_takes_its_own_number_of_tokens_a_step(load: Load) -> None:
    backend = {"ScheduleConfig": {"splitChunkTokens": 256, "maxPrefillTokens": 4096}}
    assert load(config(backend=backend)).engine.scheduler.max_batch_tokens == 4096
    model = {"plugin_params": '{"plugin_type": "splitfuse,prefix_cache"}'}
    assert load(config(model, backend=backend)).engine.scheduler.max_batch_tokens == 256


@pytest.fixture
def nz_config(tmp_path: Path) -> Callable[[str, str, bool], dict[str, Any]]:
    """A file for a checkpoint of this type, with `enable_nz` for one family."""

    def make(kind: str, family: str, enabled: bool) -> dict[str, Any]:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
        model = {
            "modelWeightPath": str(tmp_path / "model"),
            "plugin_params": '{"plugin_type":"prefix_cache"}',
            "models": {family: {"kv_cache_options": {"enable_nz": enabled}}},
        }
        return config(model)

    return make


@pytest.mark.parametrize(
    ("kind", "enabled", "layout", "says"),
    [
        ("deepseek_v3", True, "nz", None),
        ("deepseek_v3", False, "rows", "MindIE wants it true for DeepSeek"),
        ("qwen2", False, "rows", None),
        ("qwen2", True, "rows", "enable_nz of models.deepseekv2 is not for qwen2: without effect"),
    ],
)
def test_enable_nz_is_for_deepseek(
    load: Load,
    notes: list[str],
    nz_config: Callable[[str, str, bool], dict[str, Any]],
    kind: str,
    enabled: bool,
    layout: str,
    says: str | None,
) -> None:
    settings = load(nz_config(kind, "deepseekv2", enabled))
    assert settings.engine.cache.kv_layout == layout
    found = [line for line in notes if "enable_nz" in line]
    if says is None:
        assert not found
    else:
        assert len(found) == 1
        assert says in found[0]


def test_enable_nz_of_another_family_is_refused(
    load: Load, nz_config: Callable[[str, str, bool], dict[str, Any]]
) -> None:
    with pytest.raises(
        ConfigError, match=r"line \d+, column \d+: enable_nz is for DeepSeek alone, not for qwen2"
    ):
        load(nz_config("qwen2", "qwen2", True))


@pytest.mark.parametrize("name", ["kv_cache_option", "kv_cache_options"])
def test_both_names_of_the_kv_cache_options(load: Load, name: str) -> None:
    settings = load(config({"models": {"deepseekv2": {name: {"enable_nz": True}}}}))
    assert settings.engine.cache.kv_layout == "nz"


def test_an_empty_backend_turns_the_pool_off(load: Load) -> None:
    off = config(backend={"kvPoolConfig": {"backend": "", "configPath": ""}})
    as_text = config(backend={"kvPoolConfig": '{"backend": "directory", "asyncWrite": true}'})

    assert load(off).engine.cache.pool is None
    pool = load(as_text).engine.cache.pool
    assert pool is not None
    assert pool.async_write


def test_notes(load: Load, notes: list[str]) -> None:
    backend = {
        "npuDeviceIds": [list(range(600))],
        "kvPoolConfig": {"backend": "directory"},
        "ScheduleConfig": {"enablePrefixCache": True, "prefillPolicyType": 3},
        "layerwiseDisaggregatedMasterPort": 1,
    }
    load(config(backend=backend))

    text = "\n".join(notes)
    assert "enablePrefixCache is obsolete" in text
    assert "unknown keys, ignored: BackendConfig.layerwiseDisaggregatedMasterPort (line " in text
    assert "600 devices share a pool" in text
    assert "prefillPolicyType" in text


def test_sizes_of_memory_that_do_nothing_are_noted(load: Load, notes: list[str]) -> None:
    load(config({"plugin_params": "", "cpuMemSize": 5, "npuMemSize": 0}))
    assert [line.partition(": ")[2].partition(" ")[0] for line in notes] == ["cpuMemSize", "npuMemSize"]


@pytest.mark.parametrize("path", ["demo", "/weights/model.gguf"])
def test_enable_nz_does_nothing_to_what_is_no_deepseek_by_its_name(load: Load, path: str) -> None:
    model = {"modelWeightPath": path, "models": {"deepseekv2": {"kv_cache_options": {"enable_nz": True}}}}
    settings = load(config(model))
    assert settings.engine.cache.kv_layout == "rows"
    assert settings.engine.scheduler.log_hits, "MindIE's lines of the prefix cache"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            config(server={"port": 80}),
            r"line 4, column 3: ServerConfig.port = 80: .* greater than or equal to 1024",
        ),
        (config(server={"port": "1025"}), "ServerConfig.port = '1025': .*valid integer"),
        (config(server={"ipAddress": "0.0.0.0"}), "needs allowAllZeroIpListening"),
        (config(server={"inferMode": "dmi"}), "stemma cluster up cluster.yaml"),
        (config({"modelInstanceType": "StandardMock"}), "without a model, is not supported"),
        (config({"modelWeightPaht": "x"}), r"unknown key .*modelWeightPaht \(line .*'modelWeightPath'"),
        (
            config({"plugin_params": '{"plugin_type":"mtp,prefix_cache","num_speculative_tokens": 9}'}),
            "line .*num_speculative_tokens",
        ),
        (config(deploy={"truncation": 2}), "true, false, 0, 1 or -1"),
        (config(deploy={"maxSeqLen": 100, "maxInputTokenLen": 200}), "more than maxSeqLen"),
        (config(backend={"ScheduleConfig": {"cacheBlockSize": 100}}), "multiple of 16"),
        (config(backend={"ScheduleConfig": {"maxPrefillBatchSize": 300}}), "more than maxBatchSize"),
        (config(backend={"kvPoolConfig": {"backend": "memcache"}}), "Use 'mooncake'"),
        (config(backend={"kvPoolConfig": {"backend": "unifiedcache"}}), "Use 'mooncake'"),
        (
            config({"plugin_params": ""}, backend={"kvPoolConfig": {"backend": "redis"}}),
            "needs the prefix cache",
        ),
        ({"ServerConfig": {}}, "no ModelDeployConfig"),
        (
            {**config(), "ModelDeployConfig": {"ModelConfig": [{"modelWeightPath": "x"}]}},
            "ModelDeployConfig is given both in BackendConfig",
        ),
        (config({"tp": 2, "worldSize": 4}), "line .*worldSize is 4, but dp 1 x cp 1 x tp 2 is 2"),
        (config({"cp": 3, "worldSize": 4}), "worldSize 4 isn't a multiple of dp 1 x cp 3"),
        (config({"tp": 4, "moe_tp": 4, "moe_ep": 2}), "moe_tp 4 x moe_ep 2 must be dp x cp x tp, which is 4"),
        (config({"tp": 4, "moe_ep": 3}), "must be dp x cp x tp, which is 4"),
        (config({"tp": 4, "sp": 2}), "sp is 2, but must be 1 or tp, which is 4"),
        (config({"pp": 2}), "layers aren't spread over ranks"),
        (config({"tp": 0}), "tp is 0; give 1 or more"),
        (config({"dp": 2, "tp": 2}), "dp 2 of several ranks each: .*stemma route"),
        (config(backend={"multiNodesInferEnabled": True}), "one model isn't spread over machines"),
        (config({"plugin_params": {"plugin_type": "prefix_cache"}}), "must be JSON in a string: "),
        ('{"BackendConfig": }', "line 1, column 19: expected a value"),
    ],
)
def test_faults_are_named_with_their_place(load: Load, content: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(content)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"worldSize": 8}, (1, 1, 1)),
        ({"tp": 4, "worldSize": 4, "sp": 4}, (4, 1, 1)),
        ({"cp": 2, "worldSize": 4}, (2, 2, 1)),
        ({"tp": 4, "moe_tp": 2, "moe_ep": 2}, (4, 1, 2)),
        ({"tp": 4, "moe_tp": 2}, (4, 1, 2)),
        ({"dp": -1, "tp": -1, "moe_ep": -1}, (1, 1, 1)),
    ],
)
def test_sizes_become_ranks(load: Load, sizes: dict[str, int], expected: tuple[int, int, int]) -> None:
    parallel = load(config(sizes)).engine.parallel
    found = parallel.tensor_parallel_size, parallel.context_parallel_size, parallel.expert_parallel_size
    assert found == expected


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (config(backend={"modelInstanceNumber": 3}), "replicas"),
        (config({"dp": 3}), "replicas"),
        (config(server={"inferMode": "dmi"}), "prefill_decode"),
    ],
)
def test_a_cluster_is_refused_with_a_file_that_can_be_read(
    load: Load, tmp_path: Path, content: dict[str, Any], kind: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(content)
    written = tmp_path / "cluster.yaml"
    written.write_text(str(refused.value).partition("cluster.yaml`:\n")[2])
    cluster = read_cluster_file(written)

    assert cluster.settings.engine.model.path == Path("/weights")
    if kind == "replicas":
        assert cluster.replicas is not None
        assert cluster.replicas.count == 3
    else:
        assert cluster.prefill_decode is not None


def test_certificates_start_at_the_installation_above_conf(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    file = tmp_path / "conf" / "config.json"
    file.write_text(json.dumps(config(server={"httpsEnabled": True, "tlsCrlFiles": ["revoked.pem"]})))
    settings = load_settings(file=file)

    assert settings.tls.key == tmp_path / "security/keys/server.key.pem"
    assert settings.tls.crl == (tmp_path / "security/certs/revoked.pem",), (
        "a file that is named must be there"
    )
    assert read_mindie_config(file).base == tmp_path


def test_every_key_says_what_it_does_and_the_site_lists_it() -> None:
    rows = key_rows()

    assert len({row.name for row in rows}) == len(rows) > 115
    assert {row.does for row in rows} == {WORKS, NO_EFFECT}
    page = mindie_keys.page()
    assert all(f"\n| `{row.name}` |" in page for row in rows)


def test_what_keys_become_are_settings_and_every_setting_comes_from_such_a_key(tmp_path: Path) -> None:
    """The table of keys, which the docs show, and the translation name the same settings."""
    file = tmp_path / "config.json"
    model = {
        "plugin_params": '{"plugin_type":"prefix_cache,splitfuse"}',
        "cpuMemSize": 1,
        "npuMemSize": 1,
    }
    pool = {"backend": "directory", "configPath": "/pool.json", "asyncWrite": True}
    content = config(model, backend={"kvPoolConfig": pool}, server={"httpsEnabled": True})
    file.write_text(json.dumps(content))
    made = set(translate_mindie(file, {}).values) - {"dialect"}

    names = {name for row in key_rows() if row.does == WORKS for name in row.detail.split(", ")}
    named = {name for name in names if name.isidentifier()}
    assert named <= setting_fields().keys()
    speculation = {name for name in made if name.startswith("speculation_")}
    assert made - speculation <= named
