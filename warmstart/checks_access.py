"""The doctor on access: may this session use the device nodes, and why not."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from warmstart.findings import Check, Finding, Host, Unreadable, mode, needed, ok, skipped, status
from warmstart.host import number, text

GROUPS = ("render", "video")


class Session(msgspec.Struct, frozen=True):
    """Who this process is: its user, and the groups that it got when its session began."""

    user: int
    groups: frozenset[int]


def session(host: Host) -> Session:
    """From /proc/self/status. Raises Unreadable."""
    told = needed(host, "proc/self/status")
    user = re.search(r"^Uid:\s+\d+\s+(\d+)", told, re.MULTILINE)
    groups = re.search(r"^Groups:[ \t]*([\d \t]*)$", told, re.MULTILINE)
    if not user or not groups:
        raise Unreadable("/proc/self/status tells neither user nor groups")
    return Session(int(user[1]), frozenset(map(int, groups[1].split())))


def nodes(host: Host) -> Finding:
    """/dev/kfd and the render nodes of the image's GPUs: there, and open to this session."""
    if host.image.arch == "cpu":
        return skipped("the cpu image uses no device")
    wanted = [gpu for gpu in host.gpus if gpu.arch == host.image.arch] or list(host.gpus)
    who = session(host)
    paths = [Path("dev/kfd"), *(Path("dev/dri") / gpu.render for gpu in wanted)]
    found = {path: status(host.root / path) for path in paths}
    if lost := [f"/{path}" for path, node in found.items() if node is None]:
        remedy = "sudo modprobe amdgpu; in a virtual machine or a container the devices have to be passed in"
        return Finding("error", f"{', '.join(lost)} missing", remedy, "ls -l /dev/kfd /dev/dri")
    shut = {path: node for path, node in found.items() if not _open(host.root / path, node, who, live=_live(host))}
    if not shut:
        return ok(", ".join(f"/{path} {mode(node)}" for path, node in list(found.items())[:2]))
    path, node = next(iter(shut.items()))
    evidence = f"/{path} is {mode(node)}, group {_name(host, node.st_gid)}: closed to this session"
    return Finding("error", evidence, _opening(host, who, node.st_gid), f"test -w /{path} && echo open")


def groups(host: Host) -> Finding:
    """Membership in render and video: in this session, or only on file, which takes a new login."""
    if host.image.arch == "cpu":
        return skipped("the cpu image uses no device")
    who, known = session(host), _groups(host)
    if not known:
        raise Unreadable("/etc/group")
    if who.user == 0:
        return ok("root needs none")
    user = _user(host, who.user)
    there = [name for name in GROUPS if name in known]
    missing = [name for name in there if known[name][0] not in who.groups]
    if not missing:
        return ok(f"{user} is in {' and '.join(there)}")
    # render came with systemd 239; where the nodes are open anyway, check device-nodes says so.
    filed = [name for name in missing if user in known[name][1]]
    if filed == missing:
        evidence = f"{user} is in {', '.join(filed)} on file, but this session began before that"
        return Finding("warning", evidence, "log out and in again, or: newgrp render", "id -nG")
    evidence = f"{user} is not in {', '.join(name for name in missing if name not in filed)}"
    remedy = f"sudo usermod -aG {','.join(missing)} {user}, then log out and in again"
    return Finding("warning", evidence, remedy, "id -nG")


def _live(host: Host) -> bool:
    return host.root == Path("/")


def _open(path: Path, node: Any, who: Session, *, live: bool) -> bool:
    """Whether it can be read and written. Of this machine the kernel is asked, which also knows access lists."""
    if live:
        return os.access(path, os.R_OK | os.W_OK)
    if who.user == 0:
        return True
    shift = 6 if node.st_uid == who.user else 3 if node.st_gid in who.groups else 0
    return stat.S_IMODE(node.st_mode) >> shift & 6 == 6


def _opening(host: Host, who: Session, group: int) -> str:
    name, user = _name(host, group), _user(host, who.user)
    if user in _groups(host).get(name, (0, frozenset()))[1]:
        return f"log out and in again (this session began before {user} came into {name}), or: newgrp {name}"
    if name == "root":
        return (
            "sudo udevadm control --reload && sudo udevadm trigger; the distribution's udev rules set the group render"
        )
    return f"sudo usermod -aG {name} {user}, then log out and in again"


def _groups(host: Host) -> dict[str, tuple[int, frozenset[str]]]:
    """All groups of /etc/group: number and members. Empty when it can't be read."""
    found = {}
    for line in text(host.root / "etc/group").splitlines():
        name, _, own, members = (*line.split(":"), "", "", "", "")[:4]
        if (known := number(own)) is not None:
            found[name] = (known, frozenset(filter(None, members.split(","))))
    return found


def _name(host: Host, group: int) -> str:
    return next((name for name, (own, _) in _groups(host).items() if own == group), str(group))


def _user(host: Host, user: int) -> str:
    rows = (line.split(":") for line in text(host.root / "etc/passwd").splitlines())
    return next((row[0] for row in rows if row[2:3] == [str(user)]), str(user))


CHECKS: dict[str, Check] = {"device-nodes": nodes, "groups": groups}
