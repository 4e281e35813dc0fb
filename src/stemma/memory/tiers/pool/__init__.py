"""The distributed tier: one store for the engine (`store.py`), and one file per backend behind it."""
