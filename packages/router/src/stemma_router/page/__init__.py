"""The fleet's page."""
