"""Run the image tests on an image and write their record, which publishing asks for."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from warmstart import engine, log, run
from warmstart.engine import Capabilities
from warmstart.errors import InputError, SetupFailed, VerifyFailed
from warmstart.names import LABEL
from warmstart.plan import Plan


class Test(msgspec.Struct, frozen=True):
    """One image test: its name, how it ended, and its seconds."""

    name: str
    outcome: str  # passed, failed, skipped
    seconds: float
    message: str = ""


class Verified(msgspec.Struct, frozen=True):
    """`.warmstart/<arch>/verify.json`: the image tests' verdict on one image."""

    image_id: str
    plan_id: str
    passed: int
    failed: int
    skipped: int
    tests: tuple[Test, ...]


def verify(
    root: Path,
    state: Path,
    caps: Capabilities,
    plan: Plan,
    ref: str,
    only: str = "",
    *,
    rehearsal: Path | None = None,
    first: bool = False,
) -> Verified:
    """Test the image `ref`, built from `plan`; write JUnit XML, and verify.json when the whole suite ran.

    `only` is a pytest -k expression for trying a part. `rehearsal` is the record of one: tests that would prove
    nothing on its stand-ins are skipped. With `first` the first test that fails is the last that runs. Raises
    VerifyFailed when a test failed.
    """
    if not importlib.util.find_spec("testinfra") and not run.recorder.on:
        raise SetupFailed("the image tests need pytest-testinfra", hint="tools/setup test engine, or make smoke")
    folder = state / plan.arch
    folder.mkdir(parents=True, exist_ok=True)
    image_id = engine.inspect(caps, ref).image_id
    planned, junit = folder / "plan.json", folder / "verify.xml"
    if run.recorder.on:
        log.info(f"would test {image_id} with tests/image")
        return Verified(image_id, plan.plan_id, 0, 0, 0, ())
    planned.write_bytes(msgspec.json.encode(plan, order="sorted"))
    for old in (junit, folder / "verify.log"):
        old.unlink(missing_ok=True)
    record = folder / "verify.json"
    record.unlink(missing_ok=True)  # a run that is broken off leaves no verdict
    env = engine.environment(caps) | {
        "WARMSTART_IMAGE": image_id,
        "WARMSTART_PLAN": str(planned),
        "WARMSTART_RECORDS": str(folder),
    }
    env |= {"WARMSTART_REHEARSAL": str(rehearsal)} if rehearsal else {}
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        root / "tests" / "image",
        f"--junitxml={junit}",
        "-q",
        "-m",
        "image",
    ]
    command += (["-k", only] if only else []) + (["-x"] if first else [])
    with log.step(f"image tests of {plan.arch}") as step:
        run.run(command, env=env, cwd=root, ok=range(256), log_file=folder / "verify.log", on_line=step.note)
    verdict = read(junit, image_id, plan.plan_id, folder / "verify.log")
    if not only:
        record.write_bytes(msgspec.json.format(msgspec.json.encode(verdict)))
    if verdict.failed or not verdict.passed:
        one = next((t for t in verdict.tests if t.outcome == "failed"), None)
        told = f"{one.name}: {one.message}" if one else "no test ran"
        raise VerifyFailed(f"{verdict.failed} image tests failed: {told}", hint=f"details in {folder / 'verify.log'}")
    return verdict


def plan_of(state: Path, caps: Capabilities, current: Plan, ref: str) -> Plan:
    """The plan that the image `ref` was built from: that of the tree, or of the last build before it changed.

    Raises InputError for an image of any other plan: its tests would compare it with the wrong one.
    """
    told = engine.inspect(caps, ref).labels.get(f"{LABEL}plan-id", "none")
    if told == current.plan_id:
        return current
    last = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # none, or of another version
        last = msgspec.json.decode((state / current.arch / "built-plan.json").read_bytes(), type=Plan)
    if last and last.plan_id == told:
        log.warn(f"the tree has changed since this image was built: make image ARCH={current.arch} builds it anew")
        return last
    raise InputError(
        f"{ref} was built from plan {told[:12]}, this tree plans {current.plan_id[:12]}",
        hint=f"make image ARCH={current.arch}, or go to the revision it was built from",
    )


def read(junit: Path, image_id: str, plan_id: str, log_file: Path) -> Verified:
    """A JUnit file as a record. Raises VerifyFailed when pytest left none."""
    if not junit.is_file():
        raise VerifyFailed("the image tests could not be run", hint=f"see {log_file}")
    tests = tuple(_test(case) for case in ElementTree.parse(junit).iter("testcase"))
    count = {o: sum(t.outcome == o for t in tests) for o in ("passed", "failed", "skipped")}
    return Verified(image_id=image_id, plan_id=plan_id, **count, tests=tests)


def text(verdict: Verified) -> str:
    """For people: the image, then the counts on a line of their own, which CI systems look for."""
    counts = f"{verdict.passed} passed, {verdict.failed} failed, {verdict.skipped} skipped"
    return f"image {verdict.image_id[:19]}\n{counts}"


def _test(case: ElementTree.Element) -> Test:
    outcome, message = "passed", ""
    for kind, meaning in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(kind)) is not None:
            outcome, message = meaning, found.get("message", "").splitlines()[0][:300] if found.get("message") else ""
            if of_file := re.search(r"Skipped: (.+)['\"]\)$", found.text or "", re.MULTILINE):
                message = of_file[1]  # of a whole file: pytest's own message only says that it was one
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    return Test(name=name, outcome=outcome, seconds=float(case.get("time", 0)), message=message)
