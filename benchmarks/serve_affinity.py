"""Ray Serve's own `PrefixCacheAffinityRouter`, told where our calls hold the prompt (`replicas.py`).

`ray.serve.llm.request_router` can't be imported without vLLM or SGLang, so the class comes from the private
module behind it, which needs pyarrow.
"""

from __future__ import annotations

import json
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)


class Affinity(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """The same router; prompts are read from a `RoutedCall`."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        content = pending_request.args[0].call.content
        return str(json.loads(content).get("prompt", "")) if content else "-"
