"""The operator's plane: health, metrics, explanations, the cache, MindIE's management."""
