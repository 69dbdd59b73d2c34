#!/usr/bin/env python3
"""Proof of warmth: serve a model, stop, serve it again, and find nothing compiled, tuned or stored the second time.

    warm.py [--second] [--record DIR] [--limit SECONDS] -- MODEL [flags of vllm serve]

Runs inside an image, with the caches that are mounted there. --second: the first start was made before, on the same
volume with the same flags. Prints one JSON object on stdout. Ends with 0: warm, 1: not warm, 2: wrong use, 3: a server
did not start, 130: interrupted. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HOME = HERE.parent  # /opt/warmstart
EXIT_COLD, EXIT_NO_SERVER, EXIT_INTERRUPTED = 1, 3, 130
STOP_LIMIT = 60.0  # seconds for a server to end after SIGINT
TAIL = 3000  # characters of a log that are shown of a server that does not start
CAUSE = re.compile(r"^.*?\b(\w+(?:Error|Exception): .{1,300})$", re.MULTILINE)  # the first stands far above the end
PROMPTS = ("A kernel that is compiled once", "The first start builds what the second only reads. " * 8)

# vLLM's own words, the same from 0.24 to 0.33.
JIT = "Triton kernel JIT compilation during inference"
AOT_SAVED, AOT_LOADED = "saved AOT compiled function", "Directly load AOT compilation"
AOT_FAILED = "Compiling model again due to a load failure"


class NoServer(Exception):
    """The server did not come up."""


def main(argv: Sequence[str]) -> int:
    """Serve twice and compare; the exit code."""
    options, command = parse(argv)
    manifest = json.loads((HOME / "manifest.json").read_text(encoding="utf-8"))
    caches = {name: Path(path) for name, path in manifest["caches"].items()}
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="warm-") as work:
        try:
            if not options.second:
                starts.append(start(command, Path(work), "first", options))
            before = snapshot(caches)
            aot = aot_expected(starts, caches, command)
            more = {"VLLM_FORCE_AOT_LOAD": "1"} if aot else {}
            starts.append(start(command, Path(work), "second", options, **more))
        except NoServer as problem:
            print(problem, file=sys.stderr)
            return EXIT_NO_SERVER
        problems = judge(starts[-1], changes(before, snapshot(caches), written()), aot)
    for one in starts:
        del one["log"]
    told = {"schema": 1, "arch": manifest["arch"], "cache_key": manifest["cache_key"], "command": command}
    print(json.dumps(told | {"warm": not problems, "problems": problems, "starts": starts}, indent=1))
    return EXIT_COLD if problems else 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the words after `vllm serve`."""
    parser = argparse.ArgumentParser(prog="warm.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--second", action="store_true", help="the first start was made before")
    parser.add_argument("--record", default="", metavar="DIR", help="have the recorder write there")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for a start (default: %(default)s)")
    own, dashes, command = (argv, (), ()) if "--" not in argv else split(argv)
    options = parser.parse_args(list(own))
    if not dashes or not command:
        parser.error("which model? warm.py -- MODEL [flags of vllm serve]")
    return options, list(command)


def split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """What is before the first `--`, it, and what is after."""
    at = list(argv).index("--")
    return argv[:at], argv[at : at + 1], argv[at + 1 :]


# ---- one start ----------------------------------------------------------------------------------------------------
def start(command: Sequence[str], work: Path, name: str, options: argparse.Namespace, **more: str) -> dict[str, Any]:
    """Serve, ask, stop. Seconds until it answers, what was counted, answers and log. Raises NoServer."""
    record, log = work / f"{name}.jsonl", work / f"{name}.log"
    env = {**os.environ, "WARMSTART_START": str(record), **more}
    if options.record:
        env["WARMSTART_RECORD"] = options.record
    port = free_port()
    say(f"{name} start, {options.limit:.0f} s at most")
    words = [str(HOME / "start"), "vllm", "serve", *command, "--host", "127.0.0.1", "--port", str(port)]
    began = time.monotonic()
    with open(log, "wb") as output:
        server = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        wait(server, port, began + options.limit, log)
        seconds = time.monotonic() - began
        say(f"{name} start: {seconds:.1f} s; asking")
        answers = ask(port)
    finally:
        code = stop(server)
    counted = events(record)
    return {
        "seconds": round(seconds, 2),
        "exit_code": code,
        "answers": answers,
        "counts": summary(counted),
        "kept": all(event["kept"] for event in counted if event["event"] == "start"),
        "log": log.read_text(encoding="utf-8", errors="replace"),
    }


