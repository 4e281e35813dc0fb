"""Tiny GGUF files of each kind of vocabulary, texts that are hard to split, and llama.cpp's ids of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, trainers

from tests import gguf_files

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
FOREIGN = {
    "<｜begin▁of▁sentence｜>": CONTROL,
    "<｜User｜>": CONTROL,
    "<｜Assistant｜>": CONTROL,
    "<think>": USER_DEFINED,
    "<｜tool▁sep｜>": USER_DEFINED,
    "  ": USER_DEFINED,
    "<|eot_id|>": NORMAL,
    "ordinary▁": NORMAL,
}
"""Added tokens outside the characters that stand for bytes, and one with a wrong type, as files have them."""
TEXTS = (
    *("", "a", " a", "  a", "   a", "a ", "a  ", "a   b", " ", "  ", "    ", "\n", "\n\n", " \n ", "\t\tx"),
    *("The year 2024, and 3.14 of it.", "12345678", "it's I'LL we've", "def f(x):\n    return x\n"),
    *(
        "Grüße, 世界!",
        "こんにちは 🙂🚀",
        "👩‍🚀 e\u0301 ﷽",
        "naïve café",
        "\u00a0nbsp\u2003em",
        "a\u0000b",
        "\ufffd",
    ),
    *("<s>[INST] hi [/INST]", "<s> [INST]hi", "[INST]", "x<s>y", "<s>\n<s>", "</s> a</s>", "<unk>"),
    *(
        "<｜User｜>Hi<｜Assistant｜><think>\n",
        "a<｜begin▁of▁sentence｜>b",
        "<｜tool▁sep｜>x",
        "<|endoftext|>",
    ),
    *("<|eot_id|> <|im_end|>\n<|im_start|>user\n", "▁under▁score", "ordinary▁", "<0x0A>", "HELLO hello"),
    *(
        "hello hello world",
        "the  the   the",
        "a" * 100,
        " x" * 50,
        "!!!???...",
        "http://a.b/c?d=e&f",
        "\r\n\r\n",
    ),
)
_LEARNT = (
    "The year 2024, hello world, hello there. The quick brown fox jumps over the lazy dog: it's the end.",
    "def f(x):\n    return x\n",
    "the user hi [INST] and [/INST] Grüße, 世界 naïve café hello hello",
)
_SCRIPT = """
import json, sys, urllib.request, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = sys.argv[1], 256, 1, 0
params.warmup, params.verbosity, params.hostnames = False, 5, ["127.0.0.1"]
server = xllamacpp.Server(params)
for text in json.load(sys.stdin):
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    asked = urllib.request.Request(server.listening_address + "/tokenize", body)
    asked.add_header("Content-Type", "application/json")
    print("ids:", json.dumps(json.load(urllib.request.urlopen(asked))["tokens"]), flush=True)
"""


def llama_cpp(path: Path, texts: Sequence[str]) -> tuple[list[list[int]], set[int]]:
    """Return llama.cpp's ids of each text, and the tokens that end an answer."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(path)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stdout.splitlines()
    ends = done.stderr.partition("printing all EOG tokens:")[2].partition("special tokens cache")[0]
    return (
        [json.loads(line.removeprefix("ids:")) for line in lines if line.startswith("ids:")],
        {int(line.partition("  - ")[2].split()[0]) for line in ends.splitlines() if "  - " in line},
    )


def write(folder: Path, metadata: dict[str, Any], family: str = "llama") -> Path:
    """Write a file with a vocabulary, and random weights."""
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    return gguf_files.build(family, folder, metadata=metadata, vocab_size=vocab_size).path


def byte_level(pre: str, **fields: Any) -> dict[str, Any]:
    """Byte-level BPE with `FOREIGN` names, and none that GPT-2's own class would bring."""
    own = gguf_files.tokenizer_fields()
    tokens = [text.replace("endoftext", "end_of_text") for text in own["tokenizer.ggml.tokens"]]
    return own | {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *FOREIGN],
        "tokenizer.ggml.token_type": [*own["tokenizer.ggml.token_type"], *FOREIGN.values()],
        "tokenizer.ggml.bos_token_id": len(tokens),
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }


def sentencepiece(**fields: Any) -> dict[str, Any]:
    """A vocabulary as Llama 2's and Mistral's: scores, and bytes as tokens."""
    added = {"[INST]": CONTROL, "[/INST]": CONTROL, "<think>": USER_DEFINED, "<|im_end|>": NORMAL}
    added["<|endoftext|>"] = CONTROL
    pieces = _pieces()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *added]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[BYTE] * 256, *[NORMAL] * len(pieces), *added.values()],
        "tokenizer.ggml.scores": [*[0.0] * 259, *(-float(rank) for rank in range(len(pieces) + len(added)))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.padding_token_id": None,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }


@lru_cache(maxsize=1)
def _pieces() -> list[str]:
    """Return learnt pieces, the best first: merged ones as they were learnt, then characters."""
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.train_from_iterator(_LEARNT, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    ids = raw.get_vocab()
    made = [text for text in sorted(ids, key=ids.__getitem__) if len(text) > 1]
    return [*made, *(text for text in ids if len(text) == 1)]
