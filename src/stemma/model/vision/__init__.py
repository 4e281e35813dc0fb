"""Images in prompts: from bytes to what the language model reads in place of placeholder tokens."""
