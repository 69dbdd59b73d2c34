"""The second start does nothing again: proven by the image's own caches/warm.py on the server of test_serve.py."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.image.conftest import planned_arch
from tests.image.server import Server, completion, stop, warm
from warmstart import run

if (arch := planned_arch()) not in {"", "cpu"}:
    pytest.skip(f"serving needs a {arch}: tests/device serves this image on the GPU", allow_module_level=True)


def digest(answer: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(answer["logprobs"], sort_keys=True).encode()).hexdigest()


def test_stop_is_clean_and_the_second_start_is_warm(server: Server, image: str, model: str) -> None:
    """SIGINT ends it with code 0; the next start compiles and stores nothing and gives the same answer, bit for bit."""
    before = completion(server)
    assert stop(server) == 0
    told = warm(image, model, server.volume)
    assert told["problems"] == []
    (second,) = told["starts"]
    assert second["answers"][0] == {"text": before["text"], "logprobs_sha256": digest(before)}
    assert second["exit_code"] == 0
    assert {"start", "import"} <= set(second["counts"])


def test_a_server_that_does_not_start_is_no_proof(image: str) -> None:
    done = run.run(
        ["podman", "run", "--rm", "--network=none", "--cap-drop=all", "--env", "PATH=/bin"]  # no vllm there
        + ["--entrypoint", "/opt/venv/bin/python", image, "/opt/warmstart/caches/warm.py", "--", "/models/none"],
        ok=(3,),
    )
    assert done.stdout == ""
    assert "warm.py: the server ended with 127" in done.stderr
