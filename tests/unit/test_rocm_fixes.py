"""What is done to AMD's wheels after unpacking, and what is refused."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from image import rocm

SWITCH = "def a(rtld_global: bool = True): ...\ndef b(rtld_global: bool = True): ...\n"
POINTS = "[triton.backends]\nnvidia = triton.backends.nvidia\namd = triton.backends.amd\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with what the fixes look for."""
    files = {
        "rocm_sdk/__init__.py": SWITCH,
        "rocm-10.0.0.dist-info/RECORD": "rocm_sdk/__init__.py,sha256=old,1\nrocm_sdk/other.py,sha256=x,2\n",
        "_rocm_sdk_core/lib/libamd_smi.so.27": "",
        "_rocm_sdk_core/lib/librocm_smi64.so.1": "",
        "_rocm_sdk_core/lib/libamdhip64.so.7": "",
        "_rocm_sdk_core/share/amd_smi/amdsmi/__init__.py": "",
        "triton-3.8.0.dist-info/entry_points.txt": POINTS,
        "triton-3.8.0.dist-info/METADATA": "Name: triton\nVersion: 3.8.0+git1\n\nVersion: no\n",
        "torch-2.13.0.dist-info/METADATA": "Name: torch\nRequires-Dist: sympy\nRequires-Dist: triton==3.8.0+git1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_wheels_as_they_are_known(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rocm.main(["rocm", str(site)]) == 0
    assert rocm.main(["torch", str(site)]) == 0
    assert "rtld_global: bool = True" not in (site / "rocm_sdk/__init__.py").read_text()
    lib = site / "_rocm_sdk_core/lib"
    assert (lib / "libamd_smi.so").resolve() == lib / "libamd_smi.so.27"
    assert (lib / "librocm_smi64.so.7").resolve() == lib / "librocm_smi64.so.1"
    assert (site / "amd_smi.pth").read_text() == "_rocm_sdk_core/share/amd_smi\n"
    assert "nvidia" not in (site / "triton-3.8.0.dist-info/entry_points.txt").read_text()


def test_records_know_the_new_content(site: Path) -> None:
    rocm.keep_symbols_apart(site)
    content = (site / "rocm_sdk/__init__.py").read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    first, second = (site / "rocm-10.0.0.dist-info/RECORD").read_text().splitlines()
    assert first == f"rocm_sdk/__init__.py,sha256={digest},{len(content)}"
    assert second == "rocm_sdk/other.py,sha256=x,2"


@pytest.mark.parametrize(
    ("layer", "file", "text", "told"),
    [
        ("rocm", "rocm_sdk/__init__.py", "rtld_global: bool = True", "1 switches"),
        ("rocm", "_rocm_sdk_core/lib/libamd_smi.so.26", "", "2 libraries"),
        ("rocm", "torch/lib/libamdhip64.so", "another", "2 HIP runtimes"),
        ("torch", "triton-3.8.0.dist-info/entry_points.txt", "amd = x\n", "once each"),
        ("torch", "triton-3.7.0.dist-info/entry_points.txt", POINTS, "2 distributions"),
        ("torch", "torch-2.13.0.dist-info/METADATA", "Requires-Dist: triton==3.8.0+git2\n", "asks for Triton"),
        ("torch", "torch-2.13.0.dist-info/METADATA", "Requires-Dist: triton>=3\n", "no exact Triton"),
    ],
)
def test_another_wheel_is_refused(
    site: Path, capsys: pytest.CaptureFixture[str], layer: str, file: str, text: str, told: str
) -> None:
    (site / file).parent.mkdir(parents=True, exist_ok=True)
    (site / file).write_text(text)
    assert rocm.main([layer, str(site)]) == rocm.REFUSED
    assert told in capsys.readouterr().err


def test_missing_parts_are_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "_rocm_sdk_core/share/amd_smi/amdsmi/__init__.py").unlink()
    assert rocm.main(["rocm", str(site)]) == rocm.REFUSED
    (site / "rocm_sdk/__init__.py").unlink()
    assert rocm.main(["rocm", str(site)]) == rocm.REFUSED
    assert "__init__.py" in capsys.readouterr().err
