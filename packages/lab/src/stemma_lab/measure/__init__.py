"""Measuring a server: workloads, who sends them, what came back. `stemma bench` is its command."""
