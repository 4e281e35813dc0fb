"""MindIE's ``config.json``: its keys, ranges and defaults, and what each becomes among our settings."""
