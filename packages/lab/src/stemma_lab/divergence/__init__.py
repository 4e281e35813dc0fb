"""Where prompts part from cached ones, and what it would save to move the value that stands there."""
