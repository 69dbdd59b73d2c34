"""What the parts of the start-up kit's bench share: hooks, torch and Triton of this process, and a real model's call.

Imported only in a process that measures: it puts the hooks in place as an image does, then imports torch and Triton.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOOKS = Path(__file__).resolve().parents[1] / "sitecustomize"

sys.path.insert(0, str(HOOKS))
importlib.import_module("warmstart_hooks")
torch: Any = importlib.import_module("torch")
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")


def snippet(
    fn: Any,
    warmup: Any = 25,
    rep: Any = 100,
    grad_to_none: Any = None,
    quantiles: Any = None,
    return_mode: str = "mean",
) -> Any:
    """Three launches to warm up, ten timed by events, no flush: the loop of the article this project began with."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(10):
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        fn()
        pair[1].record()
        torch.cuda.synchronize()
        times.append(pair[0].elapsed_time(pair[1]))
    return triton.testing._summarize_statistics(times, quantiles, return_mode)


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    properties = torch.cuda.get_device_properties(0)
    maker = "AMD" if torch.version.hip else "NVIDIA"
    return {
        "gpu": f"{properties.name} ({maker})",
        "processors": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


def gdn_call() -> Callable[[], Any]:
    """The forward pass of a gated delta rule: 2048 tokens, 32 heads of 128."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    shape = (1, 2048, 32, 128)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    g = torch.nn.functional.logsigmoid(torch.randn(shape[:3], device="cuda"))
    beta = torch.rand(shape[:3], device="cuda").to(torch.bfloat16)

    def call() -> Any:
        with torch.no_grad():
            result = rule(q, k, v, g, beta, output_final_state=True)
        torch.cuda.synchronize()
        return result

    return call


if os.environ.get("BENCH_SNIPPET"):
    setattr(importlib.import_module("triton.testing"), "do_bench", snippet)  # noqa: B010
torch.zeros(1, device="cuda")
