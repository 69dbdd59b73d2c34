"""torch and vLLM are imported once: the engine and, from the second start on, its worker are forked by helpers.

Three starts on one volume: as vLLM does it, with one helper, with both. All of them give the same answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.image.conftest import planned_arch
from tests.image.server import PROMPT, Server, completion, ready, stop
from warmstart import run

if (arch := planned_arch()) not in {"", "cpu"}:
    pytest.skip(f"serving needs a {arch}: tests/device serves this image on the GPU", allow_module_level=True)

PROCESSES = "for p in /proc/[0-9]*; do echo $(cut -d ' ' -f 1,4 $p/stat 2>/dev/null) $(cat $p/comm 2>/dev/null); done"


class Seen:
    """One start: its record's events, its processes (id → parent, name), and its answers."""

    def __init__(self, server: Server) -> None:
        newest = "cat $(ls -t /cache/*/starts/*.jsonl | head -n 1)"
        self.events = [json.loads(line) for line in inside(server, newest).splitlines()]
        self.processes = {}
        for line in inside(server, PROCESSES).splitlines():
            if len(words := line.split(None, 2)) == 3 and words[0].isdecimal():
                self.processes[int(words[0])] = int(words[1]), words[2]
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0.9, "seed": 7, "logprobs": 5}
        drawn = json.loads(server.ask("/v1/completions", model="tiny", **body))["choices"][0]
        self.answers = completion(server), drawn["text"], drawn["logprobs"]

    def made(self, event: str) -> dict[str, int]:
        """Processes of an event, fork or spawn: name → process id."""
        return {found["name"]: found["child"] for found in self.events if found["event"] == event}

    def importers(self, module: str) -> int:
        """How many processes imported a module."""
        return len({found["pid"] for found in self.events if found["event"] == "import" and found["module"] == module})


def inside(server: Server, command: str) -> str:
    return run.run(["podman", "exec", server.container, "sh", "-c", command]).stdout


@pytest.fixture(scope="module")
def starts(image: str, model: str) -> Iterator[list[Seen]]:
    """As vLLM starts its processes, the first start with the hook, the second."""
    cache = f"warmstart-cache-{os.getpid()}-imports"
    found = []
    try:
        for options in (["--env", "WARMSTART_HOOK_FORK=0"], [], []):
            with ready(image, model, cache, options=options) as server:
                found.append(Seen(server))
                assert stop(server) == 0
        yield found
    finally:
        run.run(["podman", "volume", "rm", "--force", cache])


def test_switched_off_all_processes_import(starts: list[Seen]) -> None:
    assert starts[0].made("fork") == {}
    assert starts[0].importers("torch") >= 3


def test_the_engine_is_forked_by_a_helper(starts: list[Seen]) -> None:
    for seen in starts[1:]:
        engine = seen.made("fork")["EngineCore"]
        parent, name = seen.processes[engine]
        assert name.startswith("VLLM::EngineCo")
        assert seen.processes[parent][1] == "warmstart-fork"


def test_the_worker_is_forked_from_the_second_start_on(starts: list[Seen]) -> None:
    """The first one tells which variables vLLM gives it before OpenMP is loaded."""
    assert "VllmWorker-0" in starts[1].made("spawn")
    worker = starts[2].made("fork")["VllmWorker-0"]
    parent, _ = starts[2].processes[worker]
    assert starts[2].processes[parent][1] == "warmstart-fork"
    assert starts[2].made("spawn") == {}


def test_torch_is_imported_by_the_server_and_one_helper(starts: list[Seen]) -> None:
    """The two do it at the same time."""
    assert [seen.importers("torch") for seen in starts[1:]] == [2, 2]


def test_the_answers_are_the_same(starts: list[Seen]) -> None:
    assert starts[0].answers == starts[1].answers == starts[2].answers
