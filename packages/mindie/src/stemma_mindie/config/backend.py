"""``BackendConfig`` with ``kvPoolConfig``, ``ModelDeployConfig`` with its ``ModelConfig``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from stemma_mindie.config.base import (
    NO_LINK,
    NO_NPU,
    OWN_SCHEDULER,
    MindIESection,
    joint_key,
    key,
    no_effect,
)
from stemma_mindie.config.schedule import ScheduleConfig

MAX_PLUGIN_PARAMS = 1024
_REFUSED_POOLS = ("memcache", "unifiedcache")
_PositiveInt = Annotated[int, Field(ge=1)]


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _gib(count: int) -> int | None:
    return count * 2**30 if count > 0 else None


def _direction(value: bool | int) -> str:
    return {0: "error", 1: "left", -1: "right"}[-1 if value is True else int(value)]


class KVPoolConfig(MindIESection):
    """The pool tier. Needs `prefix_cache` among the plugins."""

    section: ClassVar[str] = "BackendConfig.kvPoolConfig"

    backend: str = key("", "pool")
    """Name of the pool (`directory`, `redis`, `mooncake`, or one that an installed package offers); ""
    is off. `memcache` and `unifiedcache` are refused."""
    config_path: str = key("", "pool_config", means=_path, max_length=500)
    """The backend's own file."""
    async_write: bool = key(False, "pool_async_write")
    """Write blocks to the pool in the background."""

    @field_validator("backend")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in _REFUSED_POOLS:
            raise ValueError(
                f"the pool {name!r} is not supported: it is a library of Ascend devices. "
                "Use 'mooncake' (its mooncake.json as configPath), 'redis' or 'directory'"
            )
        return name


class KVCacheOptions(MindIESection):
    """Layout of KV on the device."""

    section: ClassVar[str] = "ModelConfig.models.*.kv_cache_options"

    enable_nz: bool = joint_key(False, "kv_layout", alias="enable_nz")
    """Latents in tiles of 16 columns. For DeepSeek alone; answers are the same."""


class ModelOptions(MindIESection):
    """Options of one model family, e.g. `deepseekv2`."""

    section: ClassVar[str] = "ModelConfig.models.*"

    kv_cache_options: KVCacheOptions = Field(default=KVCacheOptions(), alias="kv_cache_options")
    enable_mlapo_prefetch: bool = no_effect(False, NO_NPU, alias="enable_mlapo_prefetch")

    @model_validator(mode="before")
    @classmethod
    def _both_names(cls, given: Any) -> Any:
        """Take ``kv_cache_option``, as one manual's table calls it."""
        if not isinstance(given, dict) or "kv_cache_option" not in given:
            return given
        if "kv_cache_options" in given:
            raise ValueError("give kv_cache_options or kv_cache_option, not both")
        return {("kv_cache_options" if name == "kv_cache_option" else name): given[name] for name in given}


class ModelConfig(MindIESection):
    """Which model, and its plugins."""

    section: ClassVar[str] = "ModelConfig"

    model_instance_type: Literal["Standard", "StandardMock"] = joint_key("Standard", "a check at the start")
    """`StandardMock`, a server without a model, is refused."""
    model_name: str = key("llama_65b", "served_name", min_length=1, max_length=256)
    model_weight_path: str = key(..., "model", means=Path, min_length=1)
    """Directory of the checkpoint; a relative one starts where the server starts."""
    world_size: int = joint_key(4, "a check at the start", ge=1)
    """Must be `dp` x `cp` x `tp`. Alone it counts Ascend devices and starts no process."""
    cpu_mem_size: int = joint_key(5, "host_cache", ge=0)
    """GB (2^30 bytes) of DRAM for blocks that left the device; 0: none. Needs `prefix_cache`."""
    npu_mem_size: int = key(-1, "kv_cache_memory", means=_gib, ge=-1)
    """GB (2^30 bytes) for KV on the device; -1: a share of what is free."""
    backend_type: Literal["atb", "ms", "torch"] = no_effect("atb", NO_NPU)
    trust_remote_code: bool = key(False, "trust_remote_code")
    async_scheduler_wait_time: int = no_effect(120, OWN_SCHEDULER, alias="async_scheduler_wait_time", ge=1)
    kv_trans_timeout: int = no_effect(10, NO_LINK, alias="kv_trans_timeout", ge=1)
    kv_link_timeout: int = no_effect(1080, NO_LINK, alias="kv_link_timeout", ge=1)
    plugin_params: str = joint_key(
        "",
        "enable_prefix_cache, log_hits, speculation, ...",
        alias="plugin_params",
        max_length=MAX_PLUGIN_PARAMS,
    )
    """JSON in a string: `plugin_type` is a list, by commas, of `prefix_cache`, `la`, `memory_decoding`,
    `mtp`, `splitfuse`; absent: no plugin. `mtp` needs a checkpoint with that layer."""
    models: dict[str, ModelOptions] = Field(default_factory=dict, alias="models")
    dp: int = joint_key(1, "a check at the start", alias="dp", ge=-1)
    """More than 1 is refused with the cluster file to write: groups are replicas, or servers of ranks."""
    sp: int = joint_key(1, "a check at the start", alias="sp", ge=-1)
    """1 or `tp`; ranks of `tp` hold their heads' KV either way."""
    cp: int = joint_key(1, "context_parallel_size", alias="cp", ge=-1)
    tp: int = joint_key(-1, "tensor_parallel_size", alias="tp", ge=-1)
    """-1: what `worldSize` leaves where `cp` or `dp` is more than 1, else 1."""
    pp: int = joint_key(-1, "a check at the start", alias="pp", ge=-1)
    """More than 1 is refused."""
    moe_tp: int = joint_key(-1, "expert_parallel_size", alias="moe_tp", ge=-1)
    """With `moe_ep`, its product is that of `dp`, `cp` and `tp`."""
    moe_ep: int = joint_key(-1, "expert_parallel_size", alias="moe_ep", ge=-1)
    """Must divide `tp`."""

    @field_validator("plugin_params", mode="before")
    @classmethod
    def _quoted(cls, given: Any) -> Any:
        if isinstance(given, dict):
            raise ValueError(f"must be JSON in a string: {json.dumps(json.dumps(given))[:MAX_PLUGIN_PARAMS]}")
        return given

    @field_validator("model_instance_type")
    @classmethod
    def _real(cls, kind: str) -> str:
        if kind == "StandardMock":
            raise ValueError("StandardMock, a server without a model, is not supported; use Standard")
        return kind


