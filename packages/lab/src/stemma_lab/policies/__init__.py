"""Eviction policies to compare with: on recorded chats `hazard` beats them all (docs/eviction.md)."""
