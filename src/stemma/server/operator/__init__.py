"""The operator's plane: health, metrics, explanations, the cache."""
