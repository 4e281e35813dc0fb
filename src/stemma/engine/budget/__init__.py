"""What the process may take of memory, and what each part reserves."""
