"""A tokenizer with merges, so that a model may write what it never would make of a text."""

from __future__ import annotations

import pytest
from tests.server.scripted_engine import ScriptedEngine

from stemma.model.files.tiny import build_tokenizer
from stemma.model.text.tokenizer import Tokenizer

TEMPLATE = (
    "{%- set asked = namespace(at=0) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set asked.at = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content and loop.index0 > asked.at -%}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{ '<tool_call>\\n' }}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}' }}"
    "{{ '\\n</tool_call>' }}{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"
    "{%- if opens_thinking -%}{{ '<think>\\n' }}{%- endif -%}{%- endif -%}"
)
"""Like Qwen3's: thinking is left out of turns before the last question; calls are JSON between marks."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("merges")
    fast = build_tokenizer()
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(path))
    return Tokenizer(path)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    found = ScriptedEngine(tokenizer)
    found.script.spelled = True
    return found
