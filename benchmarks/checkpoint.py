"""The model that benchmarks run on: random weights of Qwen2.5-0.5B's shape, saved as a user's checkpoint.

Speed depends on shapes, not on the values of weights. Built once (about 20 s) and kept in a cache folder,
since every benchmark and every peer reads the same directory.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

VOCAB_SIZE = 32_000
_LONG = 140_000
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def half_billion_checkpoint(folder: Path | None = None) -> Path:
    """Return a directory with the 0.5B-shape checkpoint in bf16, building it on the first call."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    return _built(folder or _cache_folder("bench-0.5b"), config)


def larger_checkpoint(folder: Path | None = None) -> Path:
    """Return a directory with a checkpoint of Qwen2.5-1.5B's shape in bf16, building it on the first call."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    return _built(folder or _cache_folder("bench-1.5b"), config)


def long_checkpoint(num_layers: int) -> Path:
    """Return a checkpoint of SmolLM2-135M's shape (30 layers) for 140,000 tokens in bf16, built once."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=576,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=_LONG,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    return _built(_cache_folder(f"bench-long-{num_layers}"), config)


def latent_checkpoint(num_layers: int = 8) -> Path:
    """Return a small dense model over DeepSeek's latents (8 layers) for 140,000 tokens, built once."""
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        num_hidden_layers=num_layers,
        first_k_dense_replace=num_layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=2816,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        num_mtp_layers=0,
        max_position_embeddings=_LONG,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    return _built(_cache_folder(f"bench-latent-{num_layers}"), config)


def _cache_folder(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "stemma" / name


def _built(folder: Path, config: PreTrainedConfig) -> Path:
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _train_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=1, pad_token_id=0).save_pretrained(folder)  # type: ignore[no-untyped-call]
    (folder / "complete").touch()
    return folder


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of VOCAB_SIZE ids on Python's own library: text that every machine has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=["<pad>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    sources = [path for path in sources if "site-packages" not in path.parts][:1500]
    tokenizer.train_from_iterator((path.read_text(errors="replace") for path in sources), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=_CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    print(half_billion_checkpoint())
