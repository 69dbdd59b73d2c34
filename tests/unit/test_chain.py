"""Modules of warmstart/ import only those before them in the chain, so that the flow can be read in one direction."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "warmstart"

# In chain order (docs/architecture.md). A module may import those to its left.
CHAIN = (
    "names early errors hints masking log signals run host toml schema profile lock cuts known rules patches "
    "volume plan hardware tables gittree render explain manifest pipconf targets wheels solve pins aptconf "
    "mmdebstrap rootfs debs context patchcheck containersconf proof probe store failure leftovers pruning engine "
    "inputs madewheels resolve report assemble logline phases starts verify elf archives "
    "registry cachedir seedtiers seedlabels unpack seedfiles seedlayout seedplace seedstore seedmake seeds "
    "offers devicecode standins loopback reuse rehearsed rehearse "
    "flags presetfiles presets runline presetlist seedverb "
    "processes gpus limits need sizes pressure guard "
    "ports lease boxes container diagnosis follow watchdog stacks startup holders outcome "
    "stopping preflight engines control watcher gpucheck benchdoctor "
    "findings checks_gpu checks_memory checks_access checks_engine checks_host doctor emit cli options"
).split()


def imported(module: str) -> set[str]:
    """Names of the warmstart modules that a module imports anywhere, also inside functions."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "warmstart":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("warmstart."):
            found.add(node.module.partition(".")[2])
    return found


def test_every_module_has_its_place() -> None:
    modules = {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}
    assert modules == set(CHAIN)


def test_no_module_imports_a_later_one() -> None:
    late = {(m, n) for i, m in enumerate(CHAIN) for n in imported(m) if n not in CHAIN[:i]}
    assert late == set()


def test_only_run_starts_processes() -> None:
    for path in [*PACKAGE.glob("*.py"), PACKAGE.parent / "build.py"]:
        names = {
            a.name
            for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(n, ast.Import)
            for a in n.names
        }
        if path.stem != "run":
            assert not names & {"subprocess", "sh"}, path


def test_no_file_is_too_long() -> None:
    long = {p.name: n for p in PACKAGE.glob("*.py") if (n := len(p.read_text(encoding="utf-8").splitlines())) > 300}
    assert long == {}
