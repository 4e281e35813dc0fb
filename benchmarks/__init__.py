"""Each module prints its ratio against a limit or a peer, measured in one run."""
