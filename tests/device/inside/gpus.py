"""Print the GPUs that torch sees, those that amdsmi lists, and what the entry point chose."""

import json
import os

import amdsmi  # type: ignore[import-not-found]
import torch

amdsmi.amdsmi_init()
handles = amdsmi.amdsmi_get_processor_handles()
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(
    json.dumps(
        {
            "hip": torch.version.hip,
            "torch": [
                {"arch": d.gcnArchName.partition(":")[0], "name": d.name, "cus": d.multi_processor_count}
                for d in devices
            ],
            "amdsmi": [amdsmi.amdsmi_get_gpu_device_bdf(handle).lower() for handle in handles],
            "chosen": os.environ.get("HIP_VISIBLE_DEVICES", ""),
            "counted": os.environ.get("WARMSTART_GPUS", ""),
        }
    )
)
