"""The start-up kit's goals and what a run reached, as JSON, and as a chart of the starts (SVG)."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any

Parts = dict[str, dict[str, Any]]
# goal → (part, what it is divided by, most that the ratio may be)
RATIOS = {
    "first call, compiled in parallel, of stock": ("first-parallel", "first-stock", 0.25),
    "first call with a seed, of stock": ("first-seeded", "first-stock", 1 / 60),
    "vLLM's first start, no seed, of stock's first": ("vllm-first", "vllm-stock-first", 0.45),
    "vLLM's first start with kernels and verdicts, of stock's first": ("vllm-kernels", "vllm-stock-first", 0.40),
    "vLLM's first start after an update of the image, of a first start": ("vllm-ahead", "vllm-first", 1.0),
    "vLLM's first start with a full seed, of a warm start": ("vllm-seeded", "vllm-warm", 1.1),
    "vLLM's warm start, of stock's warm start": ("vllm-warm", "vllm-stock-warm", 0.7),
}
SIZES = {"under 100 µs": (0.1, 0.2), "under 1 ms": (1.0, 0.5), "longer": (float("inf"), 1.1)}  # ms below, most of stock
LOOPS = ("stock", "snippet", "ours")


def write(out: Path) -> dict[str, Any]:
    """Summary of the parts in a folder; leaves summary.json and chart.svg there."""
    parts: Parts = {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}
    parts.pop("summary", None)
    goals = {name: judged(value, most) for name, (value, most) in reached(parts).items()}
    told: dict[str, Any] = {
        "machine": next((p["machine"] for p in parts.values() if "machine" in p), None),
        "goals": goals,
        "first call": {
            part: {k: v for k, v in row.items() if k in ("seconds", "launches", "in do_bench", "compilations")}
            for part, row in parts.items()
            if part.startswith("first-")
        },
        "vLLM": {part: row for part, row in parts.items() if part.startswith("vllm-")},
    }
    (out / "summary.json").write_text(json.dumps(told, indent=1, ensure_ascii=False), encoding="utf-8")
    (out / "chart.svg").write_text(chart(parts, told["machine"]), encoding="utf-8")
    return told


def judged(value: float, most: float) -> dict[str, Any]:
    return {"reached": round(value, 4), "goal": round(most, 4), "met": value <= most}


def reached(parts: Parts) -> dict[str, tuple[float, float]]:
    """Goal → figure, and the most that it may be."""
    found = {
        name: (least(parts, part) / least(parts, base), most)
        for name, (part, base, most) in RATIOS.items()
        if part in parts and base in parts
    }
    if "first-seeded" in parts:
        found["compilations of a first call with a seed"] = (parts["first-seeded"]["compilations"], 0)
    for part in ("vllm-warm-2", "vllm-seeded"):
        if part in parts:
            late = [name for row in parts[part]["starts"] for name in row["compiled late"]]
            found[f"kernels compiled while serving, {part}"] = (len(late), 0)
    return found | ranked(parts.get("ranking", {}).get("cases", {}))


def seconds(part: dict[str, Any]) -> float:
    """Of a part: its own, or those of its start."""
    return float(part["starts"][0]["seconds"] if "starts" in part else part["seconds"])


def least(parts: Parts, name: str) -> float:
    """Seconds of a part; warm starts, which are short, are there twice, and the shorter counts on either side."""
    return min(seconds(parts[part]) for part in (name, f"{name}-2") if part in parts)


def ranked(cases: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Mean regret beside stock's, and the cost of benching by how long a kernel takes."""
    if not cases:
        return {}
    mean = {loop: statistics.mean(statistics.mean(row[loop]["regret %"]) for row in cases.values()) for loop in LOOPS}
    found = {"mean regret above stock's, points": (mean["ours"] - mean["stock"], 0.5)}
    cost: defaultdict[str, list[float]] = defaultdict(list)
    for row in cases.values():
        size = next(name for name, (below, _) in SIZES.items() if row["best ms"] < below)
        cost[size].append(row["ours"]["ms"] / row["stock"]["ms"])
    for size, values in cost.items():
        found[f"benching a configuration {size}, of stock, worst case"] = (max(values), SIZES[size][1])
    return found


def chart(parts: Parts, machine: dict[str, Any] | None) -> str:
    """Bars for the seconds of all first calls and starts, as SVG."""
    rows = [(name, seconds(part)) for name, part in parts.items() if "seconds" in part or "starts" in part]
    longest = max((value for _, value in rows), default=1.0)
    title = f"Seconds; {(machine or {}).get('gpu', 'no GPU')}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{30 + 24 * len(rows)}" '
        'font-family="sans-serif" font-size="13">',
        f'<text x="8" y="18">{escape(title)}</text>',
    ]
    for place, (name, value) in enumerate(rows):
        top = 30 + 24 * place
        lines += [
            f'<text x="8" y="{top + 14}">{escape(name)}</text>',
            f'<rect x="180" y="{top}" width="{max(1, round(480 * value / longest))}" height="18" fill="#c33"/>',
            f'<text x="{190 + round(480 * value / longest)}" y="{top + 14}">{value:.1f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
