"""`image/start`, the entry point: GPUs, flags and odd commands, up to the exec. Caches: test_start_caches.py."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest

from tests.unit.starting import TOLD, Gpu, Start, load
from warmstart import cuts, host, lock, manifest, plan, profile

ROOT = Path(__file__).parents[2]
SERVE = {"attention-backend": "TRITON_ATTN", "max-num-batched-tokens": "8192", "no-fuss": ""}


IGPU = Gpu(100306, 0x1400)  # gfx1036 of a desktop Ryzen, at 0000:14:00.0
RX7600 = Gpu(110002, 0x0300)  # gfx1102 at 0000:03:00.0
R9700 = Gpu(120001, 0x0C00, unique=0xAB12CD34)  # gfx1201 at 0000:0c:00.0
STRIX = Gpu(110501, 0xC400)  # gfx1151 at 0000:c4:00.0
MI300X = [Gpu(90402, 0x0500 + (i << 12), domain=i // 4, unique=0x1000 + i) for i in range(8)]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    return load(tmp_path, monkeypatch)


def gpus_told() -> dict[str, str]:
    return {name: os.environ[name] for name in TOLD if name in os.environ}


# --- GPUs -------------------------------------------------------------------------


def test_strix_halo_alone_needs_no_choice(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start.machine(STRIX)
    assert start("gfx1151", "vllm", "--version") == ["vllm", "--version"]
    assert gpus_told() == {}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arch", "card", "pci"), [("gfx1102", RX7600, "0000:03:00.0"), ("gfx1201", R9700, "0000:0c:00.0")]
)
def test_the_card_is_used_when_an_igpu_comes_first(
    start: Start, arch: str, card: Gpu, pci: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start.machine(IGPU, card)
    start(arch, "vllm", "serve")
    assert gpus_told() == {"HIP_VISIBLE_DEVICES": "1", "WARMSTART_GPUS": f"0000:14:00.0,{pci}"}
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"using {arch} at {pci}, not gfx1036 at 0000:14:00.0" in told


def test_nodes_are_in_the_order_of_their_numbers(start: Start) -> None:
    """By name 10 comes before 9; HIP counts by number."""
    start.machine(IGPU, R9700, processors=9)
    start("gfx1201", "vllm", "serve")
    assert os.environ["HIP_VISIBLE_DEVICES"] == "1"


def test_two_cards_beside_an_igpu(start: Start) -> None:
    start.machine(R9700, IGPU, R9700._replace(location=0x2100))
    start("gfx1201", "vllm", "serve")
    assert gpus_told() == {
        "HIP_VISIBLE_DEVICES": "0,2",
        "WARMSTART_GPUS": "0000:0c:00.0,0000:14:00.0,0000:21:00.0",
    }


def test_eight_equal_gpus_are_all_used_without_a_word(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start.machine(*MI300X, processors=2)
    start("gfx942", "vllm", "serve")
    assert "HIP_VISIBLE_DEVICES" not in os.environ
    listed = os.environ["WARMSTART_GPUS"].split(",")
    assert (len(listed), listed[0], listed[7]) == (8, "0000:05:00.0", "0001:75:00.0")
    assert capsys.readouterr().err == ""


def test_addresses_are_those_of_the_host_module(start: Start) -> None:
    for gpu in (IGPU, R9700, Gpu(110000, 0x03FB, domain=0x10)):
        assert start.gpus.pci_address(gpu.domain, gpu.location) == host._pci(gpu.domain, gpu.location)
        assert start.gpus.target_name(gpu.version) == host.target_name(gpu.version)


def test_what_a_container_may_not_use_is_no_gpu(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """HIP doesn't count it, but amdsmi may list it, so the address of the other is told."""
    start.machine(R9700, unreadable=2)
    start("gfx1201", "vllm", "serve")
    assert gpus_told() == {"WARMSTART_GPUS": "0000:0c:00.0"}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text", [b"gfx_target_version many\n", b"\xff\xfe gfx\n", b"gfx_target_version\n", b"", b"9" * 9999]
)
def test_broken_properties_are_no_gpu(start: Start, text: bytes) -> None:
    start.machine()
    (start.nodes / "1").mkdir()
    (start.nodes / "1" / "properties").write_bytes(text)
    start("gfx1201", "vllm", "serve")
    assert gpus_told() == {}


def test_other_folders_beside_the_nodes(start: Start) -> None:
    start.machine(R9700)
    (start.nodes / "power").mkdir()
    start("gfx1201", "vllm", "serve")
    assert gpus_told() == {}


@pytest.mark.parametrize("arch", ["gfx1201", "cpu"])
def test_a_machine_without_the_driver(start: Start, arch: str) -> None:
    start(arch, "vllm", "serve")
    assert gpus_told() == {}


def test_the_cpu_image_leaves_gpus_alone(start: Start) -> None:
    start.machine(IGPU, R9700)
    start("cpu", "vllm", "serve")
    assert gpus_told() == {}


