"""Anthropic's Messages API: chat in other words, with marks of what to keep in the cache."""
