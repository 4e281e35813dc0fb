"""What lies on disk, read without torch: directories, GGUF headers, the hub, and what config files say."""
