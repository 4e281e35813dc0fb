"""Instruments of the data path: watches, explanations, metrics, the ledger of usage, tracing."""
