"""The compiled parts of the image fit its torch: every symbol is there, and everything loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testinfra.host import Host

Script = Callable[..., Any]
Need = Callable[..., None]


def test_no_symbol_of_torch_is_missing(python: Script, site: str, real: Need) -> None:
    """A wheel built for another torch fails at its first call otherwise, not when it is installed."""
    real("torch", "vllm")
    folders = [f"{site}/{name}" for name in ("vllm", "torchvision", "torchaudio")]
    found = python("symbols.py", f"{site}/torch/lib", *folders)
    assert found["missing"] == {}
    assert found["files"] >= 1
    assert found["symbols"] > 10
    assert found["brought"] > 10_000


def test_compiled_parts_load_with_all_symbols_bound(host: Host, python: Script, site: str) -> None:
    listed = host.check_output(
        f"find {site}/vllm {site}/torchvision {site}/flash_attn_2*.so -name '*.so' 2>/dev/null || :"
    )
    assert listed
    found = python("loads.py", "torch", *listed.split())
    assert found["problems"] == {}
    assert found["count"] == len(listed.split())
