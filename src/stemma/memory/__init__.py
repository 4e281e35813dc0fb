"""Where the bytes are: layout, allocator, tiers, transfers, and the PrefixCache facade."""