def refused(start: Start, arch: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        start.gpus.settle(arch)
    assert left.value.code == 64
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


def test_a_machine_of_other_archs_is_refused(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start.machine(IGPU, RX7600)
    told = refused(start, "gfx1201", capsys)
    assert "this image is for gfx1201, this machine has gfx1036, gfx1102: use the image of that arch" in told


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_a_choice_that_leaves_the_wrong_gpu_is_refused(
    start: Start, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start.machine(IGPU, R9700)
    monkeypatch.setenv(name, "0")
    assert f"{name} leaves gfx1036" in refused(start, "gfx1201", capsys)


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_the_users_choice_by_hip_stands(start: Start, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks its numbers up in the list of all that HIP counts."""
    start.machine(IGPU, R9700, RX7600)
    monkeypatch.setenv(name, "1")
    start("gfx1201", "vllm", "serve")
    assert gpus_told() == {name: "1", "WARMSTART_GPUS": "0000:14:00.0,0000:0c:00.0,0000:03:00.0"}


@pytest.mark.parametrize("setting", ["1", "GPU-00000000ab12cd34", "gpu-00000000AB", "1,9,0", "1, no"])
def test_what_rocr_hides_hip_does_not_count(start: Start, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start.machine(IGPU, R9700)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", setting)
    start("gfx1201", "vllm", "serve")
    assert gpus_told() == {"ROCR_VISIBLE_DEVICES": setting, "WARMSTART_GPUS": "0000:0c:00.0"}


def test_rocr_also_sets_the_order(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.machine(*MI300X)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "3,1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    start("gfx942", "vllm", "serve")
    assert os.environ["WARMSTART_GPUS"] == "0000:35:00.0,0000:15:00.0"


def test_an_empty_hip_variable_is_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.machine(IGPU, R9700)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    start("gfx1201", "vllm", "serve")
    assert os.environ["HIP_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("name", "value"), [("ROCR_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "-1"), ("HIP_VISIBLE_DEVICES", "x")]
)
def test_hiding_every_gpu_is_left_to_vllm(start: Start, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start.machine(IGPU, R9700)
    monkeypatch.setenv(name, value)
    start("gfx1201", "vllm", "serve")
    assert gpus_told() == {name: value}


def test_a_given_list_of_addresses_stands(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.machine(IGPU, R9700)
    monkeypatch.setenv("WARMSTART_GPUS", "0000:99:00.0")
    start("gfx1201", "vllm", "serve")
    assert os.environ["WARMSTART_GPUS"] == "0000:99:00.0"


# --- flags of the arch ----------------------------------------------------------------

ADDED = ["--attention-backend", "TRITON_ATTN", "--max-num-batched-tokens", "8192", "--no-fuss"]


def test_flags_of_the_arch_follow_the_users(start: Start) -> None:
    given = ["vllm", "serve", "/models/x", "--port", "1"]
    assert start("cpu", *given, serve=SERVE) == given + ADDED
    assert start("cpu", "/opt/venv/bin/vllm", "serve", serve=SERVE)[2:] == ADDED


@pytest.mark.parametrize(
    "given", [["vllm", "bench", "serve"], ["vllm"], ["python", "serve"], ["vllm", "serving"], ["serve"]]
)
def test_no_other_command_gets_them(start: Start, given: list[str]) -> None:
    assert start("cpu", *given, serve=SERVE) == given


def test_images_without_flags(start: Start) -> None:
    assert start("cpu", "vllm", "serve") == ["vllm", "serve"]
    assert start("cpu", "vllm", "serve", serve={}) == ["vllm", "serve"]


@pytest.mark.parametrize("arch", profile.archs(ROOT))
def test_a_profiles_flags_reach_the_command(start: Start, arch: str) -> None:
    """Through the manifest, and in the form that the script compares."""
    loaded = profile.load(ROOT, arch)
    planned = plan.make(ROOT, loaded, lock.parse(lock.committed(ROOT, arch)), cuts.load(ROOT, loaded.profile))
    serve = manifest.manifest(planned)["serve"]
    assert serve == loaded.profile.serve
    assert [flag for flag in serve if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", flag)] == []
    command = start("cpu", "vllm", "serve", "model", serve=serve)
    assert len(command) == 3 + sum(2 if value else 1 for value in serve.values())


@pytest.mark.parametrize(
    "given",
    [
        ["--attention-backend", "ROCM_ATTN"],
        ["--attention-backend=ROCM_ATTN"],
        ["--attention_backend", "ROCM_ATTN"],
        ["--attention_backend=ROCM_ATTN"],
        ["--attention-b", "ROCM_ATTN"],  # argparse takes what is short but clear
        ["--no-attention-backend"],
        ["--attention-config.backend", "ROCM_ATTN"],  # beside which vLLM refuses the flag
        ["--attention_config.backend=ROCM_ATTN"],
        ["--attention-config", '{"backend": "ROCM_ATTN"}'],
        ["-ac.backend", "ROCM_ATTN"],
        ["-ac", '{"backend": "ROCM_ATTN"}'],
    ],
)
def test_what_the_user_says_is_not_said_again(start: Start, given: list[str]) -> None:
    command = ["vllm", "serve", "/models/x", *given]
    assert start("cpu", *command, serve=SERVE) == command + ADDED[2:]


@pytest.mark.parametrize(
    "given",
    [
        ["--attention-backend-of"],
        ["--max-num-seqs", "4"],
        ["attention-backend"],
        ["--"],
        ["-a"],
        ["--served-model-name", "x:attention-backend"],
    ],
)
def test_what_only_looks_like_it_is_no_answer(start: Start, given: list[str]) -> None:
    assert start("cpu", "vllm", "serve", *given, serve=SERVE)[2:] == given + ADDED


@pytest.mark.parametrize(
    "line",
    [
        "attention-backend: X",
        "attention_backend : X",
        "--attention-backend: X",
        '{"attention-backend": "X"}',
        "attention-config:\n  backend: X",
    ],
)
@pytest.mark.parametrize("joined", [True, False])
def test_a_configuration_file_counts(start: Start, line: str, joined: bool) -> None:
    file = start.folder / "config.yaml"
    file.write_text(f"model: /models/x\n{line}\nport: 1\n")
    given = ["vllm", "serve", *([f"--config={file}"] if joined else ["--config", str(file)])]
    assert start("cpu", *given, serve=SERVE) == given + ADDED[2:]


@pytest.mark.parametrize("file", ["missing.yaml", "", ".", "a\0b", "x" * 5000, "pipe"])
def test_a_configuration_file_that_is_none(start: Start, file: str) -> None:
    os.mkfifo(start.folder / "pipe")  # would wait for ever when it was read
    given = ["vllm", "serve", "--config", str(start.folder / file) if file else ""]
    assert start("cpu", *given, serve=SERVE) == given + ADDED


def test_a_binary_configuration_file(start: Start) -> None:
    file = start.folder / "config.yaml"
    file.write_bytes(b"\xff\0attention-backend: X")
    assert start("cpu", "vllm", "serve", "--config", str(file), serve=SERVE)[4:] == ADDED[2:]


# --- local models, odd commands -------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "--model {}", "--model={}", "--port 1 --model {}"])
def test_a_local_model_needs_no_hub(start: Start, form: str) -> None:
    start("cpu", "vllm", "serve", *form.format(start.folder).split())
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("model", ["org/name", "", "a\0b", "x" * 100_000, "--model", "--model="])
def test_any_other_model_may_ask_the_hub(start: Start, model: str) -> None:
    assert start("cpu", "vllm", "serve", model) == ["vllm", "serve", model]
    assert "HF_HUB_OFFLINE" not in os.environ


def test_the_users_word_on_the_hub_stands(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    start("cpu", "vllm", "serve", str(start.folder))
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_no_command(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start.caches = {}
    start.manifest("cpu")
    with pytest.raises(SystemExit) as left:
        start.module.main([])
    assert left.value.code == 2
    assert capsys.readouterr().err == "warmstart: no command given\n"


def test_ctrl_c_ends_it_in_one_line(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(start.parts["start_caches"], "prepare", prepare)
    start.manifest("cpu")
    with pytest.raises(SystemExit) as left:
        start.module.main(["vllm", "serve"])
    assert left.value.code == 130
    assert capsys.readouterr().err == "warmstart: stopped before the command began\n"


class Full(io.StringIO):
    """A stderr that can't be written: a full disk, or a pipe that nobody reads."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stderr", [Full(), None, "closed"])
def test_a_stderr_that_cannot_be_written(
    start: Start, stderr: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it is on stdout, and Python, which writes what is left in it at its end, finds nothing to do."""
    if stderr == "closed":
        stderr = io.StringIO()
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    start.machine(IGPU, R9700)
    start("gfx1201", "vllm", "serve")
    assert sys.stderr is None
    assert capsys.readouterr().out == ""


def test_a_closed_stdin_is_opened(start: Start) -> None:
    """Else the next file that is opened would be the command's stdin."""
    kept = os.dup(0)
    try:
        os.close(0)
        start("cpu", "vllm", "serve")
        assert os.readlink("/proc/self/fd/0") == os.devnull
        assert os.get_inheritable(0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@pytest.mark.parametrize("command", [["vllm\0"], [""], ["/"], ["no-such-program"], ["x" * 5000], ["\udcff"], ["a\nb"]])
def test_what_cannot_be_started_is_told_in_one_line(
    start: Start, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execvp(file: str, args: list[str]) -> None:
        if "\0" in file:
            raise ValueError("embedded null byte")
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "execvp", execvp)
    start.caches = {}
    start.manifest("cpu", serve=SERVE)
    with pytest.raises(SystemExit) as left:
        start.module.main(command)
    assert left.value.code == 127
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "can't be started" in told
