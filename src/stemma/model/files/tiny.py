"""A small random model with a real tokenizer, built locally in a second: for `stemma demo` and for tests.

Its text means nothing, but everything around it is real: a Qwen2 checkpoint in safetensors, a byte-level BPE
tokenizer trained on the text below, a chat template and a generation_config.json. The same seed gives the
same bytes. Embeddings are not tied and weights are wide (std 0.1): a tied random model repeats one token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as hf_logging

WEIGHT_STD = 0.1
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' + '\\n' }}{%- endif -%}"
)

_CORPUS = (
    "A river that runs through the valley carries water from the mountains to the sea.",
    "The question is short, and the answer should be short as well: how many, how much, how long?",
    "Every morning she walks along the same path, past the old mill and over the small wooden bridge.",
    "To compute the sum, add the first number to the second and write down the result.",
    "When a block is full, it is kept, so that the next request with the same beginning can use it again.",
    "There are seven days in a week, twelve months in a year and sixty minutes in an hour.",
    "If nobody needs the memory, nothing is forgotten; if somebody does, the oldest goes first.",
    "You are a helpful assistant. Answer the following question and explain your reasoning step by step.",
    "He bought three apples for two coins each and sold them for four coins each. What was his profit?",
    "They said that the weather would change, but the sun was still shining over the quiet harbour.",
    "In the beginning the tree has a single root; each branch grows where two prompts part.",
    "Please write a letter to the city about the park, the trees, the lights and the benches.",
)


def build_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: any text can be encoded and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def randomize(model: torch.nn.Module, seed: int, std: float = WEIGHT_STD) -> None:
    """Fill a model with seeded noise: matrices N(0, std), vectors (norms, biases) their value plus noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            if parameter.dim() < 2:
                noise = noise * 0.1 + parameter.float()
            parameter.copy_(noise)


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    generation: dict[str, Any] | None = None,
) -> Path:
    """Write config.json, safetensors, tokenizer files and generation_config.json into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    silent: Any = hf_logging.EmptyTqdm
    previous = hf_logging.set_tqdm_hook(lambda _bar, args, _options: silent(*args))
    try:
        model.save_pretrained(path)
    finally:
        hf_logging.set_tqdm_hook(previous)
    tokenizer.save_pretrained(path)
    defaults = {"eos_token_id": [tokenizer.convert_tokens_to_ids(TURN_END)], **(generation or {})}
    (path / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n")
    return path


def write_tiny_model(path: Path, *, seed: int = 0, hidden_size: int = 192, num_layers: int = 4) -> Path:
    """Write a Qwen2 checkpoint (float32, some 7 MB, context 8192) into `path` and return `path`.

    Tokens that aren't printable text get an all-zero output row and are never chosen: text stays readable.
    """
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=max(1, hidden_size // 96),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    randomize(model, seed)
    with torch.no_grad():
        for token_id in range(len(tokenizer)):
            text = str(tokenizer.decode([token_id]))
            if not (text.isascii() and text.isprintable()) or text in SPECIAL_TOKENS:
                model.lm_head.weight[token_id].zero_()
    return save_checkpoint(model, tokenizer, path)
