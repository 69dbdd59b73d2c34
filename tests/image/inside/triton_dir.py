"""Print where Triton's cache is for whoever has a say in it: after each of them, the same."""

import importlib
import json
import os
import tempfile

found = {"image": os.environ["TRITON_CACHE_DIR"]}
importlib.import_module("vllm.env_override")
found["vllm at import"] = os.environ["TRITON_CACHE_DIR"]
interface = importlib.import_module("vllm.compilation.compiler_interface")
for name, arguments in {"InductorAdaptor": (), "InductorStandaloneAdaptor": ("binary",)}.items():
    if adaptor := getattr(interface, name, None):
        with tempfile.TemporaryDirectory() as folder:
            adaptor(*arguments).initialize_cache(folder)
        found[f"vllm {name}"] = os.environ["TRITON_CACHE_DIR"]
utils = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
found["inductor"] = utils.triton_cache_dir(0)
print(json.dumps(found))
