"""Adapters (LoRA): what they are, how they are read, and how a model's modules use them."""
