"""Print what takes the room in this file system, as JSON: bytes by component. Runs inside an image.

A component is a distribution's top folder in the virtual environment, a folder of the system, or our own files.
Hard links are counted once.
"""

import json
import os
import sys

SITE = "/opt/venv/lib"


def component(path: str) -> str:
    """Name under which a file is counted."""
    parts = path.split("/")
    if path.startswith(SITE) and "site-packages" in parts:
        at = parts.index("site-packages") + 1
        name = parts[at] if at < len(parts) - 1 else "(single modules)"
        return "venv: " + name.split("-")[0].removesuffix(".libs").removesuffix(".dist")
    if path.startswith("/opt/"):
        return "/".join(parts[:3])
    return "/".join(parts[: 4 if parts[1] == "usr" else 2])


def sizes(top: str) -> dict[str, int]:
    """Bytes by component of all files on the root file system."""
    total: dict[str, int] = {}
    seen = set()
    device = os.stat(top).st_dev
    for folder, folders, files in os.walk(top):
        folders[:] = [f for f in folders if os.lstat(os.path.join(folder, f)).st_dev == device]
        for file in files:
            path = os.path.join(folder, file)
            status = os.lstat(path)
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                name = component(path)
                total[name] = total.get(name, 0) + status.st_size
    return total


if __name__ == "__main__":
    print(json.dumps(sizes(sys.argv[1] if len(sys.argv) > 1 else "/")))
