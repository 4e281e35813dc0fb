"""From tokens to text, and when a sequence ends."""
