"""Exact history: answers that come back as text get the ids that were generated."""
