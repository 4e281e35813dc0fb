"""A proxy in front of several servers: which of them gets a request."""
