"""How the image behaves when it is started: any UID, read-only root, features that were left out, bad starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
from testinfra.host import Host

from tests.image.conftest import LEAST, random_uid
from warmstart import run
from warmstart.plan import Plan

Need = Callable[..., None]


def start(image: str, *command: str, options: Sequence[str] = (), ok: Sequence[int] = (0,)) -> run.Result:
    """Run one command through the image's own entry script."""
    entry = ["--entrypoint", "/opt/warmstart/start"]
    return run.run(["podman", "run", "--rm", *LEAST, *options, *entry, image, *command], ok=ok)


def test_a_random_uid_can_write_every_cache(image: str, plan: Plan) -> None:
    touches = " && ".join(f"touch {path}/probe" for path in plan.caches.values())
    start(image, "sh", "-c", touches, options=["--user", random_uid()])


def test_two_uids_share_one_volume(image: str, plan: Plan) -> None:
    volume = f"warmstart-test-{os.getpid()}"
    try:
        for name in ("first", "second"):
            touches = " && ".join(f"touch {path}/{name}" for path in plan.caches.values())
            start(image, "sh", "-c", touches, options=["--user", random_uid(), "--volume", f"{volume}:/cache"])
    finally:
        run.run(["podman", "volume", "rm", "--force", volume])


def test_vllm_answers_on_a_read_only_root(image: str, plan: Plan, real: Need) -> None:
    real("torch", "vllm")
    done = start(image, "vllm", "--version", options=["--read-only", "--user", random_uid()])
    assert done.stdout.strip().splitlines()[-1].startswith(plan.versions["vllm"])


def test_a_read_only_cache_is_refused_in_one_line(image: str) -> None:
    options = ["--read-only", "--user", random_uid(), "--volume", "/usr:/cache:ro"]
    done = start(image, "vllm", "--version", options=options, ok=(65,))
    assert done.stderr.count("\n") == 1
    assert "mount a writable volume at /cache" in done.stderr


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
