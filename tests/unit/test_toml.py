"""Mistakes in the data files that are no profile: each is one line that names the file, and a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmstart import cuts, profile, rules, volume
from warmstart.errors import ProfileError

ROOT = Path(__file__).parents[2]


def _cuts(tree: Path) -> None:
    cuts.load(tree, profile.load(ROOT, "cpu").profile)


def _caches(tree: Path) -> None:
    volume.table(tree, profile.load(ROOT, "cpu").profile)


def _rules(tree: Path) -> None:
    rules.check(profile.load(ROOT, "gfx942").profile)


READERS: dict[str, Callable[[Path], None]] = {
    "arch/cuts.toml": _cuts,
    "arch/rules.toml": _rules,
    "arch/aiter.toml": _rules,
    "caches/caches.toml": _caches,
}


@pytest.fixture(params=list(READERS))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the files, which the rules read too."""
    for file in READERS:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    monkeypatch.setattr(rules, "FILE", tmp_path / "arch" / "rules.toml")
    rules._known.cache_clear()
    yield tmp_path
    rules._known.cache_clear()


def told(name: str, tree: Path) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        READERS[name](tree)
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def test_the_committed_files_are_fine(name: str, tree: Path) -> None:
    READERS[name](tree)


@pytest.mark.parametrize("bad", [b"\nx = [", b"\n\xff\xfe = 1", b"\nx = " + b"[" * 5000], ids=["open", "bytes", "deep"])
def test_what_is_no_toml(name: str, tree: Path, bad: bytes) -> None:
    file = tree / name
    file.write_bytes(file.read_bytes() + bad)
    assert told(name, tree).message.startswith(f"{name} is not valid TOML: ")


def test_a_file_that_is_missing(name: str, tree: Path) -> None:
    (tree / name).unlink()
    assert told(name, tree).message == f"{name} can't be read: No such file or directory"


WRONG = [
    ("arch/cuts.toml", 'layer = "os"', "layer = 5", "`int` - at `$.cut[0].layer`", "comments"),
    ("arch/cuts.toml", "[[cut]]", "[[cutt]]", "unknown field `cutt`", "did you mean cut?"),
    ("arch/cuts.toml", "saves-mb", "saves-mib", "unknown field `saves-mib`", "did you mean saves-mb?"),
    ("arch/cuts.toml", 'lanes = ["cpu"]', 'lanes = "cpu"', "Expected `array`, got `str`", "comments"),
    ("arch/rules.toml", 'slow-vllm = ">=', "slow-vllm = 5 # ", "`int` - at `$.data.slow-vllm`", "comments"),
    ("arch/rules.toml", 'wheel-python = "3.12"', "", "missing required field `wheel-python`", "comments"),
    ("arch/rules.toml", "[[gone]]", "[[gonne]]", "unknown field `gonne`", "did you mean gone?"),
    ("arch/rules.toml", "reason = ", "raeson = ", "unknown field `raeson`", "did you mean reason?"),
    ("arch/aiter.toml", "triton-only = false", 'triton-only = "no"', "`$.version[0].triton-only`", "comments"),
    ("arch/aiter.toml", "triton-only = false", "triton-onyl = false", "`triton-onyl`", "did you mean triton-only?"),
    ("arch/aiter.toml", 'since = "0.1.3"', 'since = "new"', "`$.version[1].since`", "comments"),
    ("arch/aiter.toml", 'stale-lock = "waits"', 'stale-lock = "weights"', "Invalid enum value", "comments"),
    ("caches/caches.toml", 'volume = "/cache"', "volume = 1", "`int` - at `$.volume`", "comments"),
    ("caches/caches.toml", 'path = "vllm"', 'path = "../vllm"', "`$.cache[0].path`", "comments"),
    ("caches/caches.toml", "[[cache]]", "[[caches]]", "unknown field `caches`", "did you mean cache?"),
]


@pytest.mark.parametrize(("name", "old", "new", "message", "hint"), WRONG)
def test_what_is_of_a_wrong_type_or_unknown(tree: Path, name: str, old: str, new: str, message: str, hint: str) -> None:
    text = (tree / name).read_text(encoding="utf-8")
    assert old in text
    (tree / name).write_text(text.replace(old, new), encoding="utf-8")
    failure = told(name, tree)
    assert failure.message.startswith(f"{name}: ")
    assert message in failure.message
    assert hint in failure.hint


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('breaking-triton = ">=3.9"', 'breaking-triton = "new"', "Invalid specifier: 'new'"),
        ("[rule.aiter-mode]", "[rule.aiter-mood]", "warmstart/rules.py has no function for it"),
        ("frozen-index = '(", "frozen-index = '((", "missing ), unterminated subpattern"),
        ('from = "6.3"', 'from = "old"', "Invalid version: 'old'"),
        ('from = "6.3"', 'from = "99"', "there is no value for 'wanted_'"),
    ],
)
def test_a_rule_that_cannot_be_applied(tree: Path, old: str, new: str, problem: str) -> None:
    file = tree / "arch" / "rules.toml"
    text = file.read_text(encoding="utf-8").replace("needs ROCm {wanted}", "needs ROCm {wanted_}")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    failure = told("arch/rules.toml", tree)
    assert "can't be applied to gfx942" in failure.message
    assert problem in failure.message
    assert "arch/rules.toml" in failure.hint
