"""Compile a Python extension like Triton's launcher with $CC and a C++ file like Inductor's with $CXX; use both."""

import ctypes
import importlib.util
import json
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

LAUNCHER = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <dlfcn.h>
static PyObject *launch(PyObject *self, PyObject *args) {
  int a, b;
  if (!PyArg_ParseTuple(args, "ii", &a, &b)) return NULL;
  if (!dlopen(NULL, RTLD_LAZY)) return NULL;
  return PyLong_FromLong((long)a + b);
}
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, "adds"}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, methods};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }
"""
KERNEL = """
#include <cmath>
#include <vector>
extern "C" double total(int n) {
  std::vector<double> all(n, 1.5);
  double sum = 0;
  for (double one : all) sum += std::floor(one) + one;
  return sum;
}
"""


def compile(compiler: str, source: Path, *options: str) -> Path:
    """The shared library made from `source`. Raises RuntimeError with what the compiler said."""
    made = source.with_suffix(".so")
    command = [compiler, "-O3", "-shared", "-fPIC", *options, str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{compiler} ended with {done.returncode}: {done.stderr[-2000:]}")
    return made


def c_extension(folder: Path) -> int:
    (folder / "probe.c").write_text(LAUNCHER)
    made = compile(os.environ["CC"], folder / "probe.c", f"-I{sysconfig.get_path('include')}")
    spec = importlib.util.spec_from_file_location("probe", made)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer: int = module.launch(40, 2)
    return answer


def cpp_library(folder: Path) -> float:
    (folder / "total.cpp").write_text(KERNEL)
    library = ctypes.CDLL(str(compile(os.environ["CXX"], folder / "total.cpp", "-std=c++17")))
    library.total.restype = ctypes.c_double
    answer: float = library.total(4)
    return answer


told: dict[str, object] = {"uid": os.getuid()}
with tempfile.TemporaryDirectory() as work:
    for name, what in (("c", c_extension), ("cpp", cpp_library)):
        try:
            told[name] = what(Path(work))
        except Exception as problem:
            told[name] = f"{type(problem).__name__}: {problem}"
print(json.dumps(told))
