"""From the bytes of a body to a checked `GenerationRequest`."""
