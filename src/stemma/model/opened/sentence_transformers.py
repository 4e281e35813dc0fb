"""Reader of sentence-transformers' files in a checkpoint: how hidden states become an embedding.

``modules.json`` lists what follows the model: a pooling and a normalization, or, in a reranker, the tokens
whose logits are its score. Prompts are in ``config_sentence_transformers.json``. Everything there is checked;
a module that we don't compute is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stemma.errors import ModelError, UnsupportedModel
from stemma.model.files.directory import has_file, is_gguf, read_json
from stemma.model.opened.abilities import EmbeddingFormat, PoolingKind, ScoreTokens

_MODULES = "modules.json"
_PROMPTS = "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
_KINDS: Mapping[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLD_KINDS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""How older versions name the kinds, a switch each."""
_MAX_JSON_BYTES = 1 << 20
_MAX_SHOWN = 200


def read_modules(path: Path, size: int) -> EmbeddingFormat | ScoreTokens | None:
    """Return what the modules of the checkpoint in `path` make of its states; None: it names none.

    `size`: numbers of a hidden state. The embedding's `dimensions` are left closed: config.json and settings
    open them. Raises ModelError for files that can't be read, UnsupportedModel for what isn't served.
    """
    if is_gguf(path) or not has_file(path, _MODULES):
        return None
    kind: PoolingKind | None = None
    normalizes = False
    tokens: ScoreTokens | None = None
    for name, folder in _modules(path):
        if name == "Transformer":
            _check_transformer(path)
        elif name == "Pooling" and kind is None:
            kind = _kind_of(path / folder / "config.json")
        elif name == "Normalize" and kind is not None:
            normalizes = True
        elif name == "LogitScore" and kind is None and tokens is None:
            tokens = _score_tokens(path / folder / "config.json")
        else:
            raise UnsupportedModel(
                f"{path / _MODULES} has a module {name}, which isn't served there; a Pooling and a Normalize "
                "may follow the Transformer, or a LogitScore"
            )
    if kind is None:
        return tokens
    prompts, default_prompt = _read_prompts(path)
    return EmbeddingFormat(kind, size, normalizes, prompts, default_prompt)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the class name and the folder of each module."""
    file = path / _MODULES
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{file} has more than {_MAX_JSON_BYTES} bytes; download it again")
        listed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"can't read {file}: {error}") from error
    found: list[tuple[str, str]] = []
    for one in listed if isinstance(listed, list) else [None]:
        kind, folder = (one.get("type"), one.get("path", "")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str) or Path(folder).name != folder:
            raise ModelError(f"{file} isn't a list of modules with type and path; download it again")
        found.append((kind.rpartition(".")[2], folder))
    return found


def _kind_of(file: Path) -> PoolingKind:
    raw = read_json(file)
    given = raw.get("pooling_mode")
    if given is None:
        given = [name for switch, name in _OLD_KINDS.items() if raw.get(switch) is True]
    names = [given] if isinstance(given, str) else given
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        shown = str(names)[:_MAX_SHOWN]
        raise UnsupportedModel(f"{file} pools by {shown}; served is one of {', '.join(_KINDS)}")
    if kind == "mean" and raw.get("include_prompt", True) is not True:
        raise UnsupportedModel(f"{file} leaves prompts out of the mean (include_prompt), which isn't served")
    return kind


def _score_tokens(file: Path) -> ScoreTokens:
    raw = read_json(file)
    true_id, false_id = raw.get("true_token_id"), raw.get("false_token_id")
    if type(true_id) is not int or type(false_id) is not int or true_id < 0 or false_id < 0:
        raise UnsupportedModel(f"{file} must name a true_token_id and a false_token_id")
    return ScoreTokens(true_id, false_id)


def _check_transformer(path: Path) -> None:
    if has_file(path, _TRANSFORMER) and read_json(path / _TRANSFORMER).get("do_lower_case") is True:
        raise UnsupportedModel(f"{path / _TRANSFORMER} wants texts in lower case, which isn't served")


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the one that is used where none is asked for."""
    if not has_file(path, _PROMPTS):
        return {}, None
    raw: dict[str, Any] = read_json(path / _PROMPTS)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path / _PROMPTS}: prompts must be texts by name; download it again")
    if default is not None and default not in prompts:
        raise ModelError(f"{path / _PROMPTS}: the default prompt {default!r} isn't among the prompts")
    return prompts, default
