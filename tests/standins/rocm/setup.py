"""The selector, offered as sources only. As with the real one, the machine that builds it can get into the wheel."""

import os
import subprocess
from pathlib import Path

from setuptools import find_packages, setup

VERSION = Path("VERSION").read_text(encoding="utf-8").strip()
ARCHS = Path("ARCHS").read_text(encoding="utf-8").split()


def target() -> str:
    """The device that the extra `device` stands for: told, or that of the GPU here, or the first that there is."""
    if told := os.environ.get("ROCM_SDK_TARGET_FAMILY"):
        return told
    try:
        found = subprocess.run(["offload-arch"], check=False, capture_output=True, text=True).stdout.split()
    except OSError:
        found = []
    return (found or ARCHS)[0]


extras = {f"device-{arch}": [f"rocm-sdk-device-{arch}=={VERSION}"] for arch in ARCHS}
setup(
    name="rocm",
    version=VERSION,
    package_dir={"": "src"},
    packages=find_packages("src"),
    install_requires=[f"rocm-sdk-core=={VERSION}"],
    extras_require={
        "libraries": [f"rocm-sdk-libraries=={VERSION}"],
        "device": [f"rocm-sdk-device-{target()}=={VERSION}"],
        **extras,
    },
    entry_points={"console_scripts": ["rocm-sdk = rocm_sdk.__main__:main"]},
)
