"""A tiny DeepSeek-V3 model with an MTP layer, trained for seconds on a synthetic language."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from stemma.model.files.tiny import randomize, save_checkpoint
from tests.checkpoints import CONFIGS, add_mtp_weights, tokenizer

NUM_WORDS, WORD_TOKENS = 12, 5
SUCCESSOR_SHARE = 0.85
"""How often a word is followed by the same other word."""


def text(num_tokens: int, seed: int) -> list[int]:
    """Return text of the language: words of five tokens, most of which follow the word before."""
    words = np.random.default_rng(0).permutation(np.arange(3, 500))[: NUM_WORDS * WORD_TOKENS]
    words = words.reshape(NUM_WORDS, WORD_TOKENS)
    generator = np.random.default_rng(seed)
    tokens: list[int] = []
    word = int(generator.integers(NUM_WORDS))
    while len(tokens) < num_tokens:
        tokens += words[word].tolist()
        follows = generator.random() < SUCCESSOR_SHARE
        word = (word + 1) % NUM_WORDS if follows else int(generator.integers(NUM_WORDS))
    return tokens[:num_tokens]


def train(path: Path, *, num_steps: int, seed: int = 0) -> Path:
    """Train model and layer together on the sum of their losses, and write them as a checkpoint."""
    torch.manual_seed(seed)
    config = CONFIGS["deepseek-v3"]()
    config.num_hidden_layers, config.num_mtp_layers, config.n_routed_experts = 2, 1, 4
    main = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mtp = MtpModel(main, 1)
    randomize(main, seed, std=0.05)
    randomize(mtp.layers, seed + 1, std=0.05)
    parameters = [*main.parameters(), *mtp.layers.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=4e-3)
    for step in range(num_steps):
        tokens = torch.tensor([text(48, 1000 + 8 * step + row) for row in range(8)])
        hidden = main.model(tokens, use_cache=False).last_hidden_state
        pairs, positions = tokens[:, 1:], torch.arange(1, tokens.shape[1])[None]
        guessing = mtp.forward_layer(0, hidden[:, :-1], positions, None, input_ids=pairs)
        loss = _loss(main.lm_head(hidden[:, :-1]), tokens[:, 1:])
        loss = loss + _loss(main.lm_head(guessing[:, :-1]), tokens[:, 2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_checkpoint(main.eval(), tokenizer(), path)
    return add_mtp_weights(path, main, mtp.layers[0])


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
