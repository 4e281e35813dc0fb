"""Quantized weights: what they are in memory, and how a model gets them."""
