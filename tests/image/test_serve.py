"""The image serves: a tiny hybrid model (gated-delta-net and attention) made with the image's own Python.

The server is stopped by test_warm.py, which comes next.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from tests.image.conftest import planned_arch
from tests.image.server import Server, completion, streamed
from warmstart import phases
from warmstart.plan import Plan

if (arch := planned_arch()) not in {"", "cpu"}:
    pytest.skip(f"serving needs a {arch}: tests/device serves this image on the GPU", allow_module_level=True)


def test_the_same_question_brings_the_same_answer(server: Server) -> None:
    first, second = completion(server), completion(server)
    assert len(first["logprobs"]["tokens"]) == 32
    assert first == second


def test_streaming(server: Server) -> None:
    pieces = streamed(server)
    assert len(pieces) > 3
    assert "".join(pieces) == completion(server)["text"]


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
