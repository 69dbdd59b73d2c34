"""Records, replays and seeds with real Triton wheels, each run in a Python of its own.

There is no GPU: pretended_gpu.py has a stand-in driver that says which AMD GPU is meant and launches nothing. What is
proven here is Triton's own: which keys it looks up, what it compiles, what it finds. That a real GPU asks for the same
is proven in tests/device, and for NVIDIA by bench/seed_keys.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmstart import run

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
WHEELS = ROOT / ".warmstart" / "test-triton"
LATEST = "3.8.0"  # what the archs' images have
KERNELS = 7  # that pretended_gpu.py uses, four of them of the one autotuner
CONFIGS = 4
PLATFORMS = ["manylinux2014_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64"]

pytestmark = pytest.mark.net


def triton(version: str, python: str = "") -> Path:
    """A folder with this Triton, kept for later runs, for this Python or another. Without ptxas and the profiler."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = version if python in {"", own} else f"{version}-{python}"
    folder = WHEELS / name
    if not folder.is_dir():
        wheels = WHEELS / f"wheel-{name}"
        words = [
            sys.executable,
            *"-m pip download --quiet --no-deps --only-binary=:all: --python-version".split(),
            python or own,
        ]
        words += [word for platform in PLATFORMS for word in ("--platform", platform)]
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        run.run([*words, "--dest", str(wheels), f"triton=={version}"], env=pip)
        partial = WHEELS / f"{name}.new"
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            names = [
                n for n in wheel.namelist() if not n.startswith(("triton/backends/nvidia/bin/", "triton/profiler/"))
            ]
            wheel.extractall(partial, [n for n in names if "/cupti/" not in n])
        shutil.rmtree(wheels)
        partial.rename(folder)
    return folder


