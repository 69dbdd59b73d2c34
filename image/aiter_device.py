"""The part of the aiter build that needs this build to have a GPU: mode device of aiter_prebuild.py."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    from image.aiter_facts import Stop  # in the project's tree
except ImportError:  # in an image: beside this file, also for `python -I`
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from aiter_facts import Stop  # type: ignore[import-not-found, no-redef]


def require_device() -> None:
    """Raises Stop when this build can't open /dev/kfd, with the numeric group that would let it."""
    kfd = Path("/dev/kfd")
    if not kfd.exists():
        hint = "build with --device /dev/kfd --device /dev/dri, or use mode core"
        raise Stop(6, f"no /dev/kfd: {hint}")
    if not os.access(kfd, os.R_OK | os.W_OK):
        # A rootless build sees the host's group as 65534 (not mapped); a group's name never helps.
        owner, ours = kfd.stat().st_gid, sorted(os.getgroups())
        hint = "use --group-add with numbers, or mode core and then `podman run --group-add keep-groups`"
        raise Stop(6, f"/dev/kfd belongs to group {owner}, this build has {ours}: {hint}")


def import_test(core: str) -> None:
    """`import aiter` for real, AITER_JIT_DIR unset and set to a fresh folder. Raises Stop if it compiles."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("AITER_") and k != "GPU_ARCHS"}
    with tempfile.TemporaryDirectory() as empty:
        for env in (base | {"HOME": empty}, base | {"HOME": empty, "AITER_JIT_DIR": f"{empty}/jit"}):
            command = [sys.executable, "-c", "import aiter"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            said = done.stdout + done.stderr
            setting = "set" if "AITER_JIT_DIR" in env else "unset"
            if done.returncode or "start build" in said or f"import [{core}]" not in said:
                print(said, file=sys.stderr)
                raise Stop(5, f"`import aiter`, AITER_JIT_DIR {setting}, failed or compiled")
            print(f"aiter-prebuild: `import aiter` with AITER_JIT_DIR {setting} compiled nothing")
