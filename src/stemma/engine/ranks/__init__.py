"""One engine on several ranks (tensor parallel): rank 0 schedules, all of them compute.

Rank 0 is the engine's own process, with scheduler, index and allocator. It starts the others as processes
(`leader.py`, `follower.py`). They get each step and each movement of blocks as a message, in the order in
which rank 0 makes them, so block ids mean the same everywhere; KV and lower tiers hold each rank's part.
"""
