"""Requests, scheduling, sampling, the step loop, and the offline LLM."""
