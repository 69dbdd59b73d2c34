"""py-spy's dump, shown short. The dumps have the form that py-spy 0.4 prints."""

from __future__ import annotations

from tests.unit.test_watchdog import process
from warmstart import stacks

DUMP = """Process 57: VLLM::EngineCore
Python v3.11.2 (/usr/bin/python3.11)

Thread 61 (idle): "ThreadPoolExecutor-0_0"
    wait (threading.py:320)
    _worker (concurrent/futures/thread.py:81)
Thread 57 (active+gil): "MainThread"
    synchronize (torch/cuda/__init__.py:1083)
    do_bench (triton/testing.py:150)
    _bench (triton/runtime/autotuner.py:171)
    run (triton/runtime/autotuner.py:238)
    forward (vllm/model_executor/layers/fla/ops/chunk.py:62)
    _warmup_prefill_kernels (vllm/model_executor/models/qwen3_next.py:1308)
"""


def test_the_main_thread_and_what_it_does() -> None:
    told = stacks.short(DUMP)
    assert told == (
        "benches a kernel: synchronize (__init__.py:1083) < do_bench (testing.py:150) < _bench (autotuner.py:171)"
        " < run (autotuner.py:238)"
    )


def test_without_a_telling_frame() -> None:
    dump = 'Process 5: python\n\nThread 5 (idle): "MainThread"\n    <module> (x.py:3)\n    poll (selectors.py)\n'
    assert stacks.short(dump) == "<module> (x.py:3) < poll (selectors.py)"


def test_without_python() -> None:
    assert stacks.short("Process 5: cc1plus\n") == "no Python frame"


def test_which_process_is_looked_into() -> None:
    engine = process(11, "VLLM::EngineCore", cpu=9.0)
    found = (process(10, "catatonit"), engine, process(12, "vllm", cpu=3.0), process(13, "cc1plus", cpu=99.0))
    assert stacks.of_interest(found) is engine
    assert stacks.of_interest((process(10, "catatonit"),)) is None
