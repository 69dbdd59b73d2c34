"""Loads the SDK's libraries before torch's own, as AMD's builds of torch do."""

PRELOADED = [
    "amd_comgr",
    "amdhip64",
    "rocprofiler-sdk-roctx",
    "roctracer64",
    "roctx64",
    "hiprtc",
    "hipblas",
    "hipfft",
    "hiprand",
    "hipsparse",
    "hipsparselt",
    "hipsolver",
    "rccl",
    "hipblaslt",
    "miopen",
    "rocm_sysdeps_liblzma",
    "rocm-openblas",
]


def initialize() -> None:
    """Raises what rocm_sdk does when a library is missing."""
    import rocm_sdk

    rocm_sdk.initialize_process(preload_shortnames=PRELOADED, check_version="@rocm@")
