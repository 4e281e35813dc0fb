"""KV events of servers, followed: which blocks each of them holds."""
