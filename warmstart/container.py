"""The container of an engine: started, looked at, stopped and removed by plain podman calls."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from warmstart import gpus, lease, presets, processes, run, runline
from warmstart.engine import Capabilities, environment
from warmstart.gpus import Gpu
from warmstart.runline import Setting

DEAD = ("exited", "stopped", "created", "configured", "removing", "dead")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine knows of a container."""

    id: str
    status: str  # running, exited, …
    pid: int  # of its first process; 0 when it doesn't run
    code: int  # exit code of one that ended
    oom: bool  # killed for want of memory, as far as the engine saw it
    started: float  # seconds since 1970
    log: str  # the file with its output
    cache: str  # this machine's folder of the cache volume; empty without one


def options(preset: str, log: Path) -> list[str]:
    """What `up` puts before the run line: the container's name, and where its output goes.

    The k8s-file driver stamps each line, and `log` stays when the container is removed.
    """
    return ["--detach", f"--name={lease.container_name(preset)}", "--log-driver=k8s-file", f"--log-opt=path={log}"]


def setting(caps: Capabilities, image: str, used: Sequence[Gpu]) -> Setting:
    """What the run line depends on here, besides the preset."""
    nodes = ("/dev/kfd", *(f"/dev/dri/{gpu.render}" for gpu in used)) if used else ()
    chosen = runline.choose([(gpu.index, gpu.unique_id) for gpu in used], len(gpus.read())) if used else ("", "")
    return Setting(
        image=image,
        models=presets.models_folder(),
        devices=nodes,
        visible=chosen,
        groups=runline.owners(nodes),
        rootless=caps.rootless,
        keep_groups=Path(caps.runtime).name == "crun",
        uid=os.getuid(),
        gid=os.getgid(),
        selinux=runline.enforcing(),
        init=runline.has_init(run.environment()["PATH"]),
        network=caps.network,
    )


def start(caps: Capabilities, words: Sequence[str], secrets: Mapping[str, str]) -> str:
    """Run the whole command `words` (podman run --detach …); returns the container's id.

    `secrets` are variables that the command names without a value, so that none shows up in a process list or a log.
    Raises CommandFailed.
    """
    return run.run(words, env={**secrets, **environment(caps)}).stdout.strip()


def look(caps: Capabilities, container: str) -> Seen | None:
    """What the engine knows of a container, by name or id; None when there is none."""
    told = run.run(["podman", "container", "inspect", container], env=environment(caps), ok=(0, 1, 125), always=True)
    if told.code:
        return None
    found = json.loads(told.stdout)[0]
    state = found["State"]
    mounts = {mount.get("Destination"): mount.get("Source", "") for mount in found.get("Mounts") or ()}
    return Seen(
        id=found["Id"],
        status=state["Status"],
        pid=state["Pid"] if state["Status"] not in DEAD else 0,
        code=state["ExitCode"],
        oom=bool(state.get("OOMKilled")),
        started=seconds(state["StartedAt"]),
        log=((found.get("HostConfig") or {}).get("LogConfig") or {}).get("Path", ""),
        cache=mounts.get("/cache", ""),
    )


def stop(caps: Capabilities, container: str, grace: int) -> None:
    """SIGINT, then SIGKILL after `grace` seconds. A container that is not there, or not running, is no mistake."""
    run.run(["podman", "stop", "--ignore", "--time", str(grace), container], env=environment(caps), ok=(0, 1, 125))


def remove(caps: Capabilities, container: str) -> None:
    """Remove a container, killing what still runs in it. One that is not there is no mistake."""
    run.run(["podman", "rm", "--force", "--ignore", "--time", "0", container], env=environment(caps), ok=(0, 1, 125))


def began(seen: Seen, root: Path = Path("/")) -> tuple[int, int]:
    """Pid and time of begin of a container's first process; zeros when it doesn't run."""
    time = processes.began(seen.pid, root)  # 0 when it died since
    return (seen.pid, time) if time else (0, 0)


def seconds(stamp: str) -> float:
    """Go's RFC 3339 as seconds since 1970; the year 1 (never started) is 0."""
    if stamp.startswith("0001-"):
        return 0.0
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
