"""From a command to the first answer: `python -m benchmarks.startup [--beside SRC]`.

Starts `stemma serve` on the 0.5B shape (bf16, `--quantize int8`, Q8_0 and Q4_0 GGUF files) and on the demo's
model, and takes the seconds until `/health` answers 200, and processor time and peak memory of the process by
then.
With `--beside SRC`, the `src` folder of another checkout, both versions take turns. Files are in the page
cache, Python's bytecode is written and the kernels are compiled: a start of each version that isn't counted
sees to that. Run it on a quiet machine: threads that wait for each other on busy cores make a start several
times longer.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import stemma
from benchmarks.peers.servers import POLL_S, answers_ok, free_port

OWN = Path(stemma.__file__).parents[1]
_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--beside", type=Path, help="src folder of another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="comma list of rows: " + ", ".join(_ROWS))
    parser.add_argument("--flags", default="", help="more flags for `stemma serve`")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a server that it started ends with it
    versions = {"here": OWN} | ({} if asked.beside is None else {"beside": asked.beside.resolve()})
    names = asked.only.split(",") if asked.only else list(_ROWS)
    console = Console(width=120)
    table = Table(title="seconds until ready, median (least); processor seconds, least; peak MB")
    for column in ("start", *versions, *(f"{name}, {unit}" for unit in ("CPU s", "MB") for name in versions)):
        table.add_column(column)
    for name in names:
        model, *flags = _ROWS[name]()
        flags += asked.flags.split()
        seconds: dict[str, list[float]] = {version: [] for version in versions}
        busy: dict[str, list[float]] = {version: [] for version in versions}
        peaks: dict[str, int] = {}
        for number in range(asked.rounds + 1):
            for version, source in versions.items():
                took, worked, peaks[version] = measure(source, model, flags)
                if number:  # the first one warms caches
                    seconds[version].append(took)
                    busy[version].append(worked)
        shown = (f"{statistics.median(found):.2f} ({min(found):.2f})" for found in seconds.values())
        worked_shown = (f"{min(found):.2f}" for found in busy.values())
        table.add_row(name, *shown, *worked_shown, *(str(peak // 1_000_000) for peak in peaks.values()))
        console.print(f"{name}: {seconds}", highlight=False)
    console.print(table)


def measure(source: Path, model: str, flags: Sequence[str]) -> tuple[float, float, int]:
    """Start a server of the version in `source`; return seconds, processor seconds, peak bytes."""
    port = free_port()
    command = [sys.executable, "-m", "stemma", "serve", model, "--port", str(port), *flags]
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not answers_ok(port, "/health"):
            if process.poll() is not None or time.perf_counter() - began > _TIMEOUT_S:
                raise RuntimeError(f"{' '.join(command)} (of {source}) was never ready")
            time.sleep(POLL_S)
        took = time.perf_counter() - began
        return took, _processor_s(process.pid), _peak_bytes(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _processor_s(pid: int) -> float:
    """Return the time of all its threads, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _half_billion() -> str:
    from benchmarks.checkpoint import half_billion_checkpoint

    return str(half_billion_checkpoint())


def _gguf(kind: str) -> str:
    from benchmarks.peers.gguf import convert

    checkpoint = Path(_half_billion())
    target = checkpoint.with_name(f"{checkpoint.name}-{kind}.gguf")
    if not target.exists():
        convert(checkpoint, target, kind)
    return str(target)


_ROWS = {
    "bf16": lambda: [_half_billion()],
    "int8": lambda: [_half_billion(), "--quantize", "int8"],
    "Q8_0": lambda: [_gguf("Q8_0")],
    "Q4_0": lambda: [_gguf("Q4_0")],
    "demo": lambda: ["demo"],
}

if __name__ == "__main__":
    main()
