"""Other engines behind our tiers: they compute, and Stemma keeps their blocks on host, disk and pool."""