def say(line: str) -> None:
    """A line on stderr: a start takes minutes, and stdout is for the outcome."""
    print(f"warm.py: {line}", file=sys.stderr, flush=True)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(server: subprocess.Popen[bytes], port: int, until: float, log: Path) -> None:
    """Until /health answers 200. Raises NoServer with the end of the log."""
    while time.monotonic() < until and server.poll() is None:
        url = f"http://127.0.0.1:{port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    what = f"ended with {server.returncode}" if server.returncode is not None else "is not ready in time"
    text = log.read_text(encoding="utf-8", errors="replace")
    causes = list(dict.fromkeys(found[1] for found in CAUSE.finditer(text)))[:3]
    raise NoServer("\n".join([text[-TAIL:], f"warm.py: the server {what}", *(f"  {cause}" for cause in causes)]))


def ask(port: int) -> list[Any]:
    """The answers to a short and a longer prompt; of a model that completes nothing the refusal."""
    url = f"http://127.0.0.1:{port}/v1"
    with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    found = []
    for prompt in PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, "logprobs": 5}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                choice = json.load(answer)["choices"][0]
                digest = hashlib.sha256(json.dumps(choice["logprobs"], sort_keys=True).encode()).hexdigest()
                found.append({"text": choice["text"], "logprobs_sha256": digest})
        except urllib.error.HTTPError as refused:
            found.append({"refused": refused.code})
    return found


def stop(server: subprocess.Popen[bytes]) -> int:
    """End a server as `podman stop` does, with SIGINT; its exit code."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
    try:
        server.wait(STOP_LIMIT)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)  # what it left behind, or the server itself
    return server.wait()


def events(record: Path) -> list[dict[str, Any]]:
    """The events of a start record; a line that was cut off is left out."""
    found = []
    for line in record.read_text(encoding="utf-8").splitlines() if record.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def summary(counted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often each kind of event happened, and its seconds in all."""
    kinds: dict[str, Any] = {}
    for event in counted:
        one = kinds.setdefault(event["event"], {"count": 0, "seconds": 0.0, "names": []})
        one["count"] += event.get("graphs", 1)
        one["seconds"] = round(one["seconds"] + (event.get("seconds") or 0.0), 3)
        name = event.get("name") or event.get("module")
        if name and name not in one["names"]:
            one["names"].append(name)
    return kinds


# ---- what may not happen a second time ----------------------------------------------------------------------------
def snapshot(caches: dict[str, Path]) -> dict[str, str]:
    """The digest of every file in the caches, by "cache/path"."""
    found = {}
    for name, top in caches.items():
        for file in files(top):
            with contextlib.suppress(OSError), open(file, "rb") as data:
                found[f"{name}/{file.relative_to(top)}"] = hashlib.file_digest(data, "sha256").hexdigest()
    return found


def files(top: Path) -> Iterator[Path]:
    """All files below a folder."""
    return (path for path in top.rglob("*") if path.is_file())


def written() -> list[str]:
    """Globs of files that a warm start writes too, as caches.toml says, each with its reason there."""
    table = tomllib.loads((HERE / "caches.toml").read_text(encoding="utf-8"))
    return [f"{row['cache']}/{row['files']}" for row in table.get("written", ())]


def changes(before: dict[str, str], after: dict[str, str], expected: Sequence[str]) -> list[str]:
    """What differs between two snapshots, but for files that are `expected` to."""
    differing = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    kinds = {(True, True): "changed", (False, True): "stored", (True, False): "removed"}
    return [
        f"{kinds[name in before, name in after]} {name}"
        for name in differing
        if not any(fnmatch.fnmatchcase(name, glob) for glob in expected)
    ]


def aot_expected(starts: Sequence[dict[str, Any]], caches: dict[str, Path], command: Sequence[str]) -> bool:
    """Whether the second start has to find what vLLM compiled ahead of time."""
    if "--enforce-eager" in command or "vllm" not in caches:
        return False
    if starts:
        return AOT_SAVED in starts[0]["log"] or AOT_LOADED in starts[0]["log"]
    return any(caches["vllm"].glob("torch_compile_cache/torch_aot_compile/*/*/model"))


def judge(second: dict[str, Any], differing: Sequence[str], aot: bool) -> list[str]:
    """Why the second start was not warm; empty when it was."""
    log, counts = second["log"], second["counts"]
    problems = list(differing)
    for kind, what in (("compile", "Triton compiled"), ("bench", "was tuned")):
        if kind in counts:
            names = ", ".join(counts[kind]["names"][:8])
            problems.append(f"{what}: {counts[kind]['count']} times ({names})")
    if "start" not in counts:
        problems.append("nothing was counted: there is no start record")
    if not second["kept"]:
        problems.append("the cache volume can't be written, so nothing is kept")
    problems += [line.strip() for line in log.splitlines() if JIT in line or AOT_FAILED in line]
    if aot and AOT_LOADED not in log:
        problems.append("vLLM did not load what it compiled ahead of time")
    return problems


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # by now the server is stopped
        say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
