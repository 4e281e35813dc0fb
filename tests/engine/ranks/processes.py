"""The processes that ranks run in, found by their parent."""

from __future__ import annotations

from pathlib import Path


def rank_processes(parent: int) -> list[int]:
    """Return the ids of the rank processes that `parent` started and that run, in order of ranks."""
    tasks = Path(f"/proc/{parent}/task").iterdir()
    children = [child.decode() for task in tasks for child in _read(task / "children").split()]
    ranks = [c for c in children if b"stemma.engine.ranks.follower" in _read(Path(f"/proc/{c}/cmdline"))]
    return sorted(map(int, ranks))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the thread or process has ended
        return b""
