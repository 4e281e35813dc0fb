"""Trace replay and capacity planning on the very index and eviction code that serves."""
