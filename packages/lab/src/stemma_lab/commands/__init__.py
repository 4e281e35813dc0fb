"""The lab's commands of `stemma`, by name: where each is, and its help."""

from __future__ import annotations

COMMANDS = {
    "replay": (
        "stemma_lab.commands.replay:replay_command",
        "Replay a trace through the index and the eviction policies that serve requests.",
    ),
    "advise": (
        "stemma_lab.commands.advise:command",
        "Say what to change for this traffic: memory, tiers, policy, prompts, or the cache itself.",
    ),
    "lint": (
        "stemma_lab.commands.lint:command",
        "Say what prompts share, where they part, what that costs, and what to move; a budget for CI.",
    ),
    "plan": (
        "stemma_lab.commands.plan:command",
        "Predict hit ratio, time to first token and cost of tiers of given sizes for recorded traffic.",
    ),
    "order": (
        "stemma_lab.commands.order:command",
        "Replay a trace with a service-time model: hits and waiting by scheduling order.",
    ),
    "lab": (
        "stemma_lab.commands.lab:app",
        "Compare eviction policies on traces; run the router before simulated servers.",
    ),
    "pool": ("stemma_lab.commands.pool:app", "Blocks shared by machines."),
    "eval": (
        "stemma_lab.commands.evaluate:command",
        "Score a model: perplexity of a text, answers to MMLU's questions, computed anew and from the cache.",
    ),
    "bench": (
        "stemma_lab.commands.bench:command",
        "Measure a server: first token, tokens per second, and how much of the prompts came from its cache.",
    ),
}
