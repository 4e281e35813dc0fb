"""Savings of the cache, for people: the usage ledger and its prices."""
