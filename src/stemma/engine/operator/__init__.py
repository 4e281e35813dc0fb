"""The operator's commands to a running engine."""