class Machine:
    """A machine with a Triton, a pretended GPU, a cache volume and perhaps a seed."""

    def __init__(self, folder: Path, version: str, arch: str, wave: int) -> None:
        self.folder, self.arch, self.wave = folder, arch, wave
        self.path = f"{HERE}:{ROOT / 'sitecustomize'}:{triton(version)}"
        self.volume, self.seed = folder / "volume", folder / "seed"

    def python(self, *words: object, **env: str) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("WARMSTART_", "TRITON_"))}
        clean |= {"PYTHONPATH": self.path, "HOOKS": str(ROOT / "sitecustomize"), "TRITON_DEFAULT_FP_FUSION": "1"}
        clean |= {"TRITON_CACHE_AUTOTUNING": "1", "WARMSTART_HOOK_WORKERS": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        argv = [sys.executable, *map(str, words)]
        return subprocess.Popen(argv, env=clean | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def begin(self, *what: str, **env: str) -> subprocess.Popen[str]:
        """A run of the image on its GPU."""
        image = {
            "TRITON_CACHE_MANAGER": "warmstart_cache:SeededCacheManager",
            "TRITON_CACHE_DIR": str(self.volume / "triton"),
            "WARMSTART_VERDICTS": str(self.volume / "verdicts"),
            "WARMSTART_SEED": str(self.seed),
            "WARMSTART_CU": "40",
        }
        return self.python(HERE / "pretended_gpu.py", self.arch, self.wave, *what, **image | env)

    def use(self, *what: str, **env: str) -> Any:
        """What such a run did; `said` is its stderr."""
        return finished(self.begin(*what, **env))

    def recorded(self, **env: str) -> Path:
        """The record of a first run without any cache, which is left in `first`."""
        rows = self.folder / "rows"
        self.first = self.use(
            WARMSTART_RECORD=str(rows),
            TRITON_CACHE_DIR=str(self.folder / "first"),
            WARMSTART_SEED="/nowhere",
            WARMSTART_VERDICTS=str(self.folder / "first-verdicts"),
            **env,
        )
        out = self.folder / "record.json"
        tool(self.python(ROOT / "caches/record.py", rows, "-o", out))
        return out

    def replayed(self, record: Path, *more: object) -> Any:
        """What a replay into the seed did, where nothing of the first run can be found."""
        return json.loads(tool(self.python(ROOT / "caches/replay.py", "--out", self.seed, record, *more))[0])


def tool(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out, err


def finished(process: subprocess.Popen[str]) -> Any:
    out, err = tool(process)
    return {**json.loads(out), "said": [line for line in err.splitlines() if line.startswith("warmstart:")]}


def content(folder: Path) -> dict[str, bytes]:
    """Path → bytes of every file below a folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A gfx1151 with a seed made from its record."""
    machine = Machine(tmp_path_factory.mktemp("gfx1151"), LATEST, "gfx1151", 32)
    machine.done = machine.replayed(machine.recorded())  # type: ignore[attr-defined]
    return machine


@pytest.fixture
def machine(made: Machine, tmp_path: Path) -> Iterator[Machine]:
    """The same with an empty volume and a seed of its own, in another place than it was made in."""
    other = Machine(tmp_path, LATEST, made.arch, made.wave)
    other.first = made.first
    shutil.copytree(made.seed, other.seed)
    kept = made.seed.rename(made.seed.with_name("moved away"))
    yield other
    kept.rename(made.seed)


@pytest.mark.parametrize(
    ("version", "arch", "wave"), [(LATEST, "gfx1151", 32), (LATEST, "gfx942", 64), ("3.6.0", "gfx1151", 32)]
)
def test_a_replay_has_the_keys_and_the_code_of_the_run(tmp_path: Path, version: str, arch: str, wave: int) -> None:
    gpu = Machine(tmp_path, version, arch, wave)
    done = gpu.replayed(gpu.recorded())
    assert gpu.first["found"] == []
    assert (len(gpu.first["compiled"]), len(gpu.first["benched"])) == (KERNELS, CONFIGS)
    assert done["target"] == {"backend": "hip", "arch": arch, "warp_size": wave}
    assert (done["kernels"], done["recorded under the same key"]) == (KERNELS, f"{KERNELS} of {KERNELS}")
    assert (done["verdicts"], done["left out"]) == (1, 0)
    code = {path: data for path, data in content(tmp_path / "first").items() if path.endswith(".hsaco")}
    assert len(code) == KERNELS
    assert {path: data for path, data in content(gpu.seed / "triton").items() if path.endswith(".hsaco")} == code
    assert not list(gpu.seed.rglob("*.amdgcn"))
    shutil.rmtree(tmp_path / "first")
    again = gpu.use()
    assert (again["compiled"], again["benched"], again["said"]) == ([], [], [])
    assert again["winners"] == gpu.first["winners"]
    assert set(again["found"]) <= set(gpu.first["compiled"])


def test_a_replay_in_the_build_of_an_image(made: Machine, tmp_path: Path) -> None:
    """As the stage `kernels` runs it: isolated, the checkout's folders mounted, hooks not installed yet."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python3.*/site-packages")
    (site / "build.pth").write_text(f"{triton(LATEST)}\n{HERE}\n")
    for name in ("caches", "sitecustomize"):
        shutil.copytree(ROOT / name, tmp_path / "ws" / name)
    command: list[str | Path] = [venv / "bin/python", "-IB", tmp_path / "ws/caches/replay.py"]
    command += ["--out", tmp_path / "seed", "--arch", made.arch, made.folder / "record.json"]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kernels"] == KERNELS


@pytest.mark.parametrize(("recorded", "image"), [("3.6.0", LATEST), (LATEST, "3.6.0")])
def test_a_record_of_another_triton_is_compiled_under_this_ones_keys(
    tmp_path: Path, recorded: str, image: str
) -> None:
    """Constants have attributes of their own in either; they are part of a kernel's key."""
    record = Machine(tmp_path / "recorded", recorded, "gfx1151", 32).recorded()
    other = Machine(tmp_path / "image", image, "gfx1151", 32)
    done = other.replayed(record)
    assert (done["kernels"], done["recorded under the same key"], done["left out"]) == (KERNELS, "0 of 0", 0)
    assert other.use()["compiled"] == []


def test_the_record_is_small_and_says_nothing_about_the_machine(made: Machine) -> None:
    text = (made.folder / "record.json").read_text()
    assert len(text) < 4096
    assert str(made.folder) not in text
    assert str(WHEELS) not in text
    assert json.loads(text)["cu"] == 40


def test_a_warm_run_can_be_recorded(machine: Machine) -> None:
    rows = machine.folder / "rows"
    machine.use(WARMSTART_RECORD=str(rows))
    out = machine.folder / "record.json"
    tool(machine.python(ROOT / "caches/record.py", rows, "-o", out))
    record = json.loads(out.read_text())
    used = KERNELS - CONFIGS + 1  # the winner alone
    assert sum(len(group["variants"]) for group in record["kernels"]) == used
    assert len(record["verdicts"]) == 1
    machine.seed = machine.folder / "smaller"
    machine.volume = machine.folder / "other"
    assert machine.replayed(out)["kernels"] == used
    again = machine.use()
    assert (again["compiled"], again["benched"]) == ([], [])


def test_a_seed_is_only_read_and_what_is_used_lands_on_the_volume(machine: Machine) -> None:
    before = content(machine.seed)
    machine.use()
    assert content(machine.seed) == before
    kept = content(machine.volume / "triton")
    assert {path: before[f"triton/{path}"] for path in kept} == kept
    assert sum(path.endswith(".hsaco") for path in kept) == KERNELS - CONFIGS + 1
    shutil.rmtree(machine.seed)
    again = machine.use("add", "scale")
    assert again["compiled"] == []


def test_what_no_seed_has_is_compiled_and_kept(machine: Machine) -> None:
    shutil.rmtree(machine.seed)
    assert len(machine.use()["compiled"]) == KERNELS
    again = machine.use()
    assert (again["compiled"], again["benched"]) == ([], [])


BROKEN: dict[str, Callable[[Path], object]] = {
    "code is cut off": lambda entry: os.truncate(next(entry.glob("*.hsaco")), 1500),
    "code is empty": lambda entry: os.truncate(next(entry.glob("*.hsaco")), 0),
    "metadata is empty": lambda entry: os.truncate(next(entry.glob("[!_]*.json")), 0),
    "metadata is something else": lambda entry: next(entry.glob("[!_]*.json")).write_text('{"a": 1}'),
    "the index is cut off": lambda entry: os.truncate(next(entry.glob("__grp__*")), 20),
    "the index is no object": lambda entry: next(entry.glob("__grp__*")).write_text("[1]"),
    "a file is missing": lambda entry: next(entry.glob("*.hsaco")).unlink(),
    "there is no index": lambda entry: next(entry.glob("__grp__*")).unlink(),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_entry_costs_one_compilation(machine: Machine, how: str) -> None:
    """On the volume it comes back from the seed; broken in the seed too, it is compiled, once."""
    machine.use("scale")
    name = next((machine.volume / "triton").glob("*/scale.hsaco")).parent.name
    BROKEN[how](machine.volume / "triton" / name)
    assert machine.use("scale")["compiled"] == []
    for root in (machine.volume, machine.seed):
        BROKEN[how](root / "triton" / name)
    assert len(machine.use("scale")["compiled"]) == 1
    assert machine.use("scale")["compiled"] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"configs_timings": []}',
        '{"configs_timings": [[{"kwargs": {}, "of another Triton": 1}, [1.0]]]}',
        '{"configs_timings": [[{"kwargs": {"BLOCK": 64}}, ["soon"]]]}',
        '{"configs_timings": [[{"kwargs": {"BLOCK": 64}}, [1.0]], [{"kwargs": {"BLOCK": 128}}, 1.0]]}',
    ],
)
def test_a_broken_verdict_is_measured_again(machine: Machine, text: str) -> None:
    file = next((machine.seed / "verdicts/cu40").rglob("*.autotune.json"))
    file.write_text(text)
    assert len(machine.use("tuned")["benched"]) == CONFIGS
    assert machine.use("tuned")["benched"] == []


def test_verdicts_of_another_number_of_compute_units_are_not_used(machine: Machine) -> None:
    other = machine.use(WARMSTART_CU="60")
    assert (other["compiled"], len(other["benched"])) == ([], CONFIGS)
    assert machine.use(WARMSTART_CU="60")["benched"] == []
    assert len(machine.use(WARMSTART_CU="")["benched"]) == CONFIGS
    assert machine.use()["benched"] == []
    assert sorted(path.name for path in (machine.volume / "verdicts").iterdir()) == ["cu0", "cu60"]


def test_a_ban_reaches_the_autotuner_and_the_replay(machine: Machine, made: Machine) -> None:
    bans = machine.folder / "bans.toml"
    ban = '[[ban]]\nkernel = "tun*"\narch = "gfx115?"\nconfig = { BLOCK = 128, num_warps = 2 }\nwhy = ""\nlink = ""\n'
    bans.write_text(ban)
    assert "BLOCK: 128, num_warps: 2" in str(made.first["winners"])
    live = machine.use("tuned", BANS=str(bans))  # the seed was made without: another list, another key
    assert len(live["benched"]) == CONFIGS - 1
    shutil.rmtree(machine.seed)
    shutil.rmtree(machine.volume)
    done = machine.replayed(made.folder / "record.json", "--bans", bans)
    assert (done["banned"], done["kernels"], done["verdicts"]) == (1, KERNELS - 1, 1)
    seeded = machine.use(BANS=str(bans))
    assert (seeded["compiled"], seeded["benched"]) == ([], [])
    assert "BLOCK: 128, num_warps: 2" not in str(seeded["winners"])
    bans.write_text(ban.replace("gfx115?", "gfx942"))
    assert len(machine.use("tuned", BANS=str(bans), WARMSTART_SEED="/nowhere")["benched"]) == CONFIGS


def test_a_kernel_that_is_gone_is_left_out(machine: Machine, made: Machine) -> None:
    record = json.loads((made.folder / "record.json").read_text())
    record["kernels"][0] |= {"module": "gone", "kernel": "add"}
    record["kernels"][1]["kernel"] = "renamed"
    file = machine.folder / "record.json"
    file.write_text(json.dumps(record))
    shutil.rmtree(machine.seed)
    out, err = tool(machine.python(ROOT / "caches/replay.py", "--out", machine.seed, file))
    assert json.loads(out)["left out"] == 2
    assert json.loads(out)["kernels"] == KERNELS - 2
    lines = [line for line in err.splitlines() if line.startswith("left out: ")]
    assert len(lines) == 2
    assert "gone can't be imported: ModuleNotFoundError" in lines[0]
    assert "its module does not have it any more" in lines[1]
    words = [ROOT / "caches/replay.py", "--out", machine.seed, file, "--require", KERNELS]
    _, err = tool(machine.python(*words), code=1)
    assert err.splitlines()[-1] == f"replay: {KERNELS - 2} kernels, {KERNELS} are required"


CRASHES = """
import os
import triton

@triton.jit
def add(x, y, n, BLOCK: triton.language.constexpr):
    pass

add.preload = lambda spec: os.kill(os.getpid(), 9)
"""


def test_a_compiler_that_crashes_loses_one_kernel(machine: Machine, made: Machine) -> None:
    (machine.folder / "crashing.py").write_text(CRASHES)
    record = json.loads((made.folder / "record.json").read_text())
    record["kernels"].insert(0, {**record["kernels"][0], "module": "crashing"})
    file = machine.folder / "record.json"
    file.write_text(json.dumps(record))
    machine.path += f":{machine.folder}"
    shutil.rmtree(machine.seed)
    for jobs in (1, 2):
        out, err = tool(machine.python(ROOT / "caches/replay.py", "--out", machine.seed, file, "--jobs", jobs))
        assert (json.loads(out)["kernels"], json.loads(out)["left out"]) == (KERNELS, 1)
        assert "left out: crashing.add: its compiler crashed" in err
    assert machine.use()["compiled"] == []


def test_a_record_of_another_arch_gives_kernels_but_no_verdicts(machine: Machine, made: Machine) -> None:
    other = Machine(machine.folder, LATEST, "gfx942", 64)
    other.seed = machine.folder / "gfx942"
    done = other.replayed(made.folder / "record.json", "--arch", "gfx942")
    assert (done["kernels"], done["verdicts"]) == (KERNELS, 0)
    told = other.use()
    assert (told["compiled"], len(told["benched"])) == ([], CONFIGS)


def test_a_seed_for_the_other_wave_size_is_not_found(machine: Machine) -> None:
    """Nothing of it is wrong: Triton's key holds the target, so the kernels are compiled."""
    machine.arch, machine.wave = "gfx942", 64
    assert len(machine.use()["compiled"]) == KERNELS


def test_two_processes_on_one_volume(machine: Machine) -> None:
    shutil.rmtree(machine.seed)
    both = [finished(process) for process in [machine.begin() for _ in range(2)]]
    assert [each["launched"] for each in both] == [KERNELS + 1] * 2
    assert not list(machine.volume.rglob("*.tmp.*"))
    again = machine.use()
    assert (again["compiled"], again["benched"], again["said"]) == ([], [], [])


def test_compilers_in_processes_of_their_own_share_the_cache(machine: Machine) -> None:
    shutil.rmtree(machine.seed)
    told = machine.use("tuned", WARMSTART_HOOK_WORKERS="", APART="1")
    assert told["apart"] > 0
    assert told["apart"] + len(told["compiled"]) == CONFIGS
    assert len(told["benched"]) == CONFIGS


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system with these options; its folder."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    folders: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"mounted-{len(folders)}"
        folder.mkdir()
        run.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)])
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        run.run(["umount", str(folder)])


