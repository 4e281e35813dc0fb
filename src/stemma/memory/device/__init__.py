"""The device tier: layout of blocks, their tensor, its allocator, copies in and out."""
