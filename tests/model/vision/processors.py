"""transformers' own processors, without the parts for video, which need torchvision."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor


class _SmolVLM(SmolVLMProcessor):
    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.fake_image_token, self.image_token = "<fake_token_around_image>", "<image>"
        self.global_image_token, self.video_token = "<global-img>", "<video>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.image_seq_len = 16
        self.video_processor = SimpleNamespace(num_frames=1, fps=1)
        self.chat_template = tokenizer.chat_template


class _Gemma3(Gemma3Processor):
    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.image_seq_length = 16
        self.boi_token = self.image_token = "<start_of_image>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.boi_token)
        tokenizer.image_token = "<image_soft_token>"
        tokenizer.image_token_id = tokenizer.convert_tokens_to_ids(tokenizer.image_token)
        self.full_image_sequence = (
            f"\n\n{self.boi_token}{tokenizer.image_token * self.image_seq_length}<end_of_image>\n\n"
        )
        self.chat_template = tokenizer.chat_template


class _Qwen(Qwen2_5_VLProcessor):
    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        self.chat_template = tokenizer.chat_template


def processor_of(family: str, path: Path) -> Any:
    """Return the processor of the checkpoint in `path`."""
    images: Any = AutoImageProcessor.from_pretrained(str(path), backend="pil")
    made = {"smolvlm": _SmolVLM, "gemma3": _Gemma3}.get(family, _Qwen)
    return made(images, AutoTokenizer.from_pretrained(str(path)))
