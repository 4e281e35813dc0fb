"""Which tokens are computed: prefix indexes, block keys, eviction policies. No torch, no I/O."""
