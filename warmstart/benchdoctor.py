"""`bench-doctor`: whether the device's clock can be trusted, measured inside an image on this machine's GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warmstart import engine, run, runline
from warmstart.engine import Capabilities
from warmstart.errors import ClockDoubtful, CommandFailed, NoDevice
from warmstart.plan import HOME
from warmstart.run import Result

TRUSTED, DOUBTFUL, NO_GPU = 0, 1, 3  # how caches/bench_doctor.py ends


def examine(caps: Capabilities, ref: str) -> dict[str, Any]:
    """What caches/bench_doctor.py of the image `ref` measured; empty with --dry-run.

    Raises ClockDoubtful when events can't be trusted, NoDevice without a GPU that the image can use, ImageMissing.
    """
    engine.inspect(caps, ref)
    words = ["podman", "run", "--rm", "--pull=never", "--network=none", *engine.LEAST, *devices(caps)]
    words += ["--env=WARMSTART_START=", f"--entrypoint={HOME}/start", ref]  # the entry point chooses the GPU
    words += ["/opt/venv/bin/python", f"{HOME}/caches/bench_doctor.py", "--json"]
    done = run.run(words, env=engine.environment(caps), ok=(TRUSTED, DOUBTFUL, NO_GPU, 2, 64))
    return {} if run.recorder.on else read(done)


def read(done: Result) -> dict[str, Any]:
    """The measurements that a run printed. Raises ClockDoubtful, NoDevice, CommandFailed."""
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1].removeprefix("warmstart: ")
        if done.code == 64:  # the entry point: none of the GPUs is of the image's arch
            raise NoDevice(why, hint="bench-doctor ARCH takes another image") from None
        raise CommandFailed(
            f"bench-doctor failed in the image: {why}", hint="was it built before it had one?"
        ) from None
    if done.code == NO_GPU:
        hint = "make doctor says what keeps containers from the GPU; the cpu image has none to look at"
        raise NoDevice(told["verdict"], hint=hint)
    if done.code == DOUBTFUL:
        hint = "WARMSTART_HOOK_BENCH must not be 0 here, and verdicts from elsewhere are better than this machine's"
        raise ClockDoubtful(told["verdict"], hint=hint)
    return told


def devices(caps: Capabilities, root: Path = Path("/")) -> list[str]:
    """podman's options for the GPU and nothing else; none on a machine without the driver."""
    nodes = [node for node in (root / "dev/kfd", *sorted((root / "dev/dri").glob("renderD*"))) if node.exists()]
    if not (root / "dev/kfd").exists():
        return []
    names = [f"/{node.relative_to(root)}" for node in nodes]
    return [
        *(f"--device={name}" for name in names),
        *groups(caps, runline.owners(names, root)),
        *(["--security-opt=label=disable"] if runline.enforcing(root) else []),
    ]


def groups(caps: Capabilities, owners: Sequence[int]) -> list[str]:
    """By number, because the image's group file has other ones; a rootless podman can only keep the user's own."""
    if caps.rootless and Path(caps.runtime).name == "crun":
        return ["--group-add=keep-groups"]
    return [f"--group-add={number}" for number in owners]
