"""Servers that Stemma is measured against: how to start each in its best configuration."""
