"""The image on a real GPU of its arch: what torch sees, kernels that run, and a model that is served."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.device.conftest import Script, gpu_options
from tests.image.server import Server, completion, ready, stop, streamed, tiny_model, warm
from warmstart import host, phases, run
from warmstart.plan import Plan

# A start must end with none of these in its log; each was the sign of a broken image somewhere.
FORBIDDEN = (
    r"start build",  # aiter compiles what should have been prebuilt
    r"Failed to infer device type",
    r"hipErrorInvalidImage|hipErrorNoBinaryForGpu|invalid device function",
    r"HSA_STATUS_ERROR|Memory access fault",
)
MEMORY = ["--kv-cache-memory-bytes", "268435456"]  # 256 MiB: enough for the tiny model, whatever else runs
TOLERANCE = 0.02  # largest difference of a half-precision result; right ones differ by 0.005, wrong ones by more than 1


@pytest.fixture(scope="module")
def model(image: str) -> Iterator[str]:
    """A volume that holds the tiny model."""
    with tiny_model(image) as volume:
        yield volume


@pytest.fixture(scope="module")
def server(image: str, model: str) -> Iterator[Server]:
    """The first start, with an empty cache volume."""
    volume = f"warmstart-device-serve-{os.getpid()}"
    try:
        with ready(image, model, volume, options=gpu_options(), flags=MEMORY) as running:
            yield running
    finally:
        run.run(["podman", "volume", "rm", "--force", volume])


def test_torch_sees_the_gpus_of_this_arch_and_no_other(torch: Any, gpus: list[host.Gpu], plan: Plan) -> None:
    count = sum(gpu.arch == plan.arch for gpu in gpus)
    assert count
    assert [one["arch"] for one in torch["torch"]] == [plan.arch] * count
    assert torch["hip"].startswith(".".join(plan.versions["rocm"].split(".")[:2]))


def test_amdsmi_lists_what_hip_counts(torch: Any, gpus: list[host.Gpu]) -> None:
    """vLLM asks amdsmi, by the addresses that the entry point gives it in HIP's order."""
    counted = torch["counted"].split(",") if torch["counted"] else [gpu.pci for gpu in gpus]
    assert counted == [gpu.pci for gpu in gpus]
    assert set(counted) <= set(torch["amdsmi"])
    assert len(torch["amdsmi"]) >= len(torch["torch"])
    if len(gpus) == 1:
        assert len(torch["amdsmi"]) == len(torch["torch"]) == 1


def test_the_wrong_gpus_are_passed_over(torch: Any, gpus: list[host.Gpu], plan: Plan) -> None:
    right = [str(i) for i, gpu in enumerate(gpus) if gpu.arch == plan.arch]
    assert torch["chosen"] == ("" if len(right) == len(gpus) else ",".join(right))


def test_a_triton_kernel_compiles_and_is_kept(python: Script) -> None:
    first, second = python("kernel.py"), python("kernel.py")
    assert (first["right"], second["right"]) == (True, True)
    assert (first["kept"], first["launchers"] > 0) == (1, True)
    assert second["kept"] == 1
    assert second["seconds"] < first["seconds"]


def test_an_operator_of_each_library_runs(python: Script, torch: Any) -> None:
    found = python("operators.py")
    wrong = {name: error for name, error in found.items() if isinstance(error, str) or error > TOLERANCE}
    assert wrong == {}
    assert {"_C", "_moe_C", "_rocm_C"} <= set(found)


def test_the_same_question_brings_the_same_answer(server: Server) -> None:
    first, second = completion(server), completion(server)
    assert len(first["logprobs"]["tokens"]) == 32
    assert first == second


def test_streaming(server: Server) -> None:
    pieces = streamed(server)
    assert len(pieces) > 3
    assert "".join(pieces) == completion(server)["text"]


def test_the_archs_flags_were_given(server: Server, plan: Plan) -> None:
    log = server.log()
    for flag, value in plan.profile.serve.items():
        assert re.search(rf"['\"]?{flag.replace('-', '_')}['\"]?\s*[:=]\s*\S*{re.escape(value)}", log), flag


def test_phases_explain_the_start(server: Server, plan: Plan) -> None:
    record = phases.read(server.log().splitlines(), started=server.began)
    assert record.ready
    assert {"import", "weights", "compile", "kv", "graphs", "ready"} <= {p.name for p in record.phases}
    assert record.version.partition("+")[0] == plan.versions["vllm"]


def test_nothing_in_the_log_tells_of_a_broken_image(server: Server) -> None:
    """Above all no `start build`: aiter compiles nothing at run time."""
    lines = [line for line in server.log().splitlines() if any(re.search(sign, line) for sign in FORBIDDEN)]
    assert lines == []


def test_stop_is_clean_and_the_second_start_is_warm(server: Server, image: str, model: str) -> None:
    """Nothing is compiled, tuned or stored again, and the answer is the same."""
    before = completion(server)
    assert stop(server) == 0
    told = warm(image, model, server.volume, options=gpu_options(), flags=MEMORY)
    assert told["problems"] == []
    (second,) = told["starts"]
    assert second["answers"][0]["text"] == before["text"]


def test_verdicts_are_where_the_next_start_looks(server: Server, image: str, plan: Plan) -> None:
    """vLLM and Inductor have each a place of their own for Triton's cache, where the next start may not look."""
    find = ["podman", "run", "--rm", "--volume", f"{server.volume}:/cache:ro", "--entrypoint", "find", image, "/cache"]
    found = run.run([*find, "-name", "*.autotune.json"]).stdout.split()
    right = (f"/cache/{plan.cache_key}/triton/", f"/cache/{plan.cache_key}/verdicts/")
    assert found
    assert [path for path in found if not path.startswith(right)] == []


def test_the_devices_clock_is_judged(image: str, cache: str) -> None:
    """In one line. Doubt is a result too: what matters is that there is one."""
    done = run.run(
        ["podman", "run", "--rm", "--read-only", "--network=none", "--cap-drop=all", "--user", "4321:4321"]
        + [*gpu_options(), "--volume", f"{cache}:/cache", "--entrypoint", "/opt/warmstart/start", image]
        + ["/opt/venv/bin/python", "/opt/warmstart/caches/bench_doctor.py", "--json"],
        ok=(0, 1),
    )
    told = json.loads(done.stdout)
    assert told["trusted"] is (done.code == 0)
    assert "\n" not in told["summary"]
    assert told["spin"][0]["host"] > 0
