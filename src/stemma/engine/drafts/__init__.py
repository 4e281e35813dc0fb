"""Speculative decoding: where guesses of the next tokens come from, and how many are worth verifying."""
