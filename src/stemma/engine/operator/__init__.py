"""What an operator may do to a running engine."""
