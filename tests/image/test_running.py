"""How the image behaves when it is started: any UID, read-only root, features that were left out, bad starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from testinfra.host import Host

from tests.image.conftest import LEAST, random_uid
from warmstart import run
from warmstart.plan import Plan

Need = Callable[..., None]
Script = Callable[..., Any]


def start(image: str, *command: str, options: Sequence[str] = (), ok: Sequence[int] = (0,)) -> run.Result:
    """Run one command through the image's own entry script."""
    entry = ["--entrypoint", "/opt/warmstart/start"]
    return run.run(["podman", "run", "--rm", *LEAST, *options, *entry, image, *command], ok=ok)


def test_a_random_uid_can_write_every_cache(image: str, plan: Plan) -> None:
    touches = " && ".join(f"touch {path}/probe" for path in plan.caches.values())
    start(image, "sh", "-c", touches, options=["--user", random_uid()])


def test_vllm_answers_on_a_read_only_root(image: str, plan: Plan, real: Need) -> None:
    real("torch", "vllm")
    done = start(image, "vllm", "--version", options=["--read-only", "--user", random_uid()])
    assert done.stdout.strip().splitlines()[-1].startswith(plan.versions["vllm"])


def test_no_place_for_caches_is_refused_in_one_line(image: str) -> None:
    options = ["--read-only", "--read-only-tmpfs=false", "--user", random_uid(), "--volume", "/usr:/cache:ro"]
    done = start(image, "vllm", "--version", options=options, ok=(65,))
    assert done.stderr.count("\n") == 1
    assert "mount a writable volume at /cache" in done.stderr


@pytest.fixture
def volume() -> Iterator[str]:
    """A new cache volume."""
    name = f"warmstart-test-{os.getpid()}"
    yield name
    run.run(["podman", "volume", "rm", "--force", name])


def test_a_read_only_cache_still_serves(image: str, plan: Plan, volume: str) -> None:
    """What is in it, on a copy; also for another user than the one who filled it."""
    triton = plan.caches["triton"]
    words = f"mkdir {triton}/abc && echo kernel > {triton}/abc/kernel"
    start(image, "sh", "-c", words, options=["--volume", f"{volume}:/cache", "--user", random_uid()])
    words = "cat $TRITON_CACHE_DIR/abc/kernel && echo more > $TRITON_CACHE_DIR/abc/more && echo $TRITON_CACHE_DIR"
    options = ["--read-only", "--user", random_uid(), "--volume", f"{volume}:/cache:ro"]
    done = start(image, "sh", "-c", words, options=options)
    kernel, where = done.stdout.split()
    assert (kernel, where.startswith("/tmp/")) == ("kernel", True)
    assert done.stderr.count("\n") == 1
    assert "works on a copy of it, and what it makes is lost" in done.stderr


def test_a_full_cache_is_told_in_one_line(image: str) -> None:
    options = ["--user", random_uid(), "--tmpfs", "/cache:size=1m,mode=1777"]
    done = start(image, "sh", "-c", "head -c 4000000 /dev/zero > $TRITON_CACHE_DIR/x", options=options)
    assert done.stderr.count("\n") == 1
    assert "is full (1 MB free)" in done.stderr


def test_locks_are_cleared_when_nobody_holds_them(image: str, plan: Plan, volume: str) -> None:
    """Of two containers on one volume the second leaves them alone; the next after both clears them."""
    baton = f"{plan.caches['home']}/.cache/torch_extensions/py3/x/lock"
    lock = f"{plan.caches['inductor']}/locks/x.lock"
    mounted = ["--volume", f"{volume}:/cache", "--user", random_uid()]
    make = f"mkdir -p $(dirname {baton}) $(dirname {lock}) && touch {baton} {lock}"
    entry = ["--entrypoint", "/opt/warmstart/start"]
    first = run.run(
        ["podman", "run", "--detach", "--rm", *LEAST, *mounted, *entry, image, "sh", "-c", f"{make} && sleep 600"]
    ).stdout.strip()
    look = f"for i in $(seq 600); do [ -e {lock} ] && break; sleep 0.1; done; ls {baton} {lock} | wc -l"
    try:
        assert start(image, "sh", "-c", look, options=mounted).stdout.strip() == "2"
    finally:
        run.run(["podman", "rm", "--force", "--time", "0", first])
    done = start(image, "sh", "-c", f"ls {baton} {lock} 2>/dev/null | wc -l", options=mounted)
    assert done.stdout.strip() == "0"


