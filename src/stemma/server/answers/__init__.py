"""What a model's answer means: reasoning, content and tool calls, read from its text as it streams."""
