"""Print name → versions of all installed distributions. The names are normalised."""

import importlib.metadata
import json
import re

found: dict[str, list[str]] = {}
for d in importlib.metadata.distributions():
    found.setdefault(re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(), []).append(d.version)
print(json.dumps(found))
