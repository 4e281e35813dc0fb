"""What was evicted lately."""

from __future__ import annotations

from stemma_lab.policies.ghosts import GhostQueue


def test_ghosts_are_the_latest() -> None:
    ghosts = GhostQueue()
    for fingerprint in (1, 2, 3, 1, 4):
        ghosts.remember(fingerprint, 3)
    assert [fingerprint in ghosts for fingerprint in (1, 2, 3, 4)] == [True, False, True, True]
    ghosts.recall(3)
    assert len(ghosts) == 2
    ghosts.remember(9, 0)
    assert len(ghosts) == 0
