"""The disk tier: slab files, an index file, and a checksum for every block (docs/how-to/tiers.md)."""
