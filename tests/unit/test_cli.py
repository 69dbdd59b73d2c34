"""The command line: help, results on stdout, failures as one line with a hint and an exit code of their own."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

import build
import warmstart
from warmstart import cli, engine, engines, errors, log, probe, verify
from warmstart import run as recording


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    log.configure()


def run(*argv: str) -> int:
    return cli.main(build.VERBS, argv)


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert [verb for verb in build.VERBS if f"\n    {verb}" not in text] == []


@pytest.mark.parametrize("verb", list(build.VERBS))
def test_every_verb_takes_the_common_options(verb: str) -> None:
    wanted = [settings for name, settings in build.VERBS[verb][2] if name[0] != "-" and "nargs" not in settings]
    positional = [settings.get("choices", ("x",))[0] for settings in wanted]
    args = cli.parser(build.VERBS).parse_args([verb, *positional, "--json", "--dry-run", "--debug", "-q"])
    assert (args.json, args.dry_run, args.debug, args.quiet) == (True, True, True, True)


def test_make_knows_every_verb() -> None:
    text = (build.ROOT / "Makefile").read_text(encoding="utf-8")
    assert [v for v in build.VERBS if f"\n{v}:" not in text] == []


def test_plan_json_has_what_the_contract_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "cpu", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    wanted = "plan_id arch lane cache_key tags base env labels versions patches inputs steps".split()
    assert [k for k in wanted if k not in plan] == []


def test_plan_shows_where_a_value_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "cpu") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["versions.vllm", "0.32.0", "arch/cpu.toml"] in rows


def test_archs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("archs", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["archs"]
    assert rows[0]["arch"] == "cpu"


def test_render_to_a_file(tmp_path: Path) -> None:
    assert run("render", "cpu", "-o", str(tmp_path / "Containerfile"), "-q") == 0
    assert (tmp_path / "Containerfile").read_text(encoding="utf-8").count("\nFROM ") > 3


def test_render_to_a_place_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("render", "cpu", "-o", "/no/such/place") == errors.InputError.code
    assert "can't be written" in capsys.readouterr().err


def test_an_unknown_arch_is_one_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "gfx1155") == errors.UnknownArch.code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "error: unknown arch 'gfx1155'"
    assert err.splitlines()[1].startswith("  hint: known: cpu, gfx")
    assert len(err.splitlines()) == 2


def test_a_failure_with_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "gfx9999", "--json") == errors.UnknownArch.code
    told = json.loads(capsys.readouterr().out)
    assert (told["event"], told["code"]) == ("error", errors.UnknownArch.code)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Namespace) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.main({"broken": (broken, "", ())}, ["broken"])


def test_debug_shows_the_traceback_of_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "gfx9999", "--debug") == errors.UnknownArch.code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [errors.Interrupted, errors.Terminated])
def test_interruptions_have_the_shells_codes(kind: type[errors.WarmstartError]) -> None:
    def stopped(_: Namespace) -> int:
        raise kind("stopped")

    assert cli.main({"stopped": (stopped, "", ())}, ["stopped"]) == kind.code


def test_no_image_off_linux(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert run("image", "cpu") == errors.HostUnsupported.code
    assert "Darwin" in capsys.readouterr().err


def test_phases_of_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("phases", "/no/such.log") == errors.InputError.code
    assert len(capsys.readouterr().err.splitlines()) <= 2


def test_a_device_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    import os
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    assert cli.write(str(pipe), "text") == 0
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("place", ["/", ".", "..", ""])
def test_a_folder_is_no_file_to_write(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.InputError):
        cli.write(place, "text")
    assert list(tmp_path.iterdir()) == []


LOG = str(build.ROOT / "tests/unit/data/phases/0.11.2-tp2.log")
QUICK = ["archs", "plan cpu", "explain cpu", "render cpu", "lock cpu --check", f"phases {LOG}", "plan", "render"]


@pytest.mark.parametrize("command", QUICK)
def test_quiet_is_the_result_and_nothing_else(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split()) == 0
    loud = capsys.readouterr()
    assert run(*command.split(), "-q") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == loud.out != ""


def test_what_a_verb_tells_on_its_way_is_not_told_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    def talks(_: Namespace) -> int:
        log.info("on my way")
        with log.step("a step") as step:
            step.note("detail")
        log.warn("but this is told")
        return 0

    verbs: cli.Verbs = {"talks": (talks, "", ())}
    assert cli.main(verbs, ["talks"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 4
    assert cli.main(verbs, ["talks", "-q"]) == 0
    assert capsys.readouterr().err == "warning: but this is told\n"


def test_a_signal_at_the_very_end_or_while_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object) -> int:
        raise errors.Interrupted("stopped by Ctrl-C")

    assert cli.main({"fine": (lambda _: 0, "", ())}, ["fine"], last=lambda: print(again())) == 130
    monkeypatch.setattr(cli, "_tell", again)
    assert run("plan", "gfx9999") == errors.Interrupted.code


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def full(_: Namespace) -> int:
        raise OSError(28, "No space left on device", "/x")

    assert cli.main({"full": (full, "", ())}, ["full"]) == errors.DiskFull.code
    assert "No space left" in capsys.readouterr().err


BUILD = ".venv/bin/python build.py"
WRONG = [
    (["plna"], "there is no verb 'plna'", f"did you mean plan? `{BUILD} --help` lists all", "`make help` lists all"),
    (["seed", "fly"], "seed knows no 'fly'", "there are make, push, pull, verify, ls", ""),
    (["seed", "Pul"], "seed knows no 'Pul'", "did you mean pull?", "did you mean DO=pull?"),
    (["image", "--device", "alway"], "--device can't be 'alway'", "did you mean always?", "did you mean always?"),
    (["plan", "--frozn"], "plan has no option --frozn", "did you mean --frozen?", "`make plan ARGS=--help` shows"),
    (["plan", "--jsn"], "plan has no option --jsn", "did you mean --json?", "did you mean --json?"),
    (["plan", "--chek"], "plan has no option --chek", "--check is an option of lock; `", "of lock; `make plan ARGS=--"),
    (["logs", "-x"], "logs has no option -x", f"`{BUILD} logs --help` shows", "`make logs ARGS=--help` shows"),
    (["exec", "-x"], "exec has no option -x", f"`{BUILD} exec --help` shows", "`make help` shows"),
    (["plan", "cpu", "gfx1151"], "plan takes one arch, not 'gfx1151' as well", "plan gfx1151`", "plan ARCH=gfx1151`"),
    (["up", "a", "b"], "up takes one preset, not 'b' as well", f"`{BUILD} up b`", "`make up PRESET=b`"),
    (["archs", "x"], "archs takes fewer words", f"`{BUILD} archs --help`", "`make archs ARGS=--help`"),
    (["up", "a", "--sett", "k=S3CRET"], "up has no option --sett", "did you mean --set?", "did you mean --set?"),
    (["up", "a", "--sett=k=S3CRET"], "up has no option --sett", "did you mean --set?", "did you mean --set?"),
    (["up", "a", "--set"], "--set needs a value", "--set KEY=VALUE; ", "ARGS='--set KEY=VALUE'; `make up ARGS=--help`"),
    (["up", "a", "--silence", "x"], "--silence can't be 'x'", "--silence SECONDS", "ARGS='--silence SECONDS'"),
    (["plan", "--json=1"], "--json takes no value", "--json", "ARGS='--json'"),
    (["plan", "--d"], "--d can be --dry-run or --debug", "write it out", "write it out"),
    (["up"], "which preset?", f"`{BUILD} up …`; `{BUILD} presets`", "`make up PRESET=…`; `make presets`"),
    (["watch"], "which preset?", f"`{BUILD} watch …`; `{BUILD} status`", "`make watch PRESET=…`; `make status`"),
    (["phases"], "which file?", f"`{BUILD} phases vllm.log`", "`make phases FILE=vllm.log`"),
    (["emit"], "which kind?", f"`{BUILD} emit quadlet …`", "`make emit KIND=quadlet PRESET=…`"),
    ([], "which verb?", f"`{BUILD} --help` lists all", "`make help` lists all"),
]


@pytest.mark.parametrize("by_make", [False, True])
@pytest.mark.parametrize(("words", "told", "hint", "make"), WRONG)
def test_wrong_words_are_one_line_and_a_hint(
    words: list[str],
    told: str,
    hint: str,
    make: str,
    by_make: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by_make:
        monkeypatch.setenv("MAKELEVEL", "1")
        told, hint = told.replace("seed knows no '", "seed knows no 'DO="), make
    assert run(*words) == errors.UsageError.code
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {told}"
    assert second.startswith("  hint: ")
    assert hint in second
    assert "S3CRET" not in first + second
    assert "warmstart" not in first + second  # no such program


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("--version")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"warmstart {warmstart.__version__}\n"


@pytest.mark.parametrize(("words", "code"), [(["logs", "-f"], 0), (["logs"], errors.Interrupted.code)])
def test_ctrl_c_is_the_way_out_of_a_log(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise errors.Interrupted("stopped by Ctrl-C")

    monkeypatch.setattr(engines, "show_log", stopped)
    assert run(*words) == code
    assert bool(capsys.readouterr().err) == bool(code)


def test_a_dry_run_of_the_image_tests_counts_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(recording.recorder, "on", False)
    monkeypatch.setattr(recording.recorder, "commands", [])
    monkeypatch.setattr(build, "STATE", tmp_path)
    monkeypatch.setattr(probe, "probe", lambda _: None)
    monkeypatch.setattr(verify, "plan_of", lambda _, __, plan, ___: plan)
    monkeypatch.setattr(engine, "inspect", lambda *_: Namespace(image_id="sha256:1"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # its tools are not installed for it
    assert run("verify", "cpu", "--image", "x", "--dry-run") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "would test sha256:1" in err
