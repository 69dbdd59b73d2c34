"""What a setup.py asks of torch when it builds no extension."""

from setuptools import Extension
from setuptools.command.build_ext import build_ext

CUDA_HOME: str | None = None
ROCM_HOME: str | None = None
IS_HIP_EXTENSION = True


class BuildExtension(build_ext):
    """Refuses to build: a stand-in has no headers."""

    def run(self) -> None:
        raise RuntimeError("a stand-in of torch builds no extensions")


def CppExtension(name: str, sources: list[str], **more: object) -> Extension:
    return Extension(name, sources)


CUDAExtension = CppExtension
