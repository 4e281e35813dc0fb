"""A Hugging Face checkpoint -> logits over paged KV."""
