"""The verb `seed`: what its options come to, and what it tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import build
from tests import seed_cache
from tests.unit.test_seed_make import CAPS, planned
from warmstart import cli, errors, presets, probe, registry, run, seedmake, seeds, starts
from warmstart.phases import StartRecord
from warmstart.seedlabels import Here
from warmstart.starts import Start

BUILD = ".venv/bin/python build.py"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with an engine, a GPU that the cache is of, and nothing below .warmstart."""
    monkeypatch.setattr(build, "STATE", tmp_path / "state")
    monkeypatch.setattr(probe, "probe", lambda state: CAPS)
    monkeypatch.setattr(seedmake, "load", lambda *_: None)

    def here(caps: Any, plan: Any, cu: int = 0) -> Here:
        return Here(
            cache_keys=(plan.cache_key,), arch=plan.arch, wave=32, versions=plan.versions, cus=(cu or 40,), cpu=None
        )

    monkeypatch.setattr(seeds, "here", here)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    seed_cache.cache(tmp_path / "caches" / planned().cache_key)
    return tmp_path / "caches"


def verb(*words: str) -> int:
    return cli.main(build.VERBS, ["seed", *words, "-q"])


def test_without_seeds_there_is_nothing_to_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb() == 0
    assert capsys.readouterr().out == ""
    assert verb("ls", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"seeds": []}


