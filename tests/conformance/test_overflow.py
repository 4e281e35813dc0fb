"""A prompt that is too long: clients that shorten it and try again must know the error for what it is."""

from __future__ import annotations

import pytest

LONG = [{"role": "user", "content": "word " * 9000}]


def test_litellm_raises_its_overflow_type(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for one
    litellm = pytest.importorskip("litellm")
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model="openai/tiny", messages=LONG, api_base=f"{url}/v1", api_key="none", num_retries=0
        )


def test_langchain_anthropic_raises_its_overflow_type(url: str) -> None:
    anthropic = pytest.importorskip("langchain_anthropic")
    from langchain_core.exceptions import ContextOverflowError
    from pydantic import SecretStr

    model = anthropic.ChatAnthropic(
        model_name="tiny", base_url=url, api_key=SecretStr("none"), max_retries=0, timeout=60, stop=None
    )
    with pytest.raises(ContextOverflowError):
        model.invoke(LONG)


def test_hugging_faces_client_takes_chat_answers(url: str) -> None:
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(base_url=url, api_key="none")
    answer = client.chat_completion([{"role": "user", "content": "hi"}], max_tokens=4)
    assert answer.system_fingerprint.startswith("stemma-")
