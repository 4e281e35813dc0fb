"""Frozen settings, one model per component; TOML, environment and flags map to the same."""
