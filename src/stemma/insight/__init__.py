"""What the cache saved, for people: the usage ledger and its prices."""
