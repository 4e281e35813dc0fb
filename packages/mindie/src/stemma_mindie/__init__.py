"""Stemma as MindIE's users know it: its `config.json` and its start command."""
