"""The router's commands of `stemma`, by name: where each is, and its help."""

from __future__ import annotations

COMMANDS = {
    "route": (
        "stemma_router.commands.route:command",
        "Send each request to the best of equal servers, or to a prefill and then to a decode server.",
    ),
    "cluster": ("stemma_router.commands.cluster:app", "Several engines of one model, started from one file."),
}
