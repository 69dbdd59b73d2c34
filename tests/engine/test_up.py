"""`up` and its kin on real podman. The engine is a shell script that writes the lines of a start as it is told to.

What the script says is made up; that it is started, followed, killed, restarted, removed and stopped is real. Starts
of the real image are in tests/image/test_up.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import Checkout, copy, end, free_port, podman, until, watchers
from tests.engine.conftest import EPOCH
from warmstart import engine
from warmstart.engine import Capabilities

IMAGE = "localhost/warmstart-test:up"
SECRET = "hf_" + "x1y2z3" * 4

# Writes the lines of its model's folder: "@gate NAME" waits for a file of that name there, "@exit N" ends. As long as
# there is a file "hold", it does not end when it is told to.
SERVER = """
trap 'echo stopping; while [ -e "$1/hold" ]; do sleep 0.05; done; exit 0' INT TERM
while IFS= read -r line; do
  case "$line" in
    "@gate "*) until [ -e "$1/${line#@gate }" ]; do sleep 0.05; done ;;
    "@exit "*) exit "${line#@exit }" ;;
    *) echo "$line" ;;
  esac
done < "$1/lines"
while :; do sleep 0.1; done
"""

# The phases of a start, each with the lines that lead into it; the gate of a phase stands behind them.
PHASES = {
    "import": ["INFO vLLM server version 0.33.0, serving model m"],
    "engine": [
        "INFO Resolved architecture: Qwen3ForCausalLM",
        "INFO Initializing a V1 LLM engine (v0.33.0) with config: x",
    ],
    "weights": ["INFO Starting to load model /model/m..."],
    "profile": ["INFO Model loading took 0.10 GiB memory and 0.100000 seconds"],
    "compile": ["INFO Starting torch.compile"],
    "kv": ["INFO torch.compile took 0.01 s in total", "INFO Available KV cache memory: 1.00 GiB"],
    "graphs": ["INFO GPU KV cache size: 1,024 tokens", "Capturing CUDA graphs (PIECEWISE): 50%|x| 1/2 [00:00<00:00]"],
    "ready": [
        "INFO Graph capturing finished in 0 secs, took 0.10 GiB",
        "INFO Starting vLLM server on http://0.0.0.0:8000",
    ],
}
LAST = "INFO:     Application startup complete."


def lines_to(phase: str) -> list[str]:
    """The lines of a start up to a phase, and a gate behind them."""
    names = list(PHASES)[: list(PHASES).index(phase) + 1]
    return [*(line for name in names for line in PHASES[name]), "@gate on"]


WHOLE = [*(line for lines in PHASES.values() for line in lines), LAST]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, caps: Capabilities, base: str, state: Path) -> Path:
    """The copy, and the image that its presets name."""
    root = tmp_path_factory.mktemp("checkout")
    copy(root, f"[global]\nimage = {IMAGE}\nport = {free_port()}\n[one]\n[two]\nport = {free_port()}\n")
    context = root / "context"
    context.mkdir()
    (context / "server").write_text(SERVER)
    text = (
        f'FROM {base}\nCOPY server /server\nENTRYPOINT ["/bin/sh", "/server"]\n'
        "LABEL io.warmstart.arch=cpu io.warmstart.vllm=0.33.0\n"
    )
    with engine.hold(state, "up"):
        engine.build(caps, text, context=context, tags=[IMAGE], epoch=EPOCH, log_file=state / "up" / "up.log")
    return root


@pytest.fixture
def checkout(tree: Path) -> Iterator[Checkout]:
    """The copy, with nothing of the test before."""
    shutil.rmtree(tree / "runtime", ignore_errors=True)
    for name in ("starts", "logs"):
        shutil.rmtree(tree / ".warmstart" / name, ignore_errors=True)
    one = Checkout(tree)
    yield one
    one.close()
    podman("rm", "--all", "--force", "--time", "0", check=False)
    assert until(lambda: not watchers(tree)), "a watcher outlived its engine"


def test_up_status_logs_exec_down(checkout: Checkout) -> None:
    model = checkout.model("whole", *WHOLE, f"token {SECRET}")
    code, out, err = end(checkout.up("one", model, "--json"))
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    told = events[-1]
    assert told["record"]["ready"]
    assert [phase["name"] for phase in told["record"]["phases"]] == list(PHASES)
    assert told["wall"] == pytest.approx(told["record"]["seconds"], rel=0.05, abs=0.05)
    ended = [e["name"] for e in events[:-1] if e["event"] == "phase" and e["state"] == "end"]
    assert set(ended) == set(PHASES)
    kept = list((checkout.root / ".warmstart/starts/one").glob("*.jsonl"))
    assert len(kept) == 1
    _, out, _ = checkout.call("status")
    assert out.startswith("one: ready since")
    assert checkout.call("exec", "--", "cat", "/model/m/lines")[1].startswith("INFO vLLM server")
    _, out, _ = checkout.call("logs")
    assert LAST in out
    assert SECRET not in out
    assert len(watchers(checkout.root)) == 1
    assert checkout.call("down")[1] == "stopped one\n"
    assert checkout.seen("one") == ""
    assert checkout.leases() == []
    assert "stopping" in checkout.log("one")  # SIGINT reached it: it was not killed


@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_each_phase_then_started_again(checkout: Checkout, phase: str) -> None:
    model = checkout.model("killed", *lines_to(phase))
    running = checkout.up("one", model)
    checkout.wait_for("one", PHASES[phase][-1])
    podman("kill", "warmstart-one")
    code, _, err = end(running)
    assert code == 83, err
    assert "exit code 137): killed (SIGKILL)" in err
    assert PHASES[phase][-1] in err  # the end of its log is shown
    assert checkout.seen("one") == "exited"  # kept
    assert checkout.leases() == []
    checkout.model("killed", *WHOLE)
    code, _, err = end(checkout.up("one", model))
    assert code == 0, err


def test_a_container_without_a_lease_is_not_just_removed(checkout: Checkout) -> None:
    model = checkout.model("whole", *WHOLE)
    assert end(checkout.up("one", model))[0] == 0
    shutil.rmtree(checkout.root / "runtime")  # as after a clean-up of the runtime folder
    code, _, err = end(checkout.up("one", model))
    assert (code, "runs, and has no lease" in err) == (80, True)
    assert checkout.seen("one") == "running"
    assert "; not by a lease here" in checkout.call("status")[1]
    assert checkout.call("down", "one")[0] == 0
    assert end(checkout.up("one", model))[0] == 0


def test_two_at_once_of_one_preset(checkout: Checkout) -> None:
    model = checkout.model("gated", *lines_to("weights"), *WHOLE)
    pair = [checkout.up("one", model), checkout.up("one", model)]
    assert until(lambda: any(process.poll() is not None for process in pair))
    (model / "on").touch()
    ends = [end(process) for process in pair]
    # Whichever it meets first: the other's lease or its port. Both name it.
    assert sorted(code for code, _, _ in ends) in ([0, 80], [0, 81])
    refused = next(err for code, _, err in ends if code)
    assert re.search(r"one runs already \(starting since|is taken by one \(starting\)", refused), refused


def test_a_second_cold_start_waits_for_the_first(checkout: Checkout) -> None:
    first = checkout.up("one", gated := checkout.model("gated", *lines_to("compile"), *WHOLE))
    checkout.wait_for("one", "Starting torch.compile")
    second = checkout.up("two", checkout.model("whole", *WHOLE))
    assert until(lambda: len(checkout.leases()) == 2)
    time.sleep(1.5)
    assert checkout.seen("two") == ""
    assert "two: starting since" in checkout.call("status")[1]
    (gated / "on").touch()
    code, _, err = end(second)
    assert (code, end(first)[0]) == (0, 0)
    assert "waiting until one is ready" in err
    assert [lease["state"] for lease in checkout.leases()] == ["ready", "ready"]
    code, _, err = checkout.call("down")
    assert code == 2, err
    assert "one or two" in err
    assert checkout.call("down", "one")[0] == 0
    assert [lease["preset"] for lease in checkout.leases()] == ["two"]


def test_down_while_it_starts(checkout: Checkout) -> None:
    running = checkout.up("one", checkout.model("gated", *lines_to("engine")))
    checkout.wait_for("one", "Initializing")
    assert checkout.call("down")[0] == 0
    code, _, err = end(running)
    assert code == 84, err
    assert "stopped or removed by somebody else while it started (engine start)" in err
    assert (checkout.seen("one"), checkout.leases()) == ("", [])


def test_down_while_it_waits_for_another(checkout: Checkout) -> None:
    checkout.up("one", checkout.model("gated", *lines_to("compile")))
    checkout.wait_for("one", "Starting torch.compile")
    waiting = checkout.up("two", checkout.model("whole", *WHOLE))
    assert until(lambda: len(checkout.leases()) == 2)
    assert checkout.call("down", "two")[0] == 0
    assert end(waiting)[0] == 84
    assert checkout.seen("two") == ""


def test_removed_behind_our_back(checkout: Checkout) -> None:
    running = checkout.up("one", checkout.model("gated", *lines_to("weights")))
    checkout.wait_for("one", "Starting to load")
    podman("rm", "--force", "--time", "0", "warmstart-one")
    assert end(running)[0] == 84
    assert end(checkout.up("one", checkout.model("whole", *WHOLE)))[0] == 0
    podman("rm", "--force", "--time", "0", "warmstart-one")
    _, out, _ = checkout.call("status")
    assert "one: gone since" in out
    assert "its container was removed, and not by warmstart" in out
    assert checkout.call("status")[1].startswith("no engine")


def test_ended_behind_our_back(checkout: Checkout) -> None:
    assert end(checkout.up("one", model := checkout.model("whole", *WHOLE)))[0] == 0
    podman("kill", "warmstart-one")
    assert until(lambda: not watchers(checkout.root))
    _, out, _ = checkout.call("status")
    assert "one: ended since" in out
    assert "exit code 137" in out
    assert LAST in checkout.call("logs", "one")[1]
    assert end(checkout.up("one", model))[0] == 0  # its lease blocks nobody


def test_port_taken(checkout: Checkout) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        model = checkout.model("whole", *WHOLE)
        code, _, err = end(checkout.up("one", model, "--set", f"port={port}"))
    assert code == 81
    assert f"port {port} is taken by" in err
    assert f"(pid {os.getpid()})" in err
    assert end(checkout.up("one", model, "--set", f"port={port}"))[0] == 0
    code, _, err = end(checkout.up("two", model, "--set", f"port={port}"))
    assert (code, f"port {port} is taken by one" in err) == (81, True)


def test_the_log_is_followed_across_a_restart(checkout: Checkout) -> None:
    model = checkout.model("gated", *lines_to("compile"), *WHOLE)
    running = checkout.up("one", model, "--json")
    checkout.wait_for("one", "Starting torch.compile")
    before = checkout.leases()[0]
    podman("restart", "--time", "5", "warmstart-one")
    assert until(lambda: checkout.log("one").count("Starting torch.compile") == 2)
    (model / "on").touch()
    code, out, err = end(running)
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told["record"]["ready"]
    assert told["record"]["seconds"] == pytest.approx(told["wall"], abs=0.05)  # of the second start alone
    assert any(event.get("state") == "restart" for event in map(json.loads, out.splitlines()))
    after = checkout.leases()[0]
    assert after["process"] != before["process"]
    assert checkout.call("status")[1].startswith("one: ready since")


def test_restarted_when_it_was_ready(checkout: Checkout) -> None:
    assert end(checkout.up("one", checkout.model("whole", *WHOLE)))[0] == 0
    before = checkout.leases()[0]["process"]
    podman("restart", "--time", "5", "warmstart-one")
    assert until(lambda: bool(checkout.leases()) and checkout.leases()[0]["process"] != before)
    assert until(lambda: checkout.call("status")[1].startswith("one: ready since"))
    assert len(watchers(checkout.root)) == 1


@pytest.mark.parametrize("way", ["down", "Ctrl-C"])
def test_status_while_it_is_stopped(checkout: Checkout, way: str) -> None:
    model = checkout.model("gated", *lines_to("weights"))
    (hold := model / "hold").touch()
    running = checkout.up("one", model)
    checkout.wait_for("one", "Starting to load")
    stopper = running
    if way == "down":
        stopper = checkout.start("down")
    else:
        running.send_signal(signal.SIGINT)
    told = []
    while stopper.poll() is None:
        told.append(checkout.call("status")[1].splitlines()[0])
        if "stopping" in told[-1]:
            hold.unlink(missing_ok=True)
    end(stopper)
    states = {re.sub(r" since.*", "", line) for line in told}
    assert "one: stopping" in states
    assert states <= {"one: starting", "one: stopping", "no engine"}, told


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_stops_it(checkout: Checkout, number: int, code: int) -> None:
    running = checkout.up("one", checkout.model("gated", *lines_to("weights")))
    checkout.wait_for("one", "Starting to load")
    running.send_signal(number)
    assert end(running)[0] == code
    assert (checkout.seen("one"), checkout.leases()) == ("", [])


def test_detached_it_becomes_ready_by_itself(checkout: Checkout) -> None:
    model = checkout.model("gated", *lines_to("weights"), *WHOLE)
    code, out, err = end(checkout.up("one", model, "--detach"))
    assert code == 0, err
    assert out.startswith(
        "one starts: `.venv/bin/python build.py status` shows when it is ready, to answer at http://127.0.0.1:"
    )
    assert "one: starting since" in checkout.call("status")[1]
    assert "it doesn't answer yet" in end(checkout.up("one", model))[2]
    (model / "on").touch()
    assert until(lambda: checkout.leases()[0]["state"] == "ready")
    assert until(lambda: bool(list((checkout.root / ".warmstart/starts/one").glob("*.jsonl"))))


def test_detached_and_failed_it_gives_everything_back(checkout: Checkout) -> None:
    model = checkout.model(
        "bad", *lines_to("weights"), "ValueError: No available memory for the cache blocks.", "@exit 1"
    )
    assert end(checkout.up("one", model, "--detach"))[0] == 0
    (model / "on").touch()
    assert until(lambda: checkout.leases() == [])
    watched = (checkout.root / ".warmstart/logs/warmstart-one/watch.txt").read_text()
    assert "nothing of the budget is left for its KV cache" in watched


def test_when_up_is_killed_the_engine_goes_on(checkout: Checkout) -> None:
    model = checkout.model("gated", *lines_to("weights"), *WHOLE)
    running = checkout.up("one", model)
    checkout.wait_for("one", "Starting to load")
    running.kill()
    end(running)
    (model / "on").touch()
    assert until(lambda: checkout.leases()[0]["state"] == "ready")
    assert checkout.call("down")[0] == 0


def test_a_bad_start_is_diagnosed_and_kept(checkout: Checkout) -> None:
    fatal = "torch.AcceleratorError: HIP error: invalid device function"
    model = checkout.model("bad", *WHOLE[:4], fatal, "@exit 1")
    code, _, err = end(checkout.up("one", model))
    assert code == 83
    assert "ended in the phase weights (exit code 1): the image holds no device code for this GPU" in err
    assert f"  > {fatal}" in err
    assert "`.venv/bin/python build.py image`" in err
    assert "`.venv/bin/python build.py logs one` shows its whole log" in err
    assert fatal in checkout.call("logs", "one")[1]
    assert checkout.seen("one") == "exited"
    # There is no lease, but a container, and it is the only one.
    assert re.match(
        r"one: ended since .*; exit code 1; `.venv/bin/python build.py logs one` shows", checkout.call("status")[1]
    )
    assert fatal in checkout.call("logs")[1]
    assert checkout.call("down")[1] == "stopped one\n"
    assert checkout.seen("one") == ""
    assert "no engine runs" in checkout.call("down")[2]


def test_the_watcher_stops_it_before_the_machine_stalls(checkout: Checkout) -> None:
    """With limits that any machine passes: the engine is stopped, and the reason is told."""
    file = checkout.root / "arch" / "guard.toml"
    text = file.read_text()
    changed = "\n".join(
        "least-available = 9_000_000_000_000_000" if line.startswith("least-available") else line
        for line in text.splitlines()
    )
    file.write_text(changed)
    try:
        code, _, err = end(checkout.up("one", checkout.model("gated", *lines_to("weights"))))
    finally:
        file.write_text(text)
    assert code == 77, err
    assert "of memory is available" in err


def test_secrets_reach_the_container_and_nothing_else(checkout: Checkout) -> None:
    model = checkout.model("whole", *WHOLE)
    code, out, err = end(checkout.up("one", model, "--debug", "--set", f"env.HF_TOKEN={SECRET}"))
    assert code == 0, err
    assert "--env=HF_TOKEN" in err
    assert SECRET not in out + err
    kept = [file for file in (checkout.root / ".warmstart").rglob("*") if file.is_file()]
    assert not [file for file in kept if SECRET.encode() in file.read_bytes()]
    assert f"HF_TOKEN={SECRET}" in podman("inspect", "warmstart-one").stdout
    assert SECRET not in checkout.call("status", "--json")[1]
    checkout.call("down")
    other = SECRET[:-4] + "9999"  # of the user's own environment
    code, out, err = end(checkout.start("up", "one", "--set", f"model={model}", "--debug", env={"HF_TOKEN": other}))
    assert code == 0, err
    assert other not in out + err
    assert f"HF_TOKEN={other}" in podman("inspect", "warmstart-one").stdout


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["nothing"], 70, "unknown preset 'nothing'"),
        (["one", "--set", "model=/no/such/folder"], 82, "there is no model in /no/such/folder"),
        (["one", "--set", "image=localhost/no:image"], 53, "there is no image localhost/no:image here"),
        (["one", "--set", "archs=gfx1151"], 72, "one is not for cpu"),
    ],
)
def test_refused_before_anything_is_started(checkout: Checkout, words: list[str], code: int, told: str) -> None:
    found, _, err = checkout.call("up", *words)
    assert found == code, err
    assert told in err
    assert (checkout.seen("one"), checkout.leases()) == ("", [])
