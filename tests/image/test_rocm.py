"""What an image for an AMD GPU holds, proven without the GPU. What is expected is read from the plan."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from testinfra.host import Host

from image import aiter_facts
from tests.image.conftest import LEAST, MOUNTS, PYTHON, ROOT, planned_arch, random_uid
from warmstart import patches, run
from warmstart.names import VENV
from warmstart.plan import Plan

Script = Callable[..., Any]
Need = Callable[..., None]

# The SDK's own runtime carries its trap handlers and copy kernels for every GPU.
EVERY_ARCH = "rocm-sdk-core"
NEVER_BAKED = {"LD_LIBRARY_PATH", "PYTHONPATH", "HSA_OVERRIDE_GFX_VERSION", "GPU_ARCHS"}


if planned_arch() == "cpu":
    pytest.skip("an image without GPU code", allow_module_level=True)


@pytest.fixture(scope="module")
def code(python: Script, site: str) -> Any:
    """All device code of the image: archs and owner by file."""
    return python("device_code.py", site, "/mnt/image")


@pytest.fixture(scope="module")
def runtime(python: Script, site: str) -> Any:
    """Facts about the loader and the HIP runtime."""
    return python("runtime.py", site)


def of_layer(plan: Plan, layer: str) -> list[str]:
    """Distributions of one layer."""
    return [w.name for w in plan.wheels if w.layer == layer]


def least(image: str, *options: str, command: str) -> str:
    """What a shell line prints in the image, as a random UID on a read-only root."""
    argv = ["podman", "run", "--rm", *LEAST, *MOUNTS, "--read-only", "--user", random_uid(), *options]
    argv += ["--entrypoint", "/bin/sh", image, "-c", command]
    return run.run(argv).stdout


# --- device code ----------------------------------------------------------------


def generic(arch: str) -> str:
    """LLVM's generic target that also runs on `arch` (AMDGPUUsage, "Generic processors"); empty where there is none."""
    if arch in {"gfx942", "gfx950"}:
        return "gfx9-4-generic"
    return f"{arch[:5]}-generic" if arch[:5] in {"gfx11", "gfx12"} else ""


def test_device_code_can_be_read(code: Any) -> None:
    assert code["problems"] == {}
    assert code["archs"]


def test_device_code_of_this_arch_is_in_every_file(code: Any, plan: Plan) -> None:
    fits = {plan.arch, generic(plan.arch)}
    foreign = {
        file: archs
        for file, archs in code["archs"].items()
        if not fits & set(archs) and code["owners"][file] != EVERY_ARCH
    }
    assert foreign == {}


def test_device_wheels_hold_this_arch_alone(code: Any, plan: Plan) -> None:
    """As does vLLM where it was built for this arch; upstream's wheel of it has nine."""
    alone = {*of_layer(plan, "device"), *(["vllm"] if plan.lane == "source" else [])}
    held = {file: code["archs"][file] for file, owner in code["owners"].items() if owner in alone}
    assert held
    assert {file: archs for file, archs in held.items() if archs != [plan.arch]} == {}


def test_vllm_has_device_code(code: Any) -> None:
    assert [file for file, owner in code["owners"].items() if owner == "vllm"]


def test_no_kernel_file_is_named_for_another_arch(host: Host, plan: Plan, site: str) -> None:
    listed = host.check_output(
        f"find {site}/torch/lib {site}/*/.kpack {site}/_rocm_sdk_libraries/lib -name '*gfx[0-9]*'"
        " -not -path '*/aotriton.images/*'"
    )
    named = {path: set(re.findall(r"gfx[0-9a-f]{3,4}(?![0-9a-f])", path)) for path in listed.splitlines()}
    assert {path: archs for path, archs in named.items() if archs - {plan.arch}} == {}
    assert any(plan.arch in archs for archs in named.values())


def test_hidden_packs_survived_the_copies(host: Host, plan: Plan, python: Script, site: str) -> None:
    """`.kpack` folders begin with a dot: a careless copy loses them, and the first kernel fails."""
    records = python("records.py", *of_layer(plan, "device"))
    gone = {file for record in records.values() for file in record["missing"]}
    assert gone <= set(plan.profile.removals)
    packs = host.check_output(f"find {site} -type f -name '*.kpack'").split()
    assert [p for p in packs if p == f"{site}/torch/.kpack/torch_{plan.arch}.kpack"]
    assert [p for p in packs if plan.arch not in Path(p).name] == []