class ModelDeployConfig(MindIESection):
    """Lengths, and the model. It stands in `BackendConfig` or at the top of the file."""

    section: ClassVar[str] = "ModelDeployConfig"

    max_seq_len: int = key(2560, "max_model_len", ge=2)
    """Tokens of prompt plus output."""
    max_input_token_len: int = key(2048, "max_input_tokens", ge=1, le=4194304)
    """Tokens of a prompt; what happens to a longer one is `truncation`."""
    truncation: bool | int = key(False, "truncation", means=_direction)
    """0 or false: a longer prompt is an error; 1: cut on the left; -1 or true: cut on the right."""
    speculation_gamma: int | None = joint_key(None, "a check at the start", ge=0)
    """Must have room for the drafts that `plugin_params` asks for."""
    model_config_list: Annotated[list[ModelConfig], Field(min_length=1, max_length=1)] = Field(
        ..., alias="ModelConfig"
    )
    """One model."""

    @field_validator("truncation")
    @classmethod
    def _one_of(cls, value: bool | int) -> bool | int:
        if value not in (-1, 0, 1):
            raise ValueError("must be true, false, 0, 1 or -1")
        return value

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if "max_input_token_len" in self.model_fields_set and self.max_input_token_len > self.max_seq_len:
            raise ValueError(
                f"maxInputTokenLen {self.max_input_token_len} is more than maxSeqLen {self.max_seq_len}"
            )
        return self


class BackendConfig(MindIESection):
    """``BackendConfig``: model, devices and schedule of the engine."""

    section: ClassVar[str] = "BackendConfig"

    backend_name: str = no_effect("mindieservice_llm_engine", "there is one engine")
    model_instance_number: int = joint_key(1, "a check at the start", ge=1, le=10)
    """More than 1 is refused with the cluster file to write."""
    npu_device_ids: list[list[Annotated[int, Field(ge=0)]]] = no_effect([[0, 1, 2, 3]], NO_NPU)
    tokenizer_process_number: int = no_effect(8, "tokenizers run in threads", ge=1, le=32)
    multi_nodes_infer_enabled: bool = joint_key(False, "a check at the start")
    """True is refused: a server runs on each machine, and `stemma route` before them."""
    multi_nodes_infer_port: int = no_effect(1120, NO_LINK, ge=1024, le=65535)
    inter_node_tls_enabled: bool = no_effect(True, NO_LINK, alias="interNodeTLSEnabled")
    inter_node_tls_ca_path: str = no_effect("security/grpc/ca/", NO_LINK)
    inter_node_tls_ca_files: list[str] = no_effect(["ca.pem"], NO_LINK)
    inter_node_tls_cert: str = no_effect("security/grpc/certs/server.pem", NO_LINK)
    inter_node_tls_pk: str = no_effect("security/grpc/keys/server.key.pem", NO_LINK)
    inter_node_tls_pk_pwd: str = no_effect("security/grpc/pass/mindie_server_key_pwd.txt", NO_LINK)
    inter_node_tls_crl_path: str = no_effect("security/grpc/certs/", NO_LINK)
    inter_node_tls_crl_files: list[str] = no_effect(["server_crl.pem"], NO_LINK)
    inter_node_kmc_ksf_master: str = no_effect("tools/pmt/master/ksfa", NO_LINK)
    inter_node_kmc_ksf_standby: str = no_effect("tools/pmt/standby/ksfb", NO_LINK)
    kv_pool_config: KVPoolConfig = Field(default=KVPoolConfig())
    model_deploy_config: ModelDeployConfig | None = Field(default=None, alias="ModelDeployConfig")
    schedule_config: ScheduleConfig | None = Field(default=None, alias="ScheduleConfig")

    @field_validator("kv_pool_config", mode="before")
    @classmethod
    def _also_text(cls, given: Any) -> Any:
        """Take the object as JSON in a string, the type that the manual names."""
        if not isinstance(given, str):
            return given
        try:
            return json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
