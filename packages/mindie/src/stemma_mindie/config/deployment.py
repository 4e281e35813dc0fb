"""Ranks, replicas and roles: what the keys that spread one model over devices become on this machine.

MindIE's product: `dp` x `cp` x `tp` is `worldSize`, and so is `moe_tp` x `moe_ep`. `worldSize` alone and
`npuDeviceIds` count Ascend devices, which aren't here: only `tp` and `cp` start processes.
"""

from __future__ import annotations

from typing import Any

import yaml

from stemma.errors import ConfigError
from stemma_mindie.config.backend import ModelConfig
from stemma_mindie.config.document import MindIEFile

_SIZES = ("tp", "cp", "dp", "pp", "sp", "moe_tp", "moe_ep")


def parallel_sizes(file: MindIEFile) -> dict[str, tuple[int, str]]:
    """Return (size, key) by the setting that asks for these ranks; only sizes above 1.

    Raises ConfigError for sizes that contradict each other, and for what one server can't be, with the file
    to write instead.
    """
    [model] = file.config.deploy.model_config_list
    for name in _SIZES:
        if getattr(model, name) == 0:
            raise _fault(file, name, f"{name} is 0; give 1 or more, or -1 to leave it open")
    tp = _tensor_parallel(file, model)
    _check_experts(file, model, tp)
    _check_one_server(file, model)
    total = tp * _given(model.cp)
    experts = model.moe_ep if model.moe_ep > 0 else total // model.moe_tp if model.moe_tp > 0 else 1
    wanted = {
        "tensor_parallel_size": (tp, "ModelConfig.tp"),
        "context_parallel_size": (_given(model.cp), "ModelConfig.cp"),
        "expert_parallel_size": (experts, "ModelConfig.moe_ep"),
    }
    return {name: item for name, item in wanted.items() if item[0] > 1}


def _tensor_parallel(file: MindIEFile, model: ModelConfig) -> int:
    """Return `tp`, from the others where it is left open; check the product."""
    dp, cp = _given(model.dp), _given(model.cp)
    knows_world = "world_size" in model.model_fields_set and not file.config.backend.multi_nodes_infer_enabled
    if model.tp > 0:
        if knows_world and dp * cp * model.tp != model.world_size:
            raise _fault(
                file,
                "worldSize",
                f"worldSize is {model.world_size}, but dp {dp} x cp {cp} x tp {model.tp} is "
                f"{dp * cp * model.tp}; make them equal",
            )
        return model.tp
    if dp * cp == 1 or not knows_world:
        return 1
    if model.world_size % (dp * cp):
        raise _fault(file, "worldSize", f"worldSize {model.world_size} isn't a multiple of dp {dp} x cp {cp}")
    return model.world_size // (dp * cp)


def _check_experts(file: MindIEFile, model: ModelConfig, tp: int) -> None:
    total = tp * _given(model.dp) * _given(model.cp)
    experts = _given(model.moe_tp) * _given(model.moe_ep)
    is_whole = model.moe_tp > 0 and model.moe_ep > 0
    if (is_whole and experts != total) or total % experts:
        raise _fault(
            file,
            "moe_ep" if model.moe_ep > 0 else "moe_tp",
            f"moe_tp {model.moe_tp} x moe_ep {model.moe_ep} must be dp x cp x tp, which is {total}",
        )
    if model.sp > 1 and model.sp != tp:
        raise _fault(file, "sp", f"sp is {model.sp}, but must be 1 or tp, which is {tp}")
    if model.pp > 1:
        raise _fault(file, "pp", f"pp {model.pp}: layers aren't spread over ranks; ask for them with tp")


def _check_one_server(file: MindIEFile, model: ModelConfig) -> None:
    """Raise ConfigError, with what to do instead, if the file describes more than one server."""
    backend, dp = file.config.backend, _given(model.dp)
    if backend.multi_nodes_infer_enabled:
        raise _fault(
            file,
            "multiNodesInferEnabled",
            "multiNodesInferEnabled: one model isn't spread over machines here. Start a server on each from "
            "a file with multiNodesInferEnabled false and sizes for its own devices, and before them "
            "`stemma route URL URL ...`, or one cluster of replicas (docs/how-to/fleet.md)",
        )
    if file.config.server.infer_mode == "dmi":
        pool = backend.kv_pool_config
        named = {"name": pool.backend or "directory", "config": pool.config_path or "pool.json"}
        cluster = {**_settings(file, model), "prefill_decode": {"pools": [named]}}
        raise _instead(file, "inferMode", "inferMode dmi is prefill and decode apart", cluster, "up")
    for key, count in (("modelInstanceNumber", backend.model_instance_number), ("dp", dp)):
        if count > 1 and (model.tp > 1 or model.cp > 1):
            raise _fault(
                file,
                key,
                f"{key} {count} of several ranks each: start {count} servers from files with {key} 1 and "
                "ports of their own, and before them `stemma route URL URL ...` (docs/how-to/fleet.md)",
            )
        if count > 1:
            cluster = {**_settings(file, model), "replicas": {"count": count}}
            raise _instead(file, key, f"{key} {count} asks for {count} engines", cluster, "deploy")


def _settings(file: MindIEFile, model: ModelConfig) -> dict[str, Any]:
    server = file.config.server
    return {
        "settings": {
            "model": {
                "path": model.model_weight_path,
                "served_name": model.model_name,
                "max_model_len": file.config.deploy.max_seq_len,
            },
            "cache": {"block_size": file.config.schedule.cache_block_size},
            "server": {"host": server.ip_address, "port": server.port},
        }
    }


def _instead(file: MindIEFile, key: str, what: str, cluster: dict[str, Any], command: str) -> ConfigError:
    text = yaml.safe_dump(cluster, sort_keys=False)
    return _fault(
        file,
        key,
        f"{what}, which is a cluster. Write cluster.yaml, and into its `settings` what else this file sets "
        f"(docs/how-to/fleet.md); start it with `stemma cluster {command} cluster.yaml`:\n{text}",
    )


def _given(size: int) -> int:
    """Return a size; -1, left open, is 1."""
    return max(1, size)


def _fault(file: MindIEFile, key: str, message: str) -> ConfigError:
    return ConfigError(f"{file.path}: {_place(file, key)}: {message}")


def _place(file: MindIEFile, key: str) -> str:
    if key == "inferMode":
        return file.document.where(("ServerConfig", key))
    if key in ("multiNodesInferEnabled", "modelInstanceNumber"):
        return file.document.where(("BackendConfig", key))
    return file.document.where(file.model_path(key))
