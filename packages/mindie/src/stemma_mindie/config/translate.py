"""From a checked ``config.json`` to our settings by flat name, and what the operator should be told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stemma.config.readers import ForeignSettings
from stemma.errors import ConfigError
from stemma_mindie.config.backend import ModelConfig
from stemma_mindie.config.base import MindIESection, settings_in
from stemma_mindie.config.deployment import parallel_sizes
from stemma_mindie.config.document import MindIEFile, read_mindie_config
from stemma_mindie.config.plugin_params import Plugins, read_plugin_params
from stemma_mindie.config.server import ServerConfig

_ADDRESSES = {"MIES_CONTAINER_IP": "host", "MIES_CONTAINER_MANAGEMENT_IP": "management_host"}
"""Variables that beat the file's addresses."""
MAX_POOL_DEVICES = 512
"""Beyond it, the original's links between devices are torn down and rebuilt."""
_REQUESTS_PER_LINK = 3
_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
_MAX_CONFIG_BYTES = 1 << 20
_TLS_PLANES = (("", "tls_"), ("management_", "management_tls_"), ("metrics_", "metrics_tls_"))


@dataclass(slots=True)
class Translation(ForeignSettings):
    """Settings with the key that each came from."""

    file: MindIEFile = field(kw_only=True)

    def put(self, name: str, value: Any, key: str) -> None:
        """Note the value of a setting, and which key of the file it came from."""
        self.values[name] = (value, self.file.says(key))

    def put_keys_of(self, section: MindIESection) -> None:
        """Note what the keys of a section become by themselves."""
        for name, value, key in settings_in(section):
            self.put(name, value, key)


def translate_mindie(path: Path, environ: Mapping[str, str]) -> Translation:
    """Read ``config.json`` and return what it means here. Raises ConfigError."""
    file = read_mindie_config(path)
    result = Translation(file=file)
    result.values["dialect"] = ("mindie", str(path))
    deploy = file.config.deploy
    for section in (file.config.server, deploy, *deploy.model_config_list, file.config.schedule):
        result.put_keys_of(section)
    _server(file, environ, result)
    for name, (size, key) in parallel_sizes(file).items():
        result.put(name, size, key)
    _model(file, result)
    _notes(file, result)
    return result


def _server(file: MindIEFile, environ: Mapping[str, str], result: Translation) -> None:
    server = file.config.server
    for variable, name in _ADDRESSES.items():
        if address := environ.get(variable):
            result.put(name, address, variable)
    most, at_once = _REQUESTS_PER_LINK * server.max_link_num, file.config.schedule.max_batch_size
    result.put("max_waiting", max(1, most - at_once), "ServerConfig.maxLinkNum")
    result.put("max_connections", most, "ServerConfig.maxLinkNum")
    if server.https_enabled:
        for prefix, flat in _TLS_PLANES:
            _tls(file, server, prefix, flat, result)


def _tls(file: MindIEFile, server: ServerConfig, prefix: str, flat: str, result: Translation) -> None:
    """Note the certificates of one plane; relative paths start at the installation."""

    def given(name: str) -> Any:
        return getattr(server, f"{prefix}tls_{name}")

    password = file.base / given("pk_pwd")
    lists = tuple(file.base / given("crl_path") / name for name in given("crl_files"))
    if f"{prefix}tls_crl_files" not in server.model_fields_set:
        lists = tuple(each for each in lists if each.is_file())
    key = f"ServerConfig.{prefix}tls"
    result.put(
        f"{flat}ca", tuple(file.base / given("ca_path") / name for name in given("ca_file")), f"{key}CaFile"
    )
    result.put(f"{flat}cert", file.base / given("cert"), f"{key}Cert")
    result.put(f"{flat}key", file.base / given("pk"), f"{key}Pk")
    if f"{prefix}tls_pk_pwd" in server.model_fields_set or password.is_file():
        result.put(f"{flat}key_password_file", password, f"{key}PkPwd")
    if lists:
        result.put(f"{flat}crl", lists, f"{key}CrlFiles")


