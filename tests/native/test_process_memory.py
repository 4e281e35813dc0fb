"""What the process holds, and giving back what it doesn't need."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from stemma.native import process_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SMAPS = """\
1000-3000 r--s 00000000 fe:00 51 /models/a name.safetensors
Size:                  8 kB
Anonymous:             0 kB
5000-7000 rw-p 00000000 fe:00 52 /models/written.safetensors
Anonymous:             4 kB
7000-9000 r--p 00000000 fe:00 53 /lib/other.so
Anonymous:             0 kB
9000-a000 rw-p 00000000 00:00 0
Anonymous:             0 kB
"""


PEAK = """
import numpy as np
from stemma.native import process_memory

process_memory.reset_peak()
before = process_memory.resident_bytes()
with process_memory.large_blocks_apart():
    data = np.ones(64 << 20, dtype=np.uint8)
del data
assert process_memory.peak_bytes() - before > 60 << 20
assert process_memory.resident_bytes() - before < 32 << 20
"""


def test_the_peak_remembers_what_was_given_back():
    """In a process of its own: in this one, threads of earlier tests take and give back memory meanwhile."""
    subprocess.run([sys.executable, "-c", PEAK], check=True, timeout=60)


def test_only_mappings_of_these_files_that_nobody_wrote_to_are_clean():
    files = {"/models/a name.safetensors", "/models/written.safetensors"}
    assert process_memory.clean_mappings(SMAPS, files) == {(0x1000, 0x3000, "/models/a name.safetensors")}


def test_pages_of_a_mapped_file_are_dropped_and_read_again(tmp_path: Path):
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"x" * (32 << 20))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped_files = process_memory.MappedFiles([file])
        assert mapped[::4096].count(b"x") == (32 << 20) // 4096
        before = process_memory.resident_bytes()
        mapped_files.drop_pages()
        assert before - process_memory.resident_bytes() > 28 << 20
        assert mapped[12345] == ord("x")
    mapped_files.drop_pages()  # unmapped by now: nothing to drop


def test_a_mapping_that_was_written_to_is_left_alone(tmp_path: Path):
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"x" * process_memory.LEAST_DROPPED_BYTES)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[0] = ord("y")
        process_memory.MappedFiles([file]).drop_pages()
        assert mapped[0] == ord("y")


def test_a_container_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(process_memory, "CGROUP", tmp_path)
    assert process_memory.available_bytes() > 1 << 20
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert process_memory.available_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert process_memory.available_bytes() > 1 << 20
