"""`bench-doctor`: whether the device's clock can be trusted, measured inside an image on this machine's GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from warmstart import container, engine, gpus, run, runline
from warmstart.engine import Capabilities
from warmstart.errors import ClockDoubtful, CommandFailed, NoDevice
from warmstart.names import HOME, PYTHON, START
from warmstart.run import Result
from warmstart.runline import Setting

TRUSTED, DOUBTFUL, NO_GPU = 0, 1, 3  # how caches/bench_doctor.py ends


def examine(caps: Capabilities, ref: str) -> dict[str, Any]:
    """What caches/bench_doctor.py of the image `ref` measured; empty with --dry-run.

    Raises ClockDoubtful when events can't be trusted, NoDevice without a GPU that the image can use, ImageMissing.
    """
    engine.inspect(caps, ref)
    used = gpus.read() if Path("/dev/kfd").exists() else ()
    words = ["podman", "run", "--rm", "--pull=never", "--network=none", *engine.LEAST]
    words += devices(container.setting(caps, ref, used))
    words += ["--env=WARMSTART_START=", f"--entrypoint={START}", ref]  # the entry point chooses the GPU
    words += [PYTHON, f"{HOME}/caches/bench_doctor.py", "--json"]
    done = run.run(words, env=engine.environment(caps), ok=(TRUSTED, DOUBTFUL, NO_GPU, 2, 64))
    return {} if run.recorder.on else read(done)


def read(done: Result) -> dict[str, Any]:
    """The measurements that a run printed. Raises ClockDoubtful, NoDevice, CommandFailed."""
    try:
        told: dict[str, Any] = json.loads(done.stdout)
        summary = told["summary"]
    except (ValueError, LookupError, TypeError):
        why = (done.stderr.strip().splitlines() or ["it printed no measurements"])[-1].removeprefix("warmstart: ")
        if done.code == 64:  # the entry point: none of the GPUs is of the image's arch
            raise NoDevice(why, hint="bench-doctor ARCH takes another image") from None
        raise CommandFailed(
            f"bench-doctor failed in the image: {why}", hint="an image of an older version is built anew by make image"
        ) from None
    if done.code == NO_GPU:
        hint = "make doctor says what keeps containers from the GPU; the cpu image has none to look at"
        raise NoDevice(summary, hint=hint)
    if done.code == DOUBTFUL:
        hint = "WARMSTART_HOOK_BENCH must not be 0 here, and verdicts from elsewhere are better than this machine's"
        raise ClockDoubtful(summary, hint=hint)
    return told


def devices(setting: Setting) -> list[str]:
    """podman's options for the GPUs and nothing else, as an engine's run line has them."""
    return [
        *(f"--device={node}" for node in setting.devices),
        *(f"--group-add={group}" for group in runline.groups(setting)),
        *(["--security-opt=label=disable"] if setting.devices and setting.selinux else []),
    ]
