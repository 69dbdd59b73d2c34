"""amdsmi where the SDK keeps it. It loads its library by its plain name, and finds no GPU."""

import ctypes
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[3] / "lib" / "libamd_smi.so"


class AmdSmiException(Exception):
    """Any failure."""


class AmdSmiLibraryException(AmdSmiException):
    """The library said no."""


_library = ctypes.CDLL(str(LIBRARY))


def amdsmi_init(flag: int = 2) -> None:
    """Raises AmdSmiLibraryException: a stand-in has no driver to talk to."""
    raise AmdSmiLibraryException(f"no driver (flag {flag})")


def amdsmi_shut_down() -> None:
    """Nothing was started."""


def amdsmi_get_processor_handles() -> list[int]:
    """No GPU."""
    return []
