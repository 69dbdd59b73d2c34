"""Run one operator of each HIP library of vLLM and print how its result differs from torch's own."""

import json
from collections.abc import Callable

import torch
import vllm._custom_ops as ops  # type: ignore[import-not-found]

FLOAT = torch.float16


def norm() -> float:
    """_C: root mean square normalisation, used by every model."""
    x, weight = torch.randn(7, 256, dtype=FLOAT, device="cuda"), torch.randn(256, dtype=FLOAT, device="cuda")
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-6)
    wide = x.float()
    wanted = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    return float((out.float() - wanted).abs().max())


def experts() -> float:
    """_moe_C: the choice of experts."""
    logits = torch.randn(9, 16, dtype=torch.float32, device="cuda")
    weights = torch.empty(9, 4, dtype=torch.float32, device="cuda")
    chosen, source = (torch.empty(9, 4, dtype=torch.int32, device="cuda") for _ in range(2))
    ops.topk_softmax(weights, chosen, source, logits, False)
    wanted, which = torch.topk(torch.softmax(logits, -1), 4)
    return float((weights - wanted).abs().max()) + float((chosen.long() != which).sum())


def skinny() -> float:
    """_rocm_C: the matrix product of decoding, few tokens against a large weight."""
    weight, x = torch.randn(64, 512, dtype=FLOAT, device="cuda"), torch.randn(2, 512, dtype=FLOAT, device="cuda")
    units = torch.cuda.get_device_properties(0).multi_processor_count
    out = ops.wvSplitK(weight / 16, x / 16, units)
    return float((out.float() - (x.float() / 16) @ (weight.float() / 16).T).abs().max())


def vision() -> float:
    """torchvision: boxes that overlap."""
    import torchvision  # type: ignore[import-not-found]

    boxes = torch.tensor([[0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30]], dtype=torch.float32, device="cuda")
    kept = torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7], device="cuda"), 0.5)
    return float(kept.tolist() != [0, 2])


def product() -> float:
    """hipBLASLt, by torch."""
    a, b = (torch.randn(128, 128, dtype=FLOAT, device="cuda") / 16 for _ in range(2))
    return float(((a @ b).float() - a.float() @ b.float()).abs().max())


torch.manual_seed(0)
told: dict[str, float | str] = {}
EVERY: dict[str, Callable[[], float]] = {
    "_C": norm, "_moe_C": experts, "_rocm_C": skinny, "torchvision": vision, "hipblaslt": product,
}  # fmt: skip
for name, operator in EVERY.items():
    try:
        told[name] = operator()
        torch.cuda.synchronize()
    except Exception as problem:
        told[name] = f"{type(problem).__name__}: {problem}"
print(json.dumps(told))
