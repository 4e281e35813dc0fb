"""The picture of `docs/project/benchmarks.md`: ratios of one `benchmarks.versus --json FILE` run as an SVG.

``python -m benchmarks.picture FILE docs/project/benchmarks.svg``

One bar a workload, Stemma's time over the peer's on a logarithmic axis, so that twice as fast and half as
fast are equally far from the line of 1.
"""

from __future__ import annotations

import math
import statistics
import sys
from html import escape
from pathlib import Path
from typing import Any

import orjson

from benchmarks.workloads import all_probes

WIDTH, ROW, LEFT, RIGHT, TOP = 860, 24, 300, 70, 46
LOWEST, HIGHEST = 0.05, 4.0
BETTER, WORSE = "#2f7d5b", "#b4552d"


def ratios(results: dict[str, Any], peer: str) -> list[tuple[str, float]]:
    """Return (title, time ratio Stemma / peer) of what both were measured on; rates are turned round."""
    servers = results["servers"]
    own, other = servers["stemma"], servers[peer]
    found = []
    for probe in all_probes():
        if probe.name in own["probes"] and probe.name in other["probes"]:
            rounds = zip(own["probes"][probe.name], other["probes"][probe.name], strict=False)
            ratio = statistics.median(a["value"] / b["value"] for a, b in rounds)
            found.append((probe.title, 1 / ratio if probe.unit.endswith("/s") else ratio))
    found.append(("start-up", own["start_s"][0] / other["start_s"][0]))
    return found


def draw(rows: list[tuple[str, float]], peer: str) -> str:
    """Return the SVG."""
    height = TOP + ROW * len(rows) + 40

    def x_of(ratio: float) -> float:
        share = math.log(min(max(ratio, LOWEST), HIGHEST) / LOWEST) / math.log(HIGHEST / LOWEST)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    one = x_of(1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">Time of Stemma / time of {escape(peer)}'
        " (left of the line: Stemma is faster)</text>",
    ]
    for tick in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0):
        x = x_of(tick)
        color = "#444444" if tick == 1.0 else "#dddddd"
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 30}" stroke="{color}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 12}" text-anchor="middle">{tick:g}</text>')
    for index, (title, ratio) in enumerate(rows):
        y, x = TOP + ROW * index, x_of(ratio)
        begin, end = min(x, one), max(x, one)
        color = BETTER if ratio <= 1 else WORSE
        parts.append(f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(title)}</text>')
        parts.append(
            f'<rect x="{begin:.1f}" y="{y + 3}" width="{max(1.0, end - begin):.1f}" height="{ROW - 8}" '
            f'fill="{color}"/>'
        )
        anchor, at = ("end", begin - 5) if ratio <= 1 else ("start", end + 5)
        parts.append(f'<text x="{at:.1f}" y="{y + 15}" text-anchor="{anchor}">{ratio:.2f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    peer = sys.argv[3] if len(sys.argv) > 3 else "vllm"
    target.write_text(draw(ratios(orjson.loads(source.read_bytes()), peer), peer), encoding="utf-8")


if __name__ == "__main__":
    main()