def test_removals_are_gone(host: Host, plan: Plan, site: str) -> None:
    assert [f for f in plan.profile.removals if host.file(f"{site}/{f}").exists] == []


def test_attention_images_are_of_the_family(host: Host, plan: Plan, site: str) -> None:
    feature = plan.profile.features.get("aotriton")
    if not feature or not feature.enabled:
        pytest.skip("torch has AOTriton's kernels for this arch in its own wheel")
    names = host.check_output(f"ls {site}/torch/lib/aotriton.images").split()
    families = [re.sub(r"x+$|-.*$", "", name.removeprefix("amd-")) for name in names]
    assert families
    assert [f for f in families if not plan.arch.startswith(f)] == []


# --- the SDK -----------------------------------------------------------------------


@pytest.mark.parametrize("library", ["hip", "hsa"])
def test_there_is_one_runtime(runtime: Any, library: str, site: str) -> None:
    """Two HIP runtimes in one process each see no memory of the other."""
    assert len(runtime[library]) == 1, runtime[library]
    assert runtime[library][0].startswith(f"{site}/_rocm_sdk_core/lib/")


def test_the_loaders_table_is_fresh(runtime: Any, site: str) -> None:
    table = runtime["cache"]
    below = ("core/lib", "core/lib/rocm_sysdeps/lib", "core/lib/host-math/lib", "libraries/lib")
    assert table["folders"] == [f"{site}/_rocm_sdk_{folder}" for folder in below]
    assert (table["absent"], table["unknown"], table["gone"]) == ([], [], [])
    assert table["count"] > 10
    assert runtime["aux"] == []


def test_the_sdks_libraries_are_found_without_environment(python: Script) -> None:
    """Also what another package's library needs of the SDK, whichever is loaded first."""
    found = python("libraries.py", VENV)
    unfound = {
        file: names
        for file, others in found["elsewhere"].items()
        if (names := {n: at for n, at in others.items() if "/_rocm_sdk_" in at})
    }
    assert unfound == {}


def test_libraries_open_by_the_names_that_programs_use(image: str, plan: Plan) -> None:
    """amdsmi opens both by their plain names."""
    told = least(image, command=f"{PYTHON} /mnt/inside/opens.py libamd_smi.so libdrm_amdgpu.so")
    assert told.strip() == "{}"


def test_an_older_name_is_a_link(runtime: Any, site: str) -> None:
    """torch may be linked to it; its own library path leads there, the loader's table has no such links."""
    assert re.fullmatch(rf"{re.escape(site)}/_rocm_sdk_core/lib/librocm_smi64\.so\.\d.*", runtime["smi"])


def test_amdsmi_is_the_sdks_own(host: Host, site: str) -> None:
    """A copy elsewhere would not find its library."""
    line = "import importlib.util as u; print(u.find_spec('amdsmi').origin)"
    found = host.check_output(f'{PYTHON} -c "{line}"')
    assert found == f"{site}/_rocm_sdk_core/share/amd_smi/amdsmi/__init__.py"


def test_amdsmi_works_as_far_as_it_can_without_a_gpu(image: str, real: Need) -> None:
    """Its own exception says that there is no driver; any other says that it can't work on any machine."""
    real("rocm-sdk-core")
    line = (
        "import amdsmi\n"
        "try:\n    amdsmi.amdsmi_init()\n"
        "except amdsmi.AmdSmiLibraryException:\n    print('no driver')\n"
        "else:\n    print('driver')"
    )
    told = least(image, "--env", f"PROBE={line}", command=f'{PYTHON} -c "$PROBE"')
    assert told.strip() in {"no driver", "driver"}


def test_the_sdk_keeps_its_symbols_to_itself(host: Host, site: str) -> None:
    """Else its LLVM comes before Triton's, which crashes."""
    text = host.file(f"{site}/rocm_sdk/__init__.py").content_string
    assert text.count("rtld_global: bool = False") == 2
    assert "rtld_global: bool = True" not in text


def test_torch_and_triton_live_in_one_process(image: str, plan: Plan) -> None:
    line = "import torch, triton; print(torch.version.hip, list(triton.backends.backends))"
    hip, _, back_ends = least(image, command=f'{PYTHON} -c "{line}"').strip().partition(" ")
    assert hip.startswith(".".join(plan.versions["rocm"].split(".")[:2]))
    assert back_ends == "['amd']"


