"""Finds and preloads the libraries of the SDK's distributions."""

import ctypes
import importlib.metadata
import importlib.util
from pathlib import Path

CORE, LIBRARIES = "_rocm_sdk_core/lib", "_rocm_sdk_libraries/lib"
# Short name → folder, and the library's name there.
KNOWN = {
    "amd_comgr": (CORE, "libamd_comgr.so"),
    "amdhip64": (CORE, "libamdhip64.so"),
    "hiprtc": (CORE, "libhiprtc.so"),
    "rocm-openblas": (f"{CORE}/host-math/lib", "librocm-openblas.so"),
    "rocm_sysdeps_liblzma": (f"{CORE}/rocm_sysdeps/lib", "librocm_sysdeps_liblzma.so"),
    "rocprofiler-sdk-roctx": (CORE, "librocprofiler-sdk-roctx.so"),
    "roctracer64": (CORE, "libroctracer64.so"),
    "roctx64": (CORE, "libroctx64.so"),
    "hipblas": (LIBRARIES, "libhipblas.so"),
    "hipblaslt": (LIBRARIES, "libhipblaslt.so"),
    "hipfft": (LIBRARIES, "libhipfft.so"),
    "hiprand": (LIBRARIES, "libhiprand.so"),
    "hipsolver": (LIBRARIES, "libhipsolver.so"),
    "hipsparse": (LIBRARIES, "libhipsparse.so"),
    "hipsparselt": (LIBRARIES, "libhipsparselt.so"),
    "miopen": (LIBRARIES, "libMIOpen.so"),
    "rccl": (LIBRARIES, "librccl.so"),
}
__version__ = importlib.metadata.version("rocm")


def find_libraries(*shortnames: str) -> list[Path]:
    """Paths of libraries by their short names. Raises ModuleNotFoundError and FileNotFoundError."""
    found = []
    for name in shortnames:
        place, library = KNOWN[name]
        package, _, folder = place.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"{package} is not installed, which has {name}")
        here = sorted((Path(spec.origin).parent / folder).glob(f"{library}*"))
        if not here:
            raise FileNotFoundError(f"no {library} in {package}/{folder}")
        found.append(here[0])
    return found


def preload_libraries(*shortnames: str, rtld_global: bool = True) -> None:
    """Load libraries by their short names, in that order."""
    for path in find_libraries(*shortnames):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL if rtld_global else ctypes.RTLD_LOCAL)


def initialize_process(
    *, preload_shortnames: list[str] | None = None, check_version: str = "", rtld_global: bool = True
) -> None:
    """Load what a program needs before its own libraries. Raises ImportError for another version of the SDK."""
    if check_version and check_version != __version__:
        raise ImportError(f"made for ROCm {check_version}, found {__version__}")
    preload_libraries(*(preload_shortnames or []), rtld_global=rtld_global)
