"""No precompiled C++ header where nothing is going to be compiled.

Inductor precompiles torch's header before it loads a kernel for the CPU, also one whose library is in its cache, and
keeps the header under /tmp: each new container spent 5 CPU seconds on what it did not need. Standard library only.
"""

import os
import sys
from typing import Any


def install(module: Any) -> None:
    """Wrap _precompile_header of torch._inductor.codecache: none for a kernel whose library is there."""
    original = getattr(module, "_precompile_header", None)
    if original is None or hasattr(original, "warmstart"):
        return

    def _precompile_header(*args: Any, **kwargs: Any) -> Any:
        # The caller knows where the library will be, and says it to nobody.
        source = sys._getframe(1).f_locals.get("main_path")
        if isinstance(source, str) and os.path.exists(os.path.splitext(source)[0] + ".so"):
            return None  # which is how a kernel is built without one, should it have to be after all
        return original(*args, **kwargs)

    _precompile_header.warmstart = True  # type: ignore[attr-defined]
    _precompile_header.__dict__.update(getattr(original, "__dict__", {}))
    module._precompile_header = _precompile_header
