"""OpenAI's Responses API: chat in other words, with conversations that the server remembers."""
