"""Families of models: what is known of each, a file a family."""
