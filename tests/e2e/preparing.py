"""Models whose templates render answers otherwise than they were written, and servers that prepare turns."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx

from stemma.model.files.tiny import write_tiny_model
from tests.e2e.conftest import Served

STRIPS = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' -%}{{ message.content.split('a', 1)[-1] }}"
    "{%- else -%}{{ message.content }}{%- endif -%}{{ '<|im_end|>' + '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' + '\\n' }}{%- endif -%}"
)
"""Leaves out what an answer begins with, as templates do with thinking."""


def write_model_with_template(path: Path, template: str) -> Path:
    """Write the small seeded model with another chat template."""
    model = write_tiny_model(path, hidden_size=96, num_layers=2)
    (model / "chat_template.jinja").write_text(template)
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return model


def metric(served: Served, name: str) -> float:
    """Return the sum of a metric's samples."""
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def looked_at(served: Served) -> float:
    """Return for how many answers the turn after them was prepared, or needn't be."""
    return metric(served, "stemma_prepared_turns_total")


def wait_for_turns(served: Served, number: float) -> None:
    """Wait until `looked_at` returns at least `number`."""
    end = time.monotonic() + 20
    while looked_at(served) < number:
        assert time.monotonic() < end, "nothing was prepared"
        time.sleep(0.02)
