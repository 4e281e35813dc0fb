"""`PrefixCache`, the one facade that the engine sees: cached blocks, leases, records."""
