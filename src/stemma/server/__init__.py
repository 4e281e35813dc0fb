"""HTTP planes over one engine."""
