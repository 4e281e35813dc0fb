"""Which KV is interchangeable: the key space of blocks that vLLM computed.

It binds vLLM's name and version, so these blocks never mix with ours or with those of another version, and
what makes the numbers: weights, dtypes, quantization, compilation, the attention backend's layout, the
processor's kind.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stemma.errors import ConfigError, ModelError
from stemma.model.files.fingerprint import model_fingerprint
from stemma.prefix.keys import KeySpace


def key_space(fields: Mapping[str, str], model: Path, layout: str, block_size: int) -> KeySpace:
    """Return the key space of a model directory; raise ModelError if it can't be read.

    `fields`: what else the numbers depend on (`numeric_fields`). `layout`: `VllmBlocks.layout`.
    """
    text = json.dumps(dict(fields), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return KeySpace(model_fingerprint(model), f"vllm {fields['version']}:{layout}:{digest}", block_size)


def numeric_fields(config: Any, version: str, device: torch.device) -> dict[str, str]:
    """Return what vLLM's numbers depend on beside the weights. `config`: a `VllmConfig`."""
    model, cache = config.model_config, config.cache_config
    kind = platform.machine() + " " + torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    return {
        "version": version,
        "torch": torch.__version__,
        "device": f"{device.type} {kind}",
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "hf_overrides": repr(model.hf_overrides),
        "revision": str(model.revision),
        "max_model_len": str(model.max_model_len),
        "compilation": str(config.compilation_config.mode),
        "backend": str(config.attention_config.backend),
    }


def model_directory(name: str, revision: str | None) -> Path:
    """Return where vLLM read a model from: a directory, or the local cache of the hub.

    Raises ModelError if it is neither, e.g. streamed from object storage.
    """
    path = Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ModelError(
            f"StemmaConnector can't find the files of {name!r} on this machine, so it can't name its "
            "blocks; give vLLM a directory"
        ) from error


def require_supported(config: Any) -> None:
    """Raise ConfigError for what the connector doesn't do."""
    parallel = config.parallel_config
    if parallel.world_size != 1:
        raise ConfigError(
            "StemmaConnector serves one worker: tensor_parallel_size and pipeline_parallel_size must be 1, "
            f"not {parallel.tensor_parallel_size} and {parallel.pipeline_parallel_size}"
        )
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "a block that can't be loaded must be recomputed, not fail its request: add "
            '"kv_load_failure_policy":"recompute" to --kv-transfer-config'
        )
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError("StemmaConnector extends vLLM's prefix cache: add --enable-prefix-caching")
