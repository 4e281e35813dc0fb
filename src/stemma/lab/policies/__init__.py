"""Eviction policies that `hazard` beats on every trace: to compare with, not to serve with."""
