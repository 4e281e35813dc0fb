"""MindIE's HTTP planes: its own inference, Triton's as it serves them, its management and its metrics."""
