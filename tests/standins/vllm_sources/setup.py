"""vLLM's build for ROCm without its compiler: what it asks of its environment, and a wheel of files made before."""

import os
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
arch = os.environ["PYTORCH_ROCM_ARCH"]
built = HERE / "built" / arch
problems = [f"{name} names nothing" for name in ("ROCM_PATH", "CC", "CXX") if not Path(os.environ[name]).exists()]
problems += [] if built.is_dir() else [f"PYTORCH_ROCM_ARCH={arch} is no arch"]
problems += [] if os.environ["VLLM_TARGET_DEVICE"] == "rocm" else ["VLLM_TARGET_DEVICE is not rocm"]
problems += [] if int(os.environ["MAX_JOBS"]) > 0 else ["MAX_JOBS is not a number of jobs"]
# The folder itself, not the one around it (cmake/external_projects/triton_kernels.cmake).
kernels = Path(os.environ["TRITON_KERNELS_SRC_DIR"])
problems += [] if (kernels / "__init__.py").is_file() else [f"{kernels} is not the package triton_kernels"]
if problems:
    raise SystemExit("vllm: " + "; ".join(problems))
for file in sorted(built.rglob("*")):
    if file.is_file():
        (HERE / file.relative_to(built)).write_bytes(file.read_bytes())
requires = (HERE / "REQUIRES").read_text(encoding="utf-8").splitlines()
setup(
    name="vllm",
    version=os.environ["VLLM_VERSION_OVERRIDE"],
    packages=find_packages(include=["vllm", "vllm.*"]),
    include_package_data=True,
    package_data={"": ["*"]},
    install_requires=[line.replace("{arch}", arch) for line in requires],
    entry_points={"console_scripts": ["vllm = vllm.entrypoints.cli.main:main"]},
)
