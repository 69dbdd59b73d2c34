"""One start of vLLM's server after another, from the command to /health, with and without the start-up kit.

Each start is asked the same two questions, so that answers can be compared bit for bit, and is stopped as a user stops
it. Caches lie in one folder per side. Stock runs with byte code and keeps its caches, too: what it lacks is the kit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 420.0  # seconds for one start
FLAGS = "--load-format dummy --served-model-name m --host 127.0.0.1 --max-model-len 4096 --gpu-memory-utilization 0.5"
# Those with which vLLM runs its Triton kernels on NVIDIA, too, instead of libraries that AMD does not have.
NVIDIA = ["--attention-backend", "TRITON_ATTN", "--additional-config", '{"gdn_prefill_backend":"triton"}']
NVIDIA_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
KIT = {"TRITON_CACHE_AUTOTUNING": "1", "TRITON_CACHE_MANAGER": "warmstart_cache:SeededCacheManager"}
LATE = re.compile(r"Triton kernel JIT compilation during inference: (\S+)")
TOLD = {  # what vLLM says of its own time
    "torch.compile": re.compile(r"torch\.compile (?:took|takes) ([\d.]+) s"),
    "profiling": re.compile(r"profiling/warmup run took ([\d.]+) s"),
    "graphs": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    "engine": re.compile(r"init engine .* took ([\d.]+) s"),
    "load": re.compile(r"Model loading took .* and ([\d.]+) seconds"),
}


def environment(cache: Path, *, kit: bool, more: dict[str, str]) -> dict[str, str]:
    """The variables of a start: as an image with the kit bakes them, or stock's with its caches kept."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WARMSTART_", "TRITON_", "VLLM_"))}
    env = clean | NVIDIA_ENV | {"VLLM_CACHE_ROOT": f"{cache}/vllm", "TRITON_CACHE_DIR": f"{cache}/triton"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if kit:
        # That machine's CUDA libraries and pyarrow, which images for AMD lack, have threads when the helper is forked.
        env |= KIT | {
            "WARMSTART_HOOK_FORK": "force",
            "WARMSTART_VERDICTS": f"{cache}/verdicts",
            "WARMSTART_START": f"{cache}/start.jsonl",
        }
        # What an image's warmstart.pth does; a .pth file counts in a Python's own site-packages only.
        first = cache.parent / "first"
        first.mkdir(exist_ok=True)
        (first / "sitecustomize.py").write_text("import warmstart_hooks\n", encoding="utf-8")
        env["PYTHONPATH"] = f"{first}:{ROOT / 'sitecustomize'}:{env.get('PYTHONPATH', '')}".rstrip(":")
    return env | more


def command(model: Path, port: int, sequences: int) -> list[str]:
    """vLLM's command line."""
    serve = f"serve {model} --port {port} --max-num-seqs {sequences} {FLAGS}".split() + NVIDIA
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *serve]


def start(
    name: str, model: Path, cache: Path, out: Path, *, kit: bool, more: dict[str, str], sequences: int = 64
) -> dict[str, Any]:
    """Start, ask, stop: seconds to /health, what vLLM and the start record say, and the digest of the answers."""
    cache.mkdir(parents=True, exist_ok=True)
    record = cache / "start.jsonl"
    record.unlink(missing_ok=True)
    port, before = free_port(), files(cache)
    log = out / f"{name}.log"
    began = time.monotonic()
    with log.open("wb") as target:
        server = subprocess.Popen(
            command(model, port, sequences),
            env=environment(cache, kit=kit, more=more),
            stdout=target,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            up = healthy(server, port)
            seconds = time.monotonic() - began
            answers = [ask(port, prompt) for prompt in ("A kernel that is compiled once", "hello world")] if up else []
            asked = time.monotonic() - began - seconds
        finally:
            stop(server)
    text = log.read_text(encoding="utf-8", errors="replace")
    if not up:
        return {"failed": server.returncode, "said": text.splitlines()[-12:]}
    result: dict[str, Any] = {"seconds": round(seconds, 1), "first answers": round(asked, 2)}
    result |= {what: float(found[1]) for what, pattern in TOLD.items() if (found := pattern.search(text))}
    result["compiled late"] = sorted(set(LATE.findall(text)))
    result["files stored"] = len(files(cache) - before)
    result["answers"] = hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]
    result["events"] = events(record)
    return result


def events(record: Path) -> dict[str, Any]:
    """How often each event of the start record happened, and its seconds in all."""
    found: dict[str, Any] = {}
    if record.exists():
        for line in record.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            name = f"{event['event']} {event['module']}" if "module" in event else event["event"]
            row = found.setdefault(name, {"times": 0, "seconds": 0.0})
            row["times"] += 1
            row["seconds"] = round(row["seconds"] + event.get("seconds", 0.0), 2)
    return found


def files(folder: Path) -> set[str]:
    """All files below a cache but the start record."""
    return {str(path) for path in folder.rglob("*") if path.is_file() and path.name != "start.jsonl"}


def healthy(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until /health answers 200; False when the server ended or took too long."""
    began = time.monotonic()
    while time.monotonic() - began < LIMIT and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def ask(port: int, prompt: str) -> Any:
    """Text and log-probabilities of 16 tokens without chance."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 3}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.loads(answer.read())["choices"][0]
    return [choice["text"], choice["logprobs"]["token_logprobs"]]


def stop(server: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; the whole session when that is not enough."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            print("killed after 20 s", file=sys.stderr)
    try:
        os.killpg(server.pid, signal.SIGKILL)  # whatever of its session is left
    except ProcessLookupError:
        return
    server.wait()
    time.sleep(1)  # device memory comes back


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def emptied(folder: Path) -> Path:
    """The folder without what was in it."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
