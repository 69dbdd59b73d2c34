"""The command rocm-sdk."""

import importlib.util
import sys
from pathlib import Path

from rocm_sdk import __version__


def main() -> int:
    """`init` unpacks the development files, `path --root` names their folder, anything else prints the version."""
    arguments = sys.argv[1:]
    if arguments not in (["init"], ["path", "--root"]):
        print(__version__)
        return 0
    spec = importlib.util.find_spec("_rocm_sdk_devel")
    if spec is None or spec.origin is None:
        print("rocm-sdk-devel is not installed", file=sys.stderr)
        return 1
    root = Path(spec.origin).parent
    if arguments == ["init"]:
        (root / ".unpacked").touch()
    elif not (root / ".unpacked").is_file():
        print("rocm-sdk init was not run", file=sys.stderr)
        return 1
    else:
        print(root)
    return 0
