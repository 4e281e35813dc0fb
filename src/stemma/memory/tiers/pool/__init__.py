"""The distributed tier: one store for the engine (`pool_store.py`), and one file per backend behind it."""
