"""What is known of a model that is opened: its description, its abilities, its logits, its self-check."""
