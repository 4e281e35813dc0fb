"""What the model wrote, by token: answers that come back as text get the ids that were generated."""
