"""Several servers as one: what each of them holds, and which of them gets a request."""
