"""Request bodies of each API, as pydantic models: types are strict, unknown fields are ignored."""
