"""From text to token ids and back; chat templates in bounds."""
