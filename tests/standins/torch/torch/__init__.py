"""As much of torch as is imported while an image is built: no tensors."""

import ctypes
from pathlib import Path

from torch import _rocm_init, version
from torch.version import __version__ as __version__

_rocm_init.initialize()
_library = ctypes.CDLL(str(Path(__file__).parent / "lib" / "libtorch.so"))


class _Flags:
    _GLIBCXX_USE_CXX11_ABI = True


_C = _Flags()
__all__ = ["version"]
