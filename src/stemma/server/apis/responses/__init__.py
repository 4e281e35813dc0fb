"""OpenAI's Responses API: chat in another format, with conversations stored on the server."""