@pytest.mark.parametrize("do", ["push", "pull", "verify"])
def test_what_is_missing_is_told(do: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(do) == errors.UsageError.code
    assert f"seed {do} what?" in capsys.readouterr().err


def test_make_ls_verify_and_pull(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = planned().cache_key
    assert verb("make", "gfx1151", "--from", str(source)) == 0
    made = capsys.readouterr().out
    assert f"localhost/warmstart/seed:{key}-cu40  kernels, verdicts  12 files, 1 incomplete ones left out" in made
    assert verb("ls") == 0
    assert f"{key}-cu40  kernels, verdicts  40" in capsys.readouterr().out
    assert verb("verify", f"{key}-cu40") == 0
    assert "whole: 12 files" in capsys.readouterr().out
    assert verb("pull", f"{key}-cu40", "--arch", "gfx1151", "--into", f"{tmp_path}/into", "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["placed"], told["files"], told["where"]) == (12, 12, f"{tmp_path}/state/seeds/{key}/{key}-cu40")
    assert verb("pull", f"{key}-cu40", "--arch", "gfx1151", "--into", f"{tmp_path}/into") == 0
    out = capsys.readouterr().out
    assert "0 files (0.00 MB) put into" in out
    assert "nobody has signed for it, and it is code" in out


def test_exit_codes(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, into = planned().cache_key, str(tmp_path / "into")
    assert verb("make", "gfx1151", "--from", str(tmp_path / "none")) == errors.NothingToSeed.code
    assert verb("make", "gfx1151", "--from", str(source)) == 0
    assert verb("pull", f"{key}-cu40", "--arch", "gfx1100", "--into", into) == errors.SeedMismatch.code
    assert verb("pull", f"{key}-cu40", "--arch", "gfx1151", "--cu", "32", "--into", into) == errors.SeedMismatch.code
    assert verb("pull", "gfx1151-ba9876543210", "--arch", "gfx1151", "--into", into) == errors.NothingToSeed.code
    assert verb("push", "no-registry", "--seed", f"{key}-cu40") == errors.UsageError.code
    layer = max((tmp_path / "state/seeds").glob("*/*/blobs/sha256/*"), key=lambda file: file.stat().st_size)
    layer.write_bytes(layer.read_bytes()[:-1])
    assert verb("pull", f"{key}-cu40", "--arch", "gfx1151", "--into", into) == errors.SeedDamaged.code
    assert "hint:" in capsys.readouterr().err
    assert not Path(into).exists() or not list(Path(into).rglob("*.hsaco"))


def test_a_presets_model_and_flags_are_those_of_artefacts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[seedmake.Wanted] = []
    real = seedmake.make

    def make(state: Path, caps: Any, plan: Any, ask: seedmake.Wanted) -> Any:
        wanted.append(ask)
        return real(state, caps, plan, ask)

    monkeypatch.setattr(seedmake, "make", make)
    preset = presets.Preset(name="p", model="Qwen/Qwen3", flags={"max-num-seqs": "4", "enforce-eager": True})
    monkeypatch.setattr(presets, "load", lambda *_: preset)
    words = ["make", "gfx1151", "--from", str(source)]
    assert verb(*words, "--preset", "p") == 0
    assert verb(*words, "--model", "m", "--flags", "--max-model-len 5 --api-key geheim") == 0
    assert verb(*words) == 0
    told = [(one.model, one.flags) for one in wanted]
    assert told == [("Qwen/Qwen3", "--enforce-eager --max-num-seqs=4"), ("m", "--max-model-len=5"), ("", "")]


def test_a_preset_without_a_model_asks_for_one(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("make", "cpu", "--from", str(source), "--preset", "smoke-cpu") == errors.PresetError.code
    assert "smoke-cpu names no model: --set model=…" in capsys.readouterr().err


def test_make_takes_set_as_up_does(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[seedmake.Wanted] = []

    def make(state: Path, caps: Any, plan: Any, ask: seedmake.Wanted) -> Any:
        wanted.append(ask)
        raise errors.NothingToSeed("enough")

    monkeypatch.setattr(seedmake, "make", make)
    words = ["--from", str(source), "--preset", "smoke-cpu", "--set", "model=/data/tiny", "--set", "max-num-seqs=2"]
    assert verb("make", "cpu", *words) == errors.NothingToSeed.code
    assert [(one.model, one.flags) for one in wanted] == [("/model/tiny", "--max-model-len=1024 --max-num-seqs=2")]
    assert verb("make", "gfx1151", *words) == errors.PresetUnfit.code
    assert verb("make", "cpu", "--set", "model=x") == errors.UsageError.code


@pytest.mark.parametrize("words", [[], ["--tier", "kernels", "--model", "m"]])
def test_what_a_seed_of_the_cpu_image_holds(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("make", "cpu", *words) == errors.UsageError.code
    told = capsys.readouterr().err
    assert "holds artefacts alone" in told
    assert "--preset" in told
    assert "--model" in told


def test_nobody_checks_what_the_maker_says(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["make", "gfx1151", "--from", str(source), "--model", "m", "--flags", "--max-model-len 5"]
    assert verb(*words) == 0
    tag = capsys.readouterr().out.split()[0].partition("seed:")[2]
    for do in (["ls"], ["verify", tag]):
        assert verb(*do) == 0
        out = capsys.readouterr().out
        assert "its artefacts are of m with --max-model-len=5, as its maker said: nothing checks that" in out


def test_a_tag_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("verify", "nope") == errors.NothingToSeed.code
    told = capsys.readouterr().err
    assert "there is no seed nope here" in told
    assert f"`{BUILD} seed ls` lists" in told


def test_an_empty_list_says_how_a_seed_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(build.VERBS, ["seed", "ls"]) == 0
    told = f"`{BUILD} seed make …` makes one of what warmstart-cache holds, `{BUILD} seed pull …` gets one"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "`make seed DO=make ARCH=…` makes one of what warmstart-cache holds, `make seed DO=pull REF=…` gets one"),
        (["pull"], "`make seed DO=pull REF=…`: the tag of a seed that `make seed DO=ls` lists"),
        (["verify", "nope"], "`make seed DO=ls` lists those that are; one in a registry is REF=host"),
        (["make", "cpu", "--set", "model=x"], "ARGS='--preset NAME --set KEY=VALUE'"),
        (["make", "cpu"], "ARGS='--preset NAME' (ARGS='--preset NAME --set model=…' where it has none), or ARGS='--mo"),
        (["make", "gfx1151", "--from", str(build.ROOT / "docs")], "`make up PRESET=…`"),
    ],
)
def test_hints_are_in_the_words_of_make(
    words: list[str], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")
    cli.main(build.VERBS, ["seed", *words])
    assert hint in capsys.readouterr().err


def test_a_dry_list_is_a_list(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.recorder, "on", False)
    monkeypatch.setattr(run.recorder, "commands", [])
    assert verb("make", "gfx1151", "--from", str(source)) == 0
    capsys.readouterr()
    assert verb("ls", "--dry-run") == 0
    assert f"{planned().cache_key}-cu40" in capsys.readouterr().out


def test_a_preset_that_never_started_here_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from warmstart import runline

    known = "no start of instinct is on record here"
    monkeypatch.setattr(runline, "CACHE", str(source))
    monkeypatch.setattr(presets, "usable", lambda *_, **__: None)
    named = ["make", "gfx1151", "--preset", "instinct", "--set", "model=m"]
    for words, told in (
        (named, True),
        ([*named, "--from", str(source)], False),  # of another machine, for all that is known
        ([*named, "--tier", "kernels"], False),  # the same for any model
        (["make", "gfx1151", "--model", "m"], False),
    ):
        assert verb(*words) == 0
        assert (known in capsys.readouterr().err) is told, words
    record = StartRecord(version="", phases=(), seconds=1.0, ready=True, reached="ready")
    starts.add(tmp_path / "state", Start(preset="instinct", image="i", began=1.0, wall=1.0, record=record))
    assert verb(*named) == 0
    assert known not in capsys.readouterr().err


def test_a_dry_run_changes_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.recorder, "on", False)
    monkeypatch.setattr(run.recorder, "commands", [])
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert cli.main(build.VERBS, ["seed", "make", "gfx1151", "--from", str(source), "--dry-run"]) == 0
    assert "would pack 12 files into" in capsys.readouterr().err
    after = sorted(str(path) for path in tmp_path.rglob("*"))
    assert [path for path in after if path not in before and not path.endswith("in-use")] == []


def test_a_dry_pull_says_what_it_would_do(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb("make", "gfx1151", "--from", str(source)) == 0
    monkeypatch.setattr(run.recorder, "on", False)
    monkeypatch.setattr(run.recorder, "commands", [])
    words = ["pull", f"{planned().cache_key}-cu40", "--arch", "gfx1151", "--into", f"{tmp_path}/into", "--dry-run"]
    assert cli.main(build.VERBS, ["seed", *words]) == 0
    assert "would put" in capsys.readouterr().err
    assert not (tmp_path / "into").exists()


def test_a_push_needs_a_seed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "push", lambda *_: pytest.fail("pushed"))
    assert verb("push", "r.example/seeds") == errors.NothingToSeed.code
    assert "there is no seed here" in capsys.readouterr().err
