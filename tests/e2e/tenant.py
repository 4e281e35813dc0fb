"""A tenant of a server: its key, its connection and its prompts."""

from __future__ import annotations

import random
import time

import httpx

NUM_PROMPT_TOKENS = 1024


class Tenant:
    """A client with a key and a connection."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds to the first token, which is the only one, and how many tokens were cached."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        response = self.http.post("/v1/completions", json=body)
        took_s = time.perf_counter() - began
        assert response.status_code == 200, response.text
        return took_s, response.json()["usage"]["prompt_cache_hit_tokens"]


def random_prompt(rng: random.Random, num_tokens: int = NUM_PROMPT_TOKENS) -> list[int]:
    return [rng.randrange(10, 200) for _ in range(num_tokens)]
