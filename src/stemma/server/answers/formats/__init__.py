"""How model families write calls of tools and thinking: a file for each way, a line in the registry."""
