"""A checkpoint that computes long prompts quickly, with a tokenizer that knows this repository's words."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from stemma.model.files.tiny import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, randomize, save_checkpoint

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "tests" / "templates"
CONTEXT = 131_072


def train_tokenizer(vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on this repository's pages: some four characters a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pages = [file.read_text() for file in sorted((ROOT / "docs").glob("[!r]*/*.md"))]
    tokenizer.train_from_iterator(pages, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def write_model(path: Path, template: str) -> Path:
    """Write a checkpoint of one small layer, context 131,072, with the template of that name."""
    tokenizer = train_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    randomize(model, 0)
    return save_checkpoint(model, tokenizer, path)


if __name__ == "__main__":
    import sys

    print(json.dumps(str(write_model(Path(sys.argv[1]), sys.argv[2]))))