def test_every_library_that_torch_preloads_is_there(host: Host, site: str) -> None:
    """torch/_rocm_init.py names them; a cut that hits one ends every import of torch."""
    line = (
        "import rocm_sdk; real = rocm_sdk.initialize_process; asked = [];"
        "rocm_sdk.initialize_process = lambda **given: (asked.extend(given['preload_shortnames']), real(**given));"
        "import torch; print(len(asked), len(rocm_sdk.find_libraries(*asked)))"
    )
    named, found = host.check_output(f'{PYTHON} -c "{line}"').split()
    assert int(named) > 5
    assert named == found


def test_nothing_for_developers_is_left(runtime: Any) -> None:
    assert runtime["devel"] == []
    assert [file for file in runtime["static"] if not Path(file).name.startswith("libclang_rt.")] == []


def test_no_starters_of_the_sdks_programs(host: Host, plan: Plan, python: Script) -> None:
    """They are slow Python programs in front of the real ones, which ENV names."""
    programs = set(python("records.py", "rocm-sdk-core")["rocm-sdk-core"]["programs"])
    kept = set(host.check_output(f"ls {VENV}/bin").split()) & programs
    needed = {"hipconfig", "rocminfo"} if plan.aiter != "off" else set()
    assert kept <= {"rocm-sdk", "hipconfig", "rocminfo"}
    assert needed <= kept


# --- Triton, torch and vLLM ---------------------------------------------------------------


def test_triton_has_one_back_end(host: Host, python: Script, site: str) -> None:
    """Entry points and folder: Triton imports every one that is named."""
    assert python("records.py", "triton")["triton"]["back_ends"] == ["amd"]
    folders = host.check_output(f"find {site}/triton/backends -mindepth 1 -maxdepth 1 -type d ! -name __pycache__")
    assert folders.split() == [f"{site}/triton/backends/amd"]


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_no_later_layer_touched_it(plan: Plan, python: Script, name: str, site: str) -> None:
    """A reinstalled Triton or torch shows as files that their RECORD does not know."""
    record = python("records.py", name)[name]
    patched = {f for file in plan.patches.get(name, ()) for f in patches.read(ROOT / "patches" / name / file).files}
    assert (record["missing"], set(record["changed"]) - patched) == ([], set())
    assert record["right"] > 10


def test_vllm_asks_for_the_torch_of_the_image(plan: Plan, python: Script) -> None:
    requires = [Requirement(line) for line in python("records.py", "vllm")["vllm"]["requires"]]
    asked = [r for r in requires if r.name == "torch" and (not r.marker or r.marker.evaluate({"extra": ""}))]
    assert asked
    assert all(r.specifier.contains(plan.versions["torch"], prereleases=True) for r in asked)


@pytest.mark.parametrize("module", ["torch", "vllm"])
def test_versions_are_for_rocm(host: Host, plan: Plan, module: str) -> None:
    """The wrong Python brings CUDA's wheel, without a word."""
    version = host.check_output(f"{PYTHON} -c \"import importlib.metadata as m; print(m.version('{module}'))\"")
    assert version.partition("+")[0] == plan.versions[module].partition("+")[0]
    if module == "torch" or plan.lane == "wheel":
        assert "rocm" in version.partition("+")[2]


def test_every_patch_is_in(host: Host, plan: Plan, site: str) -> None:
    absent = []
    for component, names in plan.patches.items():
        for patch in (patches.read(ROOT / "patches" / component / name) for name in names):
            files = [host.file(f"{site}/{name}") for name in patch.files]
            if not any(file.exists and patch.marker in file.content_string for file in files):
                absent.append(f"{component}/{patch.name}")
    assert absent == []


# --- environment and compilers -----------------------------------------------------------------


def test_nothing_is_baked_that_the_host_decides(config: dict[str, Any]) -> None:
    rules = tomllib.loads((ROOT / "arch" / "rules.toml").read_text(encoding="utf-8"))
    names = {entry.partition("=")[0] for entry in config["Config"]["Env"]}
    assert names & (NEVER_BAKED | {rule["name"] for rule in rules["baked"]}) == set()
    assert [n for n in names if n.endswith("_VISIBLE_DEVICES")] == []


def test_the_archs_settings_are_baked(config: dict[str, Any], plan: Plan) -> None:
    env = dict(entry.split("=", 1) for entry in config["Config"]["Env"])
    wanted = dict(plan.profile.env)
    for feature in plan.profile.features.values():
        wanted |= {name: value for name, value in feature.env.items() if feature.enabled and name not in wanted}
    assert {name: env.get(name) for name in wanted} == wanted


