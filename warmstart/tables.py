"""Profiles and plans as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from warmstart.plan import Plan
from warmstart.profile import Profile, leaves

WIDTH = 60  # characters of a value in the plan's table


def arch(profile: Profile, validated_on: str | None = None) -> dict[str, Any]:
    """One row of the table of archs. `validated_on`: date of the device tests that validate the profile, if any did."""
    versions = profile.versions
    return {
        "arch": profile.arch,
        "lane": profile.lane,
        "rocm": versions.rocm,
        "torch": versions.torch,
        "vllm": versions.vllm,
        "aiter": "off" if profile.aiter.mode == "off" else f"{versions.aiter} ({profile.aiter.mode})",
        "budget_mb": profile.budget.unpacked_mb,
        "hardware_validated": profile.hardware_validated or bool(validated_on),
        "validated_on": validated_on or "",
        "summary": profile.summary,
    }


def archs(rows: Sequence[dict[str, Any]]) -> str:
    """The table of archs."""
    head = ["arch", "lane", "ROCm", "torch", "vLLM", "aiter", "hardware-validated", ""]
    keys = ["arch", "lane", "rocm", "torch", "vllm", "aiter", "hardware_validated", "summary"]
    told = [row | {"hardware_validated": f"yes, {on}"} if (on := row["validated_on"]) else row for row in rows]
    shown = [[_cell(row[k]) for k in keys] for row in told]
    return grid([head, *shown])


def plan(planned: Plan, origins: dict[str, str]) -> str:
    """The plan for people: what is built, of what, and which file set each value."""
    top = [
        ["plan", planned.plan_id[:12]],
        ["arch", f"{planned.arch} (lane {planned.lane}, lock {planned.state})"],
        ["cache key", planned.cache_key],
        ["tags", " ".join(planned.tags)],
        ["base", f"{planned.base.ref} ({len(planned.base.locked.packages)} packages)"],
        ["wheels", f"{len(planned.wheels)}, {_to_fetch(planned)} to fetch"],
        ["patches", ", ".join(f"{c}/{f}" for c, files in planned.patches.items() for f in files) or "none"],
        ["steps", " → ".join(planned.steps)],
    ]
    values = [[key, _short(value), origins.get(key, "default")] for key, value in leaves(planned.profile).items()]
    return f"{grid(top)}\n\n{grid(sorted(values))}"


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by spaces; the last one is left ragged."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _short(value: Any) -> str:
    """A value in one column; --json has it whole."""
    text = _cell(value)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return (
            " ".join(map(str, value)) if all(isinstance(v, str) for v in value) else msgspec.json.encode(value).decode()
        )
    return str(value)


def _to_fetch(planned: Plan) -> str:
    unknown = sum(not wheel.size for wheel in planned.wheels)
    known = f"{sum(wheel.size for wheel in planned.wheels) / 1e6:.0f} MB"
    return f"{known} and {unknown} of unknown size" if unknown else known
