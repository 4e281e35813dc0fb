"""What the cache did and what it was worth, for people: the usage ledger and its prices."""
