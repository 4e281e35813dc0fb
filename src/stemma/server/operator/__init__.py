"""What operators see and do: health, metrics, explanations, the cache, MindIE's management."""
