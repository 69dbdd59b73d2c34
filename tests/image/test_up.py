"""`up` of the real image with the tiny model: phases against another clock, killed for real, restarted, stopped.

Two starts go the whole way here; the others are killed early.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import Checkout, copy, end, free_port, podman, until
from tests.image.conftest import planned_arch
from tests.image.server import START_LIMIT
from warmstart import container, phases, processes, run

if (arch := planned_arch()) not in {"", "cpu"}:
    pytest.skip(f"serving needs a {arch}: tests/device serves this image on the GPU", allow_module_level=True)

PRESET = "tiny-up"
SCRIPT = Path(__file__).parent / "tiny_model.py"


@pytest.fixture(scope="module")
def checkout(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A copy of the project with a preset of the image and the tiny model."""
    root = tmp_path_factory.mktemp("up")
    model = root / "models" / "tiny"
    model.parent.mkdir()
    run.run(
        ["podman", "run", "--rm", "--network=none", "--volume", f"{model.parent}:/out"]
        + ["--volume", f"{SCRIPT}:/tiny_model.py:ro", "--entrypoint", "/opt/venv/bin/python", image]
        + ["/tiny_model.py", "/out/tiny"]
    )
    preset = f"[{PRESET}]\nimage = {image}\nport = {free_port()}\nmodel = {model}\n"
    copy(root, preset + "max-model-len = 1024\nmax-num-seqs = 4\n")
    one = Checkout(root)
    yield one
    one.close()
    podman("rm", "--force", "--ignore", "--time", "0", f"warmstart-{PRESET}")


class Poll(threading.Thread):
    """Asks the server until it answers: the wall time by another clock than the log's."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.answered = url, 0.0
        self.start()

    def run(self) -> None:
        limit = time.monotonic() + START_LIMIT
        while not self.answered and time.monotonic() < limit:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                    self.answered = time.time() if answer.status == 200 else 0.0
            except OSError:
                time.sleep(0.5)


def test_killed_early_is_told_and_can_be_started_again(checkout: Checkout) -> None:
    """The container while it imports; then the engine's own process, of which vLLM only says that it died."""
    running = checkout.start("up", PRESET)
    assert until(lambda: checkout.seen(PRESET) == "running")
    time.sleep(1)
    podman("kill", f"warmstart-{PRESET}")
    code, _, err = end(running)
    assert code == 83, err
    shutil.rmtree(checkout.root / ".warmstart" / "logs")
    assert "ended in the phase import (exit code 137): killed (SIGKILL)" in err
    running = checkout.start("up", PRESET)
    checkout.wait_for(PRESET, "Initializing a V1 LLM engine", START_LIMIT)
    lease = checkout.leases()[0]
    engines = [p for p in processes.tree(lease["process"]) if "EngineCor" in p.name]
    assert engines, [p.name for p in processes.tree(lease["process"])]
    os.kill(engines[0].pid, signal.SIGKILL)
    code, _, err = end(running, START_LIMIT)
    assert code == 83, err
    assert "Failed core proc(s): {" in err  # vLLM names the signal when it saw it, else nobody
    assert "the engine's process was killed" in err or "the engine's process died without a word" in err
    assert checkout.leases() == []


def test_up_serves_and_explains_its_time(checkout: Checkout, image: str) -> None:
    shutil.rmtree(checkout.root / ".warmstart" / "logs", ignore_errors=True)  # of the starts before
    running = checkout.start("up", PRESET, "--json", "--silence", "5")
    assert until(lambda: bool(checkout.leases()))
    poll = Poll(f"http://127.0.0.1:{checkout.leases()[0]['port']}")
    code, out, err = end(running, START_LIMIT)
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    record = told["record"]
    assert told["image_id"] == image or image in told["image_id"]
    assert {"import", "engine", "weights", "compile", "kv", "ready"} <= {p["name"] for p in record["phases"]}
    assert sum(p["seconds"] for p in record["phases"]) == pytest.approx(record["seconds"])
    seen = json.loads(podman("container", "inspect", f"warmstart-{PRESET}").stdout)[0]
    poll.join(60)
    # podman's own time of the start, and the first answer: neither is from the log.
    wall = poll.answered - container.seconds(seen["State"]["StartedAt"])
    assert record["seconds"] == pytest.approx(wall, rel=0.05, abs=1.0)
    silences = [event for event in map(json.loads, out.splitlines()[:-1]) if event["event"] == "silence"]
    assert all(event["does"] in ("compiles", "works", "loads") for event in silences), silences  # nothing hangs
    question = {"model": PRESET, "prompt": "A kernel", "max_tokens": 4}
    request = urllib.request.Request(
        f"{told['url']}/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 4
    assert checkout.call("status")[1].startswith(f"{PRESET}: ready since")


def test_a_restart_is_seen_and_down_stops_it_cleanly(checkout: Checkout) -> None:
    """The container of the test before, restarted behind our back; the second start, with a warm cache."""
    assert checkout.seen(PRESET) == "running", "the test before did not leave an engine"
    before = checkout.leases()[0]
    podman("restart", "--time", "60", f"warmstart-{PRESET}")
    assert until(lambda: checkout.leases()[0]["process"] != before["process"])
    assert until(lambda: checkout.leases()[0]["state"] == "ready", START_LIMIT)
    records = list((checkout.root / ".warmstart/starts" / PRESET).glob("*.jsonl"))
    assert records
    assert phases.read(checkout.text(PRESET)).restarts == 1
    code, out, err = checkout.call("down")
    assert (code, out) == (0, f"stopped {PRESET}\n"), err
    assert "Shutting down" in checkout.log(PRESET)
    assert checkout.seen(PRESET) == ""
    assert until(lambda: not processes.began(before["process"]))


def test_gpu_check_runs_a_kernel_in_the_image(checkout: Checkout, image: str) -> None:
    """The image of the arch must have its tag for that."""
    if podman("image", "exists", "localhost/warmstart/vllm:cpu", check=False).returncode:
        pytest.skip("no image localhost/warmstart/vllm:cpu: the one under test has another name")
    code, out, err = checkout.call("gpu-check", "cpu")
    assert code == 0, err
    assert "cpu: processor, cpu: kernels ran, with the right results" in out
    assert "this is the cpu image" in out
