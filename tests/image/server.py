"""Start an image's server on the tiny model, ask it, stop it: for the serve and device tests and for the bench."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.checkout import free_port
from warmstart import run

START_LIMIT = 600.0  # seconds: a cold start takes about 60 here; the rest is for a machine under load
FLAGS = "--served-model-name tiny --max-model-len 1024 --max-num-seqs 4".split()
PROMPT = "A kernel that is compiled once"


class Server:
    """A running `vllm serve` of the image: its address, seconds until /health, and its log."""

    def __init__(self, container: str, port: int, volume: str) -> None:
        self.container, self.volume = container, volume
        self.url = f"http://127.0.0.1:{port}"
        self.began = time.time()
        self.seconds = 0.0

    def log(self) -> str:
        """All that the server printed."""
        done = run.run(["podman", "logs", self.container], ok=(0, 125))
        return done.stdout + done.stderr

    def ask(self, path: str, **body: object) -> bytes:
        """POST a JSON body and return the answer."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())

    def wait(self) -> None:
        """Until /health turns 200. Fails with the end of the log when the server dies or is too slow."""
        began = looked = time.monotonic()
        while time.monotonic() - began < START_LIMIT:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        self.seconds = time.monotonic() - began
                        return
            except (urllib.error.URLError, OSError):
                pass
            if time.monotonic() - looked > 5:  # seldom: each look is 0.2 CPU seconds that the start lacks
                looked = time.monotonic()
                state = run.run(["podman", "inspect", "--format", "{{.State.Running}}", self.container]).stdout
                if state.strip() != "true":
                    break
            time.sleep(0.25)
        raise AssertionError(f"the server did not come up:\n{self.log()[-4000:]}")


@contextmanager
def tiny_model(image: str) -> Iterator[str]:
    """A volume that holds the tiny model."""
    volume = f"warmstart-model-{os.getpid()}"
    script = Path(__file__).parent / "tiny_model.py"
    run.run(
        ["podman", "run", "--rm", "--network=none", "--volume", f"{volume}:/models"]
        + ["--volume", f"{script}:/tiny_model.py:ro", "--entrypoint", "/opt/venv/bin/python", image]
        + ["/tiny_model.py", "/models/tiny"]
    )
    try:
        yield volume
    finally:
        run.run(["podman", "volume", "rm", "--force", volume])


def serve(image: str, model: str, cache: str, *, options: Sequence[str] = (), flags: Sequence[str] = ()) -> Server:
    """Start the server as a user would who gives it as little as possible; `options` are podman's, `flags` vLLM's."""
    port = free_port()
    container = run.run(
        ["podman", "run", "--detach", "--init", "--cap-drop=all", "--security-opt=no-new-privileges", "--read-only"]
        + ["--shm-size=1g", "--user", "4321:4321", "--publish", f"127.0.0.1:{port}:8000"]
        + ["--volume", f"{model}:/models:ro", "--volume", f"{cache}:/cache", *options]
        + [image, "/models/tiny", *FLAGS, *flags]
    ).stdout.strip()
    return Server(container, port, cache)


@contextmanager
def ready(
    image: str, model: str, cache: str, *, options: Sequence[str] = (), flags: Sequence[str] = ()
) -> Iterator[Server]:
    """A server as `serve` starts it, once it is ready; its container is gone afterwards, its cache volume is not."""
    server = serve(image, model, cache, options=options, flags=flags)
    try:
        server.wait()
        yield server
    finally:
        run.run(["podman", "rm", "--force", "--time", "5", server.container], ok=(0, 1))


def stop(server: Server) -> int:
    run.run(["podman", "stop", "--time", "60", server.container])
    code = run.run(["podman", "inspect", "--format", "{{.State.ExitCode}}", server.container]).stdout
    run.run(["podman", "rm", "--force", server.container])
    return int(code)


def warm(image: str, model: str, cache: str, *, options: Sequence[str] = (), flags: Sequence[str] = ()) -> Any:
    """Have caches/warm.py serve once more, on the volume of a first start with the same flags; what it found."""
    done = run.run(
        ["podman", "run", "--rm", "--init", "--network=none", "--cap-drop=all", "--security-opt=no-new-privileges"]
        + ["--read-only", "--shm-size=1g", "--user", "4321:4321", "--volume", f"{model}:/models:ro"]
        + ["--volume", f"{cache}:/cache", *options, "--entrypoint", "/opt/venv/bin/python", image]
        + ["/opt/warmstart/caches/warm.py", "--second", "--", "/models/tiny", *FLAGS, *flags],
        ok=(0, 1, 3),
    )
    assert done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout)


def completion(server: Server) -> dict[str, Any]:
    answer = server.ask("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=32, temperature=0, logprobs=5)
    choice = json.loads(answer)["choices"][0]
    return {"text": choice["text"], "logprobs": choice["logprobs"], "finish": choice["finish_reason"]}


def streamed(server: Server) -> list[str]:
    """The pieces of the same completion's text, as they arrive."""
    answer = server.ask("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=32, temperature=0, stream=True)
    lines = [ln.removeprefix("data: ") for ln in answer.decode().splitlines() if ln.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0]["text"] for line in lines]
