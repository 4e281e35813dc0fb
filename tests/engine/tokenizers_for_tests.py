"""Small real tokenizers, trained on the spot: a byte-level BPE and a SentencePiece-like one."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stemma.model.text.tokenizer import Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello, world! It's 9 o'clock.",
    "def add(a, b):\n    return a + b\n",
    "Grüße aus München, 你好世界, こんにちは 🙂🚀 e\u0301",
]
END = "<|end|>"


def _save(raw: RawTokenizer, folder: Path) -> Tokenizer:
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END).save_pretrained(str(folder))
    return Tokenizer(folder)


def byte_level(folder: Path) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: tokens are byte strings, characters may be split anywhere."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(TEXT, trainer)
    return _save(raw, folder)


def sentencepiece_like(folder: Path) -> Tokenizer:
    """As Llama 2: a leading space is a token's own mark, unknown characters become byte tokens."""
    words = ["▁the", "▁quick", "fox", "▁", "s", "▁a", ".", "a", "b", "c", "▁fox", ","]
    tokens = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    raw = RawTokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([END])
    return _save(raw, folder)
