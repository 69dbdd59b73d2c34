"""The image serves: a tiny hybrid model (gated-delta-net and attention) made with the image's own Python."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import phases, run
from warmstart.plan import Plan

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
        began = time.monotonic()
        while time.monotonic() - began < START_LIMIT:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        self.seconds = time.monotonic() - began
                        return
            except (urllib.error.URLError, OSError):
                pass
            state = run.run(["podman", "inspect", "--format", "{{.State.Running}}", self.container]).stdout
            if state.strip() != "true":
                break
            time.sleep(0.25)
        pytest.fail(f"the server did not come up:\n{self.log()[-4000:]}")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def model(image: str) -> Iterator[str]:
    """A volume that holds the tiny model."""
    volume = f"warmstart-model-{os.getpid()}"
    script = Path(__file__).parent / "tiny_model.py"
    run.run(
        ["podman", "run", "--rm", "--network=none", "--volume", f"{volume}:/models"]
        + ["--volume", f"{script}:/tiny_model.py:ro", "--entrypoint", "/opt/venv/bin/python", image]
        + ["/tiny_model.py", "/models/tiny"]
    )
    yield volume
    run.run(["podman", "volume", "rm", "--force", volume])


def serve(image: str, model: str, cache: str) -> Server:
    port = free_port()
    container = run.run(
        ["podman", "run", "--detach", "--init", "--cap-drop=all", "--security-opt=no-new-privileges", "--read-only"]
        + ["--shm-size=1g", "--user", "4321:4321", "--publish", f"127.0.0.1:{port}:8000"]
        + ["--volume", f"{model}:/models:ro", "--volume", f"{cache}:/cache", image, "/models/tiny", *FLAGS]
    ).stdout.strip()
    return Server(container, port, cache)


def stop(server: Server) -> int:
    run.run(["podman", "stop", "--time", "60", server.container])
    code = run.run(["podman", "inspect", "--format", "{{.State.ExitCode}}", server.container]).stdout
    run.run(["podman", "rm", "--force", server.container])
    return int(code)


@pytest.fixture(scope="module")
def server(image: str, model: str) -> Iterator[Server]:
    """The first start, with an empty cache volume."""
    cache = f"warmstart-cache-{os.getpid()}"
    running = serve(image, model, cache)
    try:
        running.wait()
        yield running
    finally:
        run.run(["podman", "rm", "--force", "--time", "5", running.container], ok=(0, 1))
        run.run(["podman", "volume", "rm", "--force", cache])


def completion(server: Server) -> dict[str, Any]:
    answer = server.ask("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=32, temperature=0, logprobs=5)
    choice = json.loads(answer)["choices"][0]
    return {"text": choice["text"], "logprobs": choice["logprobs"], "finish": choice["finish_reason"]}


def test_the_same_question_brings_the_same_answer(server: Server) -> None:
    first, second = completion(server), completion(server)
    assert len(first["logprobs"]["tokens"]) == 32
    assert first == second


def test_streaming(server: Server) -> None:
    whole = completion(server)["text"]
    answer = server.ask("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=32, temperature=0, stream=True)
    lines = [ln.removeprefix("data: ") for ln in answer.decode().splitlines() if ln.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert len(lines) > 4
    assert "".join(json.loads(ln)["choices"][0]["text"] for ln in lines[:-1]) == whole


def test_chat(server: Server) -> None:
    answer = server.ask(
        "/v1/chat/completions", model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert json.loads(answer)["usage"]["completion_tokens"] > 0


def test_phases_explain_the_start(server: Server, plan: Plan) -> None:
    """The log's phases add up to the wall time; the record is kept beside verify.json."""
    record = phases.read(server.log().splitlines(), started=server.began)
    assert record.ready
    assert {"import", "weights", "compile", "kv", "ready"} <= {p.name for p in record.phases}
    assert record.version == plan.versions["vllm"]
    assert abs(sum(p.seconds for p in record.phases) - server.seconds) <= 0.05 * server.seconds + 1.0
    if folder := os.environ.get("WARMSTART_RECORDS"):
        Path(folder, "phases.json").write_bytes(msgspec.json.format(msgspec.json.encode(record)))


def test_stop_is_clean_and_the_second_start_is_warm(server: Server, image: str, model: str) -> None:
    """SIGINT ends it with code 0; the next start reads the cache and gives the same answer, bit for bit."""
    before = completion(server)
    assert stop(server) == 0
    again = serve(image, model, server.volume)
    try:
        again.wait()
        assert completion(again) == before
        assert again.seconds < server.seconds
    finally:
        run.run(["podman", "rm", "--force", "--time", "5", again.container])
