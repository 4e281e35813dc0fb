"""Which model computes, and how: what two servers must have in common to give the same bits."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stemma import __version__
from stemma.config.settings import EngineSettings
from stemma.errors import ConfigError
from stemma.model.files.fingerprint import model_fingerprint
from stemma.model.load.located import located_path
from stemma.model.text.tokenizer import Tokenizer
from stemma.prefix.keys import KeySpace

_ALL_BYTES = 1 << 62
"""Every byte of the weights: one changed bit is another model."""
_LEVEL = re.compile(r"(?:^|:)(portable|avx2|avx512|avx512_bf16|amx|amx_emulated|neon|neon_bf16)-")
"""The kernels' level in a numeric path, where answers are the same bits whatever was cached."""
_PREDICTING = ":mtp"
"""Says that a layer drafts, which no answer depends on."""
NOT_EXACT = (
    "receipts need Stemma's kernels on CPU, and keys that name their level (share_across_levels off): "
    "elsewhere an answer depends on rounding, and nobody could check it"
)


@dataclass(frozen=True, slots=True)
class Identity:
    """A model, and the numeric path that computes it."""

    name: str
    weights: str
    """SHA-256 of config and all weights (`model/files/fingerprint.py`), in hexadecimal as all are."""
    tokenizer: str
    template: str | None
    """None: it has no chat template."""
    computation: str
    """Names the order of sums: the numeric path, and the ranks that divide them."""
    settings: dict[str, Any]
    """The engine's that it depends on, by their flat names."""
    version: str = __version__


def level_of(computation: str) -> str:
    """Return the kernels' level that a numeric path names. Raises ConfigError where bits aren't promised."""
    found = _LEVEL.search(computation)
    if found is None:
        raise ConfigError(NOT_EXACT)
    return found[1]


def identity_of(
    settings: EngineSettings, name: str, tokenizer: Tokenizer, space: KeySpace, max_model_len: int
) -> Identity:
    """Return a running engine's identity. Reads all weights: for threads. Raises ModelError."""
    model, template = settings.model, tokenizer.chat_template
    return Identity(
        name,
        weights_digest(model.path, trust_remote_code=model.trust_remote_code),
        tokenizer_digest(tokenizer),
        None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        computation_of(space),
        {
            "dtype": model.dtype,
            "quantize": model.quantize,
            "quantize_group_size": model.quantize_group_size,
            "kv_cache_dtype": settings.cache.kv_cache_dtype,
            "max_model_len": max_model_len,
        },
    )


def computation_of(space: KeySpace) -> str:
    """Return what an engine's bits depend on beside its model and settings. Raises ConfigError as above."""
    found = _LEVEL.search(space.kv_layout)
    if found is None:
        raise ConfigError(NOT_EXACT)
    return space.kv_layout[found.start(1) :].replace(_PREDICTING, "")


def weights_digest(path: Path, *, trust_remote_code: bool = False) -> str:
    """Return the digest of a checkpoint, every byte of its weights read. Raises ModelError."""
    return model_fingerprint(located_path(path), remote_code=trust_remote_code, whole_bytes=_ALL_BYTES)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return the digest of all that turns texts into ids and back."""
    found = tokenizer.transformers_tokenizer
    raw = getattr(found, "backend_tokenizer", None)
    told = raw.to_str() if raw is not None else json.dumps(sorted(found.get_vocab().items()))
    special = json.dumps(tokenizer.special_tokens, sort_keys=True)
    return hashlib.sha256(f"{told}\0{special}".encode()).hexdigest()
