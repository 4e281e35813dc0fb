"""Parts of a model's answer: reasoning, content and tool calls, read from its text as it streams."""
