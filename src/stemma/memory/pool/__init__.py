"""The distributed tiers: contract, then one file per backend."""
