"""A turn: what a client asks for, made into one request for the engine, run, and watched."""