def test_a_second_user_writes_where_the_first_made_folders(image: str, plan: Plan, volume: str) -> None:
    """Whatever the first one's umask was: vLLM and Inductor fill folders that are there already."""
    folder = f"{plan.caches['inductor']}/ab"
    for name in ("first", "second"):
        touches = " ".join(f"{path}/{name}" for path in plan.caches.values())
        words = f"umask 077; mkdir -p {folder} && touch {folder}/{name} {touches}"
        start(image, "sh", "-c", words, options=["--user", random_uid(), "--volume", f"{volume}:/cache"])


def test_triton_keeps_its_place(plan: Plan, python: Script, real: Need) -> None:
    """vLLM and Inductor have each a place of their own for it, from which the next start's verdicts are missing."""
    real("torch", "vllm")
    found = python("triton_dir.py")
    assert set(found.values()) == {plan.caches["triton"]}
    assert len(found) >= 3


def test_the_record_of_a_start(image: str, volume: str) -> None:
    words = (
        'import json, os; lines = open(os.environ["WARMSTART_START"]).read().splitlines(); print(json.loads(lines[0]))'
    )
    done = start(image, "/opt/venv/bin/python", "-c", words, options=["--volume", f"{volume}:/cache"])
    assert "'event': 'start'" in done.stdout
    assert done.stderr == ""


def test_an_unknown_command_is_told_in_one_line(image: str) -> None:
    done = start(image, "no-such-command", ok=(127,))
    assert done.stderr.strip() == "warmstart: no-such-command can't be started: No such file or directory"


def test_what_was_left_out_says_so(host: Host, plan: Plan) -> None:
    messages = plan.cuts.messages()
    assert messages
    for module, message in messages.items():
        done = host.run(f"/opt/venv/bin/python -c 'import {module}'")
        assert done.rc != 0
        assert done.stderr.strip().splitlines()[-1] == f"ModuleNotFoundError: {message}"


def test_hooks_can_be_switched_off(host: Host, plan: Plan) -> None:
    module, message = next(iter(plan.cuts.messages().items()))
    done = host.run(f"WARMSTART_HOOKS=0 /opt/venv/bin/python -c 'import {module}'")
    assert done.rc != 0
    assert message not in done.stderr


def test_hooks_print_nothing(host: Host) -> None:
    done = host.run("/opt/venv/bin/python -c 'print(1)'")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_hooks_are_there_once(host: Host) -> None:
    line = "import sys, warmstart_hooks as h; h.install(); print(sys.meta_path.count(h.LostFinder))"
    assert host.check_output(f"/opt/venv/bin/python -c '{line}'") == "1"


@pytest.mark.parametrize("module", ["torch", "vllm", "transformers", "vllm.entrypoints.openai.api_server"])
def test_imports(host: Host, module: str, real: Need) -> None:
    if module != "torch":
        real("torch", "vllm")
    done = host.run(f"/opt/venv/bin/python -c 'import {module}'")
    assert done.rc == 0, done.stderr


def test_bench_doctor_says_that_there_is_no_gpu(image: str, real: Need) -> None:
    """And a start record that can't be written disturbs nobody."""
    real("torch")
    words = ["/opt/venv/bin/python", "/opt/warmstart/caches/bench_doctor.py"]
    done = start(image, *words, options=["--env", "WARMSTART_START=/proc/version/none"], ok=(3,))
    assert done.stdout == "no GPU: torch sees none\n"
    assert done.stderr == ""
