"""Pages for people: the chat at `/`, and the API's description at `/docs`."""
