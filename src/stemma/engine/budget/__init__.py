"""The memory limit of the process, and what each part reserves of it."""
