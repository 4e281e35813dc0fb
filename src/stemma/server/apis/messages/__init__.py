"""Anthropic's Messages API: chat in another format, with marks of what to keep in the cache."""
