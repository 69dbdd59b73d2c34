"""What of Triton's cache is whole, and may be used. What can't be read is not whole; nothing here raises OSError."""

import importlib
import inspect
import os
from typing import Any

from warmstart_files import opened, read_json  # type: ignore[import-not-found] # beside this file

INDEX = "__grp__"
CODE = (".hsaco", ".cubin")
ELF = b"\x7fELF\x02\x01"  # 64 bit, little endian: device code and the launchers' libraries


def whole_group(folder: str, filename: str) -> "dict[str, str] | None":
    """Name → path of the files that an index names, wherever the folder was made; None unless all needed are whole.

    Intermediate forms may be left out: seeds have none, and only Triton's own debugging reads them.
    """
    index = read_json(os.path.join(folder, f"{INDEX}{filename}"))
    names = index.get("child_paths") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not any(name.endswith(CODE) for name in names):
        return None
    every = {name: os.path.join(folder, os.path.basename(name)) for name in names}
    group = {name: path for name, path in every.items() if is_whole(path)}
    if filename not in group or any(name.endswith(CODE) and name not in group for name in names):
        return None
    metadata = read_json(group[filename])
    return group if isinstance(metadata, dict) and isinstance(metadata.get("target"), dict) else None


def is_whole(path: str) -> bool:
    """Whether a file is there and, as far as its kind tells, all of it."""
    try:
        with opened(path) as file:
            head, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if path.endswith(".json"):
        return isinstance(read_json(path), dict)
    if head.startswith(ELF) and len(head) == 64:
        # Linkers put the table of sections last: where it begins, the size and number of its rows.
        table = int.from_bytes(head[40:48], "little")
        return size >= table + int.from_bytes(head[58:60], "little") * int.from_bytes(head[60:62], "little")
    return size > 0 and not path.endswith((*CODE, ".so"))


def is_verdict(path: str) -> bool:
    """Whether this file holds timings of configurations that this Triton can make."""
    found = read_json(path)
    timings = found.get("configs_timings") if isinstance(found, dict) else None
    if not isinstance(timings, list) or not timings:
        return False
    config = importlib.import_module("triton.runtime.autotuner").Config
    fields = inspect.signature(config.__init__).parameters.keys()
    return all(
        isinstance(row, list)
        and len(row) == 2
        and isinstance(row[0], dict)
        and isinstance(row[0].get("kwargs"), dict)
        and row[0].keys() <= fields
        and is_time(row[1])
        for row in timings
    ) and comparable([row[1] for row in timings])


def is_time(value: Any) -> bool:
    """Whether it is a measured time, or several."""
    times = value if isinstance(value, list) and value else [value]
    return all(isinstance(time, (int, float)) and not isinstance(time, bool) and time == time for time in times)


def comparable(values: "list[Any]") -> bool:
    """Whether the least of them can be taken: all are numbers, or all are lists."""
    return len({isinstance(value, list) for value in values}) == 1
