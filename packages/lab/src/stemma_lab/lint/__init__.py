"""What a set of prompts would reuse of each other, and what in them keeps it from more."""
