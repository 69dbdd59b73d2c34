"""Makes one record of what the recorder wrote in a directory: `python record.py DIRECTORY [-o FILE]`.

The recorder (sitecustomize/warmstart_record.py) leaves a file for each process. A record is for one kind of GPU, one
Triton and one vLLM: anything else is refused. Same rows, same bytes, in whatever order processes wrote them. Standard
library only.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

SCHEMA = 2  # 1 told strings and types by the same word
SAME = ("target", "cu", "versions")  # what all files must agree about
SPEC = ("name", "signature", "constant_keys", "attrs_keys", "attrs_vals")  # the same for many variants of a kernel


class RecordError(Exception):
    """Why there is no record, in one line."""


def rows_of(folder: Path) -> "tuple[dict[str, Any], list[dict[str, Any]]]":
    """What all files hold for, and their rows; raises RecordError.

    The last line of a process that was killed may be torn; such lines are left out.
    """
    headers: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.glob("*.jsonl")):
        found = [
            row for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if (row := parsed(line))
        ]
        if not found or "target" not in found[0]:
            continue
        if headers:
            for name in SAME:
                if found[0].get(name) != headers[0].get(name):
                    raise RecordError(f"{name} differs: {text(headers[0].get(name))} and {text(found[0].get(name))}")
        headers.append(found[0])
        rows += found[1:]
    if not headers:
        raise RecordError(f"{folder} holds nothing that was recorded (WARMSTART_RECORD)")
    return min(headers, key=text), rows


def parsed(line: str) -> Any:
    """The object of a line; None for a torn one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def text(value: Any) -> str:
    """One value, one text. In its own order: keys of Triton hold settings in the order of their source."""
    return json.dumps(value, separators=(",", ":"))


def merged(header: "dict[str, Any]", rows: "list[dict[str, Any]]") -> "dict[str, Any]":
    """The record: kernels grouped by what their variants share, verdicts by their configurations."""
    kernels: dict[str, dict[str, Any]] = {}
    tuners: dict[str, dict[str, Any]] = {}
    left: dict[str, set[str]] = {}
    artefacts = set()
    for row in rows:
        if "kernel" in row:
            shared = {name: row["spec"].get(name) for name in SPEC}
            group = {"module": row["module"], "kernel": row["kernel"], "spec": shared}
            variant = [row["spec"]["constant_vals"], row["options"], row["hash"]]
            kernels.setdefault(text(group), {**group, "variants": {}})["variants"][text(variant[:2])] = variant
        elif "tuner" in row:
            group = {"module": row["module"], "tuner": row["tuner"], "configs": row["configs"]}
            found = tuners.setdefault(text(group), {**group, "verdicts": {}})["verdicts"]
            key = text(row["key"])
            found[key] = better(found[key], row) if key in found else row
        elif "artefact" in row:
            artefacts.add(row["artefact"])
        elif "left out" in row:
            left.setdefault(str(row.get("why")), set()).add(row["left out"])
    return {
        "schema": SCHEMA,
        **{name: header.get(name) for name in (*SAME, "properties")},
        "kernels": [
            {**group, "variants": [group["variants"][key] for key in sorted(group["variants"])]}
            for _, group in sorted(kernels.items())
        ],
        "verdicts": [
            {
                **group,
                "verdicts": [[row["key"], row["times"], row["winner"]] for _, row in sorted(group["verdicts"].items())],
            }
            for _, group in sorted(tuners.items())
        ],
        "left out": {
            "artefacts of Inductor": len(artefacts),
            **{why: sorted(names) for why, names in sorted(left.items())},
        },
    }


def better(one: "dict[str, Any]", other: "dict[str, Any]") -> "dict[str, Any]":
    """Two measurements of one verdict as one: the least time of each configuration."""
    pairs = zip(one["times"], other["times"], strict=True)
    times = [min((time for time in pair if time is not None), default=None) for pair in pairs]
    winner = one["winner"]
    if one["winner"] != other["winner"]:
        known = [time for time in times if time is not None]
        winner = times.index(min(known)) if known else 0
    return {**one, "times": times, "winner": winner}


def dumped(record: "dict[str, Any]") -> str:
    """A record as text, a line for each kernel and autotuner, so that its changes can be read."""
    lines = []
    for name, value in record.items():
        if name in ("kernels", "verdicts") and value:
            inner = ",\n".join(f"  {text(each)}" for each in value)
            lines.append(f" {text(name)}: [\n{inner}\n ]")
        else:
            lines.append(f" {text(name)}: {text(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: "list[str] | None" = None) -> int:
    """Write the record; 0, or 1 with one line on stderr."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("directory", type=Path)
    options.add_argument("-o", "--out", type=Path, help="else stdout")
    asked = options.parse_args(arguments)
    try:
        record = dumped(merged(*rows_of(asked.directory)))
    except (RecordError, OSError, KeyError, TypeError, ValueError) as problem:
        print(f"record: {problem if isinstance(problem, RecordError) else repr(problem)}", file=sys.stderr)
        return 1
    if asked.out:
        asked.out.write_text(record, encoding="utf-8")
    else:
        sys.stdout.write(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
