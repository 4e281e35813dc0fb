"""The prompts that commands of `stemma cache` are given."""

from __future__ import annotations

from pathlib import Path

from stemma.errors import ConfigError


def read_prompt(prompt: str | None, prompt_file: Path | None, token_ids: Path | None) -> str | list[int]:
    """Return the prompt that one of the three gives: text or token ids. Raises ConfigError."""
    given = [one for one in (prompt, prompt_file, token_ids) if one is not None]
    if len(given) != 1:
        raise ConfigError("give exactly one of --prompt, --prompt-file and --token-ids")
    try:
        if prompt_file is not None:
            return prompt_file.read_text()
        if token_ids is not None:
            return [int(word) for word in token_ids.read_text().replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the prompt: {error}") from error
    assert prompt is not None
    return prompt


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError."""
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the prompt: {error}") from error
