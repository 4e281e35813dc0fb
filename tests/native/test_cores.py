"""How many threads can compute at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from stemma.native import cores


@pytest.mark.parametrize(
    ("content", "expected"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("nonsense\n", None), ("", None)],
)
def test_a_control_groups_quota(tmp_path: Path, content: str, expected: float | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(content)
    assert cores.quota_cores(file) == expected


def test_no_control_group(tmp_path: Path) -> None:
    assert cores.quota_cores(tmp_path / "missing") is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (8.0, 4), (2.0, 2), (1.5, 2), (0.2, 1)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(cores, "affinity_cores", lambda: 4)
    monkeypatch.setattr(cores, "quota_cores", lambda: quota)
    assert cores.usable_cores() == expected