def test_paths_in_the_environment_exist(host: Host, plan: Plan) -> None:
    assert host.file(plan.env["ROCM_PATH"]).is_directory
    for name in ("CC", "CXX"):
        assert host.run(f"test -x {plan.env[name]}").rc == 0, name


def test_compilers_work_for_any_user(image: str, real: Need) -> None:
    """Triton compiles its launcher at run time, Inductor its C++: as any UID, nothing writable but /tmp."""
    real("rocm-sdk-core")
    told = json.loads(least(image, command=f"{PYTHON} /mnt/inside/compiles.py"))
    assert (told["c"], told["cpp"]) == (42, 10.0)
    assert told["uid"] != 0


def test_there_is_no_gcc(host: Host) -> None:
    assert host.check_output("find /usr /opt -name cc1 -o -name cc1plus -o -name collect2 -o -name lto1") == ""


# --- features ------------------------------------------------------------------------------------


def test_vision_has_its_attention(host: Host, plan: Plan, site: str) -> None:
    """Without it vision encoders fall back to plain attention, slow and large."""
    feature = plan.profile.features.get("vision")
    if not feature or not feature.enabled:
        pytest.skip("feature vision is off")
    line = "from importlib.machinery import PathFinder as p; "
    line += f"print(p.find_spec('flash_attn_triton_amd', ['{site}/flash_attn']))"
    assert "flash_attn_triton_amd/__init__.py" in host.check_output(f'{PYTHON} -c "{line}"')
    assert plan.env["FLASH_ATTENTION_TRITON_AMD_ENABLE"] == "TRUE"


def test_aiter_is_left_out_whole(host: Host, plan: Plan, site: str) -> None:
    if plan.aiter != "off":
        pytest.skip(f"aiter.mode is {plan.aiter}")
    line = "import importlib.util as u; print(u.find_spec('aiter'))"
    assert host.check_output(f'{PYTHON} -c "{line}"') == "None"
    assert host.check_output(f"ls -d {site}/aiter* {site}/amd_aiter* {site}/flydsl* /opt/aiter* 2>/dev/null || :") == ""
    assert plan.env["VLLM_ROCM_USE_AITER"] == "0"


def aiter_known(plan: Plan) -> dict[str, Any]:
    """What is known of the image's aiter; skips where there is none."""
    if plan.aiter == "off":
        pytest.skip("aiter.mode is off")
    data = tomllib.loads((ROOT / "arch" / "aiter.toml").read_text(encoding="utf-8"))
    return aiter_facts.facts(data, plan.versions["aiter"])


def test_aiter_has_kernels_of_this_arch_alone(host: Host, plan: Plan, site: str) -> None:
    aiter_known(plan)
    found = host.check_output(f"find {site}/aiter_meta/hsa -mindepth 1 -maxdepth 1 -type d -name 'gfx*'").split()
    assert found == [f"{site}/aiter_meta/hsa/{plan.arch}"]


def test_aiters_modules_are_fresh_and_compile_nothing(host: Host, plan: Plan, site: str) -> None:
    """For the arch, of the installed aiter, loadable, found under both settings of AITER_JIT_DIR, no lock left."""
    core = aiter_known(plan)["core"]
    folders = ["/opt/aiter-prebuilt", f"{site}/aiter/jit"]
    for folder in folders:
        assert host.file(f"{folder}/{core}.so").exists, folder
    assert host.file(f"{site}/aiter-prebuilt.pth").content_string.strip() == folders[0]
    header = f"{site}/aiter_meta/csrc/include/aiter_enum.h"
    options = f"--arch {plan.arch} --at-least --core {core} --header {header} --load"
    done = host.run(f"{PYTHON} /mnt/image/aiter_check.py {' '.join(folders)} {options}")
    assert done.rc == 0, done.stderr


def test_what_aiter_imports_is_there(host: Host, plan: Plan, site: str, real: Need) -> None:
    known = aiter_known(plan)
    if known["flydsl-required"]:
        assert "flydsl" in {w.name for w in plan.wheels}
        assert host.file(f"{site}/flydsl").is_directory
    real("amd-aiter")
    assert [m for m in known["unified-attention"] if not host.run(f"ls {site}/{m.replace('.', '/')}*").rc] != []
