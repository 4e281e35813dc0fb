"""Questions to a GPU that is at hand for minutes: `benchmarks/device/run` asks the next ones at once."""
