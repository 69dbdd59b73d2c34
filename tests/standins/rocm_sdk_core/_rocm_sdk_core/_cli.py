"""What the console scripts start: programs of the SDK."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent


def _start(program: str) -> int:
    os.execv(HERE / program, [str(HERE / program), *sys.argv[1:]])


def amd_smi() -> int:
    return _start("bin/amd-smi")


def amdclang() -> int:
    return _start("lib/llvm/bin/amdclang")


def amdclangpp() -> int:
    return _start("lib/llvm/bin/amdclang++")


def amdclang_cpp() -> int:
    return _start("lib/llvm/bin/amdclang-cpp")


def amdflang() -> int:
    return _start("lib/llvm/bin/amdflang")


def amdlld() -> int:
    return _start("lib/llvm/bin/amdlld")


def hipcc() -> int:
    return _start("bin/hipcc")


def hipconfig() -> int:
    return _start("bin/hipconfig")


def offload_arch() -> int:
    return _start("lib/llvm/bin/offload-arch")


def rocm_smi() -> int:
    return _start("bin/rocm-smi")


def rocm_agent_enumerator() -> int:
    return _start("bin/rocm_agent_enumerator")


def rocminfo() -> int:
    return _start("bin/rocminfo")
