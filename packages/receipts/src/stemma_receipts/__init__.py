"""Receipts: signed statements of what a server computed, which anybody with the model can check."""
