"""GGUF files, llama.cpp's format: config, tokenizer and weights of a model in one file."""
