"""Verdicts of a record, for replay.py: how Triton's autotuner is told them, and where they lie in a seed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def storing(tuner: Any, key: Any, rows: "list[tuple[Any, Any, bool]]") -> "Callable[[], None]":
    """What Triton calls to measure: gives the recorded times."""

    def bench() -> None:
        # Times are rounded: the winner stays the winner among equals.
        least = min(time for _, time, _ in rows if time is not None)
        timings = {
            config: [float("inf")] if time is None else [min(time, least * (1 - 1e-9)) if won else time]
            for config, time, won in rows
        }
        tuner.cache[key] = min(timings, key=lambda config: timings[config])
        tuner.configs_timings = timings

    return bench


def flat(settings: "dict[str, Any]") -> "dict[str, Any]":
    """A configuration's settings, those of the kernel and those of the compiler, in one table."""
    return {**settings.get("kwargs", {}), **{name: value for name, value in settings.items() if name != "kwargs"}}


def tupled(value: Any) -> Any:
    """Lists as tuples, as Triton has its keys."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def sort(out: Path, cu: int) -> None:
    """Move verdicts from Triton's cache to where those of this number of compute units lie."""
    for file in sorted((out / "triton").glob("*/*.autotune.json")):
        place = out / "verdicts" / f"cu{cu}" / file.parent.name
        place.mkdir(parents=True, exist_ok=True)
        file.rename(place / file.name)
        if not any(file.parent.iterdir()):
            file.parent.rmdir()
