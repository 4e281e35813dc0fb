"""Eviction policies, one per file; `policy.py` is their contract, `registry.py` knows them by name."""
