"""KV events between processes, in vLLM's format over ZMQ: who holds which blocks."""
