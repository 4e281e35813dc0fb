"""Trace replay and capacity planning with the same index and eviction code as the server."""
