"""The tiers below the device: host, disk, pool, and the one API over them."""