@pytest.mark.parametrize("options", ["ro", "size=16k"])
@pytest.mark.parametrize("seeded", [True, False])
def test_a_volume_that_cant_be_written_costs_one_warning(
    machine: Machine, mounted: Callable[[str], Path], options: str, seeded: bool
) -> None:
    machine.volume = mounted(options)
    temporary = machine.folder / "tmp"
    temporary.mkdir()
    told = machine.use(TMPDIR=str(temporary), WARMSTART_SEED=str(machine.seed) if seeded else "/nowhere")
    assert len(told["compiled"]) == (0 if seeded else KERNELS)
    assert told["launched"] == KERNELS - CONFIGS + 1 + (0 if seeded else CONFIGS)
    kept = [line for line in told["said"] if "this process keeps its kernels in" in line]
    assert len(kept) == 1
    assert len(told["said"]) <= (1 if seeded else 2)  # and that the verdict is lost
    assert list(temporary.iterdir()) == []


def test_without_its_variables_it_is_tritons(machine: Machine) -> None:
    own = {"WARMSTART_SEED": "", "WARMSTART_VERDICTS": "", "WARMSTART_CU": ""}
    machine.use(**own)
    ours = sorted(content(machine.volume))
    plain = machine.python(
        HERE / "pretended_gpu.py", machine.arch, machine.wave, TRITON_CACHE_DIR=str(machine.folder / "plain/triton")
    )
    told = finished(plain)
    assert len(told["compiled"]) == KERNELS
    assert sorted(content(machine.folder / "plain")) == ours
