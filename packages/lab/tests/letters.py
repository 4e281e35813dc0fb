"""A tokenizer of letters, for traces of messages."""

from __future__ import annotations

import numpy as np

from stemma_lab.traces.openai_chat import ChatTokenizer


class LetterTokenizer(ChatTokenizer):
    """One token a letter."""

    def apply_chat_template(self, messages, *, tools=None):
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
