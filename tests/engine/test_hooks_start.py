"""The hooks in starts of Python of every kind: there once, silent, and never a reason for a start to fail."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[2] / "sitecustomize"
SEEN = "import sys; print([getattr(f, 'find_spec', None).__module__ for f in sys.meta_path].count('warmstart_hooks'))"
METHODS = """
import json, multiprocessing, sys
def count(queue): queue.put(sum(getattr(f.find_spec, "__module__", "") == "warmstart_hooks" for f in sys.meta_path))
if __name__ == "__main__":
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method); queue = context.Queue()
        process = context.Process(target=count, args=(queue,)); process.start()
        found[method] = queue.get(timeout=100); process.join()
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the hooks, its byte code made as in the image."""
    place = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python3.*/site-packages")
    for file in HOOKS.glob("warmstart*"):
        shutil.copy(file, site)
    command: list[str | Path] = [
        place / "bin/python",
        "-m",
        "compileall",
        "-qf",
        "--invalidation-mode",
        "unchecked-hash",
        site,
    ]
    subprocess.run(command, check=True)
    return place


def python(venv: Path, *arguments: str, **env: str) -> tuple[str, str]:
    """What a start of Python prints; it must not fail."""
    variables = {"PATH": os.environ["PATH"], **env}
    done = subprocess.run(
        [venv / "bin/python", *arguments], env=variables, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-s",), ("-B",), ("-X", "utf8"), ("-O",), ("-W", "error")])
def test_there_once_and_silent(venv: Path, flags: tuple[str, ...]) -> None:
    assert python(venv, *flags, "-c", SEEN) == ("2\n", "")


def test_off_without_site_and_by_their_variable(venv: Path) -> None:
    assert python(venv, "-S", "-c", SEEN) == ("0\n", "")
    assert python(venv, "-c", SEEN, WARMSTART_HOOKS="0") == ("0\n", "")
    assert python(venv, "-c", SEEN, WARMSTART_HOOK_LOST="0") == ("1\n", "")


def test_in_processes_that_are_forked_and_spawned(venv: Path, tmp_path: Path) -> None:
    (tmp_path / "methods.py").write_text(METHODS)
    out, err = python(venv, str(tmp_path / "methods.py"))
    assert json.loads(out) == {"fork": 2, "spawn": 2, "forkserver": 2}
    assert err == ""


def test_a_start_reads_no_more_than_it_needs(venv: Path) -> None:
    """The distribution's sitecustomize asks for a module that is missing, which must not read the messages."""
    out, _ = python(venv, "-c", "import sys; print(sorted(n for n in sys.modules if n in ('json', 'warmstart_calls')))")
    assert out == "[]\n"


def test_damaged_files_leave_python_as_it_is(venv: Path, tmp_path: Path) -> None:
    copy = tmp_path / "venv"
    shutil.copytree(venv, copy, symlinks=True)
    (site,) = copy.glob("lib/python3.*/site-packages")
    shutil.rmtree(site / "__pycache__")
    (site / "vllm").mkdir()
    (site / "vllm/__init__.py").write_text("")
    (site / "vllm/version.py").write_text("")
    (site / "warmstart_calls.py").write_text("raise RuntimeError('damaged')\n")
    assert python(copy, "-c", "import vllm.version, json; print(1)") == ("1\n", "")
    (site / "warmstart_hooks.py").write_text("import nothing_of_that_name\n")
    out, err = python(copy, "-c", "print(1)")  # site says so and goes on
    assert out == "1\n"
    assert "nothing_of_that_name" in err


def test_what_python_3_15_reads_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry point a line; it is called, and had it all done before, does nothing."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(str(HOOKS))
    (line,) = (HOOKS / "warmstart.start").read_text(encoding="utf-8").splitlines()
    pkgutil.resolve_name(line)()
    assert sum(getattr(f.find_spec, "__module__", "") == "warmstart_hooks" for f in sys.meta_path) == 2
    for name in [name for name in sys.modules if name.startswith("warmstart_")]:
        monkeypatch.delitem(sys.modules, name)
