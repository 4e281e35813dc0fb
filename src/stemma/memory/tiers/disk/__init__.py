"""The disk tier: slab files, an index file, and a checksum over every block (docs/tiers.md)."""
