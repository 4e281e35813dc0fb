"""Eviction policies to compare with: on chats `hazard` beats them all (docs/explanation/eviction.md)."""
