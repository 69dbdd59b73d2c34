"""Runs inside an image: launches two kernels on each GPU that torch sees, checks their results, prints JSON."""

import json

import torch


def checked(device: str) -> bool:
    """Whether the device counts, and multiplies matrices, as one does by hand."""
    numbers = torch.arange(256, device=device, dtype=torch.float32)
    square = numbers.reshape(16, 16)
    product = square @ torch.eye(16, device=device)
    return float(numbers.sum()) == 255 * 128 and bool(torch.equal(product.cpu(), square.cpu()))


def main() -> None:
    """Print what was found. A GPU without device code ends the process here, with or without a message."""
    print(json.dumps({"torch": torch.__version__, "hip": torch.version.hip or ""}), flush=True)
    if not torch.cuda.is_available():
        print(json.dumps({"device": "cpu", "name": "processor", "arch": "cpu", "ok": checked("cpu")}), flush=True)
        return
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        arch = getattr(facts, "gcnArchName", "").partition(":")[0]
        # Named before the launch: whatever dies there has said on which device.
        print(json.dumps({"device": f"cuda:{number}", "name": facts.name, "arch": arch}), flush=True)
        print(json.dumps({"device": f"cuda:{number}", "ok": checked(f"cuda:{number}")}), flush=True)


main()
