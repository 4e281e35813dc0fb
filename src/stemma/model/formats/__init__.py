"""Checkpoint formats other than plain safetensors: files become tensors under transformers' names."""