def _model(file: MindIEFile, result: Translation) -> None:
    [model] = file.config.deploy.model_config_list
    plugins = _plugins(file, model)
    result.put("enable_prefix_cache", plugins.prefix_cache, "ModelConfig.plugin_params")
    result.put("log_hits", plugins.prefix_cache, "ModelConfig.plugin_params")
    for name, value in plugins.speculation.model_dump().items():
        flat = "speculation" if name == "mode" else f"speculation_{name}"
        result.put(flat, value, "ModelConfig.plugin_params")
    if plugins.prefix_cache and model.cpu_mem_size > 0:
        result.put("host_cache", model.cpu_mem_size * 2**30, "ModelConfig.cpuMemSize")
    if plugins.splitfuse:
        chunk = file.config.schedule.split_chunk_tokens
        result.put("max_batch_tokens", chunk, "ScheduleConfig.splitChunkTokens")
    _kv_layout(file, model, result)
    _pool(file, plugins, result)


def _plugins(file: MindIEFile, model: ModelConfig) -> Plugins:
    try:
        return read_plugin_params(model.plugin_params, speculation_gamma=file.config.deploy.speculation_gamma)
    except ConfigError as error:
        where = file.document.where(file.model_path("plugin_params"))
        raise ConfigError(f"{file.path}: {where}: {error}") from error


def _pool(file: MindIEFile, plugins: Plugins, result: Translation) -> None:
    pool = file.config.backend.kv_pool_config
    if not pool.backend:
        return
    if not plugins.prefix_cache:
        where = file.document.where(("BackendConfig", "kvPoolConfig"))
        raise ConfigError(
            f"{file.path}: {where}: kvPoolConfig needs the prefix cache: put prefix_cache into "
            "plugin_type of plugin_params"
        )
    result.put_keys_of(pool)


def _notes(file: MindIEFile, result: Translation) -> None:
    backend, schedule = file.config.backend, file.config.schedule
    [model] = file.config.deploy.model_config_list
    if file.without_effect:
        result.notes.append("accepted without effect: " + ", ".join(dict.fromkeys(file.without_effect)))
    if file.unknown:
        result.notes.append("unknown keys, ignored: " + ", ".join(file.unknown))
    if "enable_prefix_cache" in schedule.model_fields_set:
        result.notes.append(
            "enablePrefixCache is obsolete and ignored; plugin_params with prefix_cache turns the cache on"
        )
    if schedule.prefill_policy_type:
        result.notes.append("prefillPolicyType: only 0 (first come, first served) is there; taken as 0")
    if (
        "cpu_mem_size" in model.model_fields_set
        and model.cpu_mem_size
        and "prefix_cache" not in model.plugin_params
    ):
        result.notes.append("cpuMemSize has no effect without prefix_cache in plugin_params")
    if model.npu_mem_size == 0:
        result.notes.append("npuMemSize 0 is taken as -1: a share of what is free")
    num_devices = max(sum(map(len, backend.npu_device_ids)), model.world_size)
    if backend.kv_pool_config.backend and num_devices > MAX_POOL_DEVICES:
        result.notes.append(
            f"{num_devices} devices share a pool: the original's links hold {MAX_POOL_DEVICES} at most, more "
            "are torn down and rebuilt; make pools of fewer devices"
        )


def _kv_layout(file: MindIEFile, model: ModelConfig, result: Translation) -> None:
    """Take `enable_nz` of the served family: MindIE wants it for DeepSeek with the prefix cache, alone."""
    kind = _model_type(Path(model.model_weight_path))
    families = [name for name, options in model.models.items() if options.kv_cache_options.enable_nz]
    if kind is None or kind in _DEEPSEEK:
        key = "ModelConfig.models.*.kv_cache_options.enable_nz"
        result.put("kv_layout", "nz" if families else "rows", key)
        if kind is not None and not families and "prefix_cache" in model.plugin_params:
            result.notes.append(
                "enable_nz is false; MindIE wants it true for DeepSeek with prefix_cache; answers are equal"
            )
        return
    others = [name for name in families if name.startswith("deepseek")]
    if families != others:
        where = file.document.where(file.model_path("models"))
        raise ConfigError(
            f"{file.path}: {where}: enable_nz is for DeepSeek alone, not for {kind}; set it to false"
        )
    if others:
        result.notes.append(f"enable_nz of models.{others[0]} is not for {kind}: without effect")


def _model_type(folder: Path) -> str | None:
    """Return `model_type` of a checkpoint; None if that can't be told (loading it will say why).

    The demo and GGUF files hold no DeepSeek; they go by their names.
    """
    if folder == Path("demo") or folder.suffix.lower() == ".gguf":
        return str(folder)
    try:
        with open(folder / "config.json", "rb") as file:
            found = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    kind = found.get("model_type") if isinstance(found, dict) else None
    return kind[:64] if isinstance(kind, str) else None
