"""What goes into a seed and what never does; the same cache gives the same image."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from tests import seed_cache
from tests.seed_cache import FACTS, KEY, name
from warmstart import (
    cachedir,
    cuts,
    lock,
    plan,
    profile,
    seedfiles,
    seedlabels,
    seedlayout,
    seedmake,
    seedtiers,
    unpack,
)
from warmstart.errors import InputError, NothingToSeed, SeedDamaged, SeedUnsafe, UsageError
from warmstart.plan import Plan
from warmstart.probe import Capabilities
from warmstart.seedfiles import Taken
from warmstart.seedlayout import Image

ROOT = Path(__file__).parents[2]
CAPS = Capabilities(
    buildah="1", podman="4", features=(), rootless=False, runtime="", storage="/var/lib/containers", cgroups=2
)
EPOCH = 1_700_000_000


def take(key: Path, stage: Path, *tiers: str, cu: int = 0) -> Taken:
    stage.mkdir()
    with cachedir.opened(key) as folder:
        return seedfiles.take(folder, f"/cache/{KEY}", tiers or seedtiers.TIERS, cu, stage)


def written(folder: Path, taken: Taken, facts: seedlabels.Facts = FACTS) -> Image:
    return seedlayout.write(folder, facts, taken.copies, EPOCH)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return seed_cache.cache(tmp_path / "cache" / KEY)


def test_only_known_files_are_taken(key: Path, tmp_path: Path) -> None:
    taken = take(key, tmp_path / "stage")
    tops = {path.partition("/")[0] for path in taken.copies}
    assert tops == {"triton", "verdicts", "vllm", "inductor"}
    assert not {*seed_cache.OTHERS, seed_cache.BROKEN} & set(taken.copies)
    assert taken.left_out == 1


def test_every_tier_takes_its_own(key: Path, tmp_path: Path) -> None:
    found = {tier: take(key, tmp_path / tier, tier).copies for tier in seedtiers.TIERS}
    assert {len(copies) for copies in found.values()} == {3 * 3 + 1, 2, 7}
    assert all(path.startswith("triton/") for path in found["kernels"])
    assert all(path.startswith(f"verdicts/cu{seed_cache.CU}/") for path in found["verdicts"])
    assert all(path.startswith(("vllm/", "inductor/")) for path in found["artefacts"])


def test_kernels_come_without_their_intermediate_forms(key: Path, tmp_path: Path) -> None:
    copies = take(key, tmp_path / "stage", "kernels").copies
    assert {path.rpartition(".")[2] for path in copies} == {"hsaco", "json", "so"}
    group = copies[f"triton/{name(1)}/__grp__kernel_1.json"]
    place = f"/cache/{KEY}/triton/{name(1)}"
    inside = {f"kernel_1.{ending}": f"{place}/kernel_1.{ending}" for ending in ("hsaco", "json")}
    assert json.loads(group.read_text())["child_paths"] == inside


@pytest.mark.parametrize("nested", ["{", "[" * 100_000])
def test_a_kernel_that_lacks_a_part_is_left_out(key: Path, tmp_path: Path, nested: str) -> None:
    (key / f"triton/{name(1)}/kernel_1.hsaco").unlink()
    seed_cache.write(key, f"triton/{name(2)}/__grp__kernel_2.json", nested)
    copies = take(key, tmp_path / "stage", "kernels").copies
    assert {path.split("/")[1] for path in copies} == {name(0), name(8)}


def test_artefacts_without_their_index_are_left_out(key: Path, tmp_path: Path) -> None:
    (key / "vllm/torch_compile_cache/0123456789/rank_0_0/backbone/vllm_compile_cache.py").unlink()
    copies = take(key, tmp_path / "stage", "artefacts").copies
    assert not [path for path in copies if "0123456789" in path]
    assert [path for path in copies if path.endswith("/model")]


def test_verdicts_of_another_number_of_compute_units_stay(key: Path, tmp_path: Path) -> None:
    seed_cache.write(key, f"verdicts/cu32/{name(20)}/kernel_0.autotune.json", "{}")
    copies = take(key, tmp_path / "stage", "verdicts", cu=32).copies
    assert list(copies) == [f"verdicts/cu32/{name(20)}/kernel_0.autotune.json"]


def test_links_are_never_followed(key: Path, tmp_path: Path) -> None:
    """What a container plants must not bring a file of the host into a seed."""
    secret = seed_cache.write(tmp_path, "host/secret.json", "{}")
    folder = key / f"verdicts/cu40/{name(30)}"
    folder.mkdir()
    (folder / "a.autotune.json").symlink_to(secret)
    (key / f"verdicts/cu40/{name(31)}").symlink_to(secret.parent)
    seed_cache.write(tmp_path, "host/a.autotune.json", "{}")
    os.mkfifo(folder / "b.autotune.json")
    assert len(take(key, tmp_path / "stage", "verdicts").copies) == 2
    shutil.move(key, tmp_path / "elsewhere")
    key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link or no folder"), cachedir.opened(key.parent, KEY):
        pass


@pytest.mark.parametrize("secret", ["hf_" + "A" * 34, '{"VLLM_API_KEY": "abcdefgh1"}', '"MY_SECRET" : "12345678"'])
def test_a_secret_ends_it(key: Path, tmp_path: Path, secret: str) -> None:
    filler = "x" * (unpack.CHUNK - 10)  # the secret lies across the border of what is read at a time
    seed_cache.write(key, "vllm/modelinfos/x.json", f"{filler} {secret} ")
    with pytest.raises(SeedUnsafe, match=r"vllm/modelinfos/x.json holds what looks like a secret"):
        take(key, tmp_path / "stage", "artefacts")


def test_a_token_of_a_tokenizer_is_no_secret(key: Path, tmp_path: Path) -> None:
    seed_cache.write(key, "vllm/modelinfos/x.json", '{"eos_token": "<|endoftext|>", "VLLM_API_KEY": null}')
    assert take(key, tmp_path / "stage", "artefacts").copies


def test_the_same_cache_gives_the_same_image(key: Path, tmp_path: Path) -> None:
    """Whatever times, modes, names of places and order of making are."""
    first = written(tmp_path / "one", take(key, tmp_path / "stage1", "kernels", "verdicts"))
    other = tmp_path / "another place" / KEY
    for file in sorted(key.rglob("*"), reverse=True):
        if file.is_file():
            copy = seed_cache.write(other, str(file.relative_to(key)), file.read_bytes())
            copy.chmod(0o666)
            os.utime(copy, (5, 5))
    second = written(tmp_path / "two", take(other, tmp_path / "stage2", "kernels", "verdicts"))
    assert first == second
    assert [file.name for file in (tmp_path / "one/blobs/sha256").iterdir()]
    for file in (tmp_path / "one").rglob("*"):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "two" / file.relative_to(tmp_path / "one")).read_bytes()


def test_no_time_of_making_is_in_the_layer(key: Path, tmp_path: Path) -> None:
    image = written(tmp_path / "layout", take(key, tmp_path / "stage", "verdicts"))
    head = (tmp_path / "layout/blobs/sha256" / image.layer[7:]).read_bytes()[:10]
    assert head[3:8] == bytes(5)  # RFC 1952: no name, no time


def test_a_layer_of_another_size_than_announced(key: Path, tmp_path: Path) -> None:
    image = written(tmp_path / "layout", take(key, tmp_path / "stage", "verdicts"))
    lie = msgspec.structs.replace(image, layer_size=image.layer_size + 1)
    with pytest.raises(SeedDamaged, match="is not whole"), seedlayout.layer(tmp_path / "layout", lie):
        pass


def test_a_changed_file_gives_another_image(key: Path, tmp_path: Path) -> None:
    first = written(tmp_path / "one", take(key, tmp_path / "stage1", "verdicts"))
    seed_cache.write(key, f"verdicts/cu40/{name(20)}/kernel_0.autotune.json", '{"key": 9}')
    second = written(tmp_path / "two", take(key, tmp_path / "stage2", "verdicts"))
    assert first.digest != second.digest


def test_what_was_written_can_be_read(key: Path, tmp_path: Path) -> None:
    taken = take(key, tmp_path / "stage", "kernels", "verdicts")
    image = written(tmp_path / "layout", taken)
    assert seedlayout.read(tmp_path / "layout") == image
    assert image.facts == FACTS
    with seedlayout.layer(tmp_path / "layout", image) as layer:
        content = unpack.unpack(layer, image.expected)
    assert {file.path for file in content.files} == set(taken.copies)


@pytest.mark.parametrize("blob", ["layer", "config", "manifest"])
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_a_damaged_layout_is_found(key: Path, tmp_path: Path, blob: str, how: str) -> None:
    image = written(tmp_path / "layout", take(key, tmp_path / "stage", "verdicts"))
    manifest = json.loads((tmp_path / "layout/blobs/sha256" / image.digest[7:]).read_bytes())
    digest = {"layer": image.layer, "config": manifest["config"]["digest"], "manifest": image.digest}[blob]
    file = tmp_path / "layout/blobs/sha256" / digest[7:]
    data = file.read_bytes()
    file.unlink()
    if how != "gone":
        file.write_bytes(data[:-1] if how == "cut" else data.replace(data[-9:-5], b"abcd"))
    with (
        pytest.raises((SeedDamaged, NothingToSeed)),
        seedlayout.layer(tmp_path / "layout", seedlayout.read(tmp_path / "layout")),
    ):
        pass


@pytest.mark.parametrize("index", ["[" * 100_000, "{}", '{"manifests": []}'])
def test_a_damaged_index_is_found(tmp_path: Path, index: str) -> None:
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(SeedDamaged, match="can't be read"):
        seedlayout.read(tmp_path)


@pytest.mark.parametrize("label", ["cache.vllm.image/cache-size-bytes", "io.warmstart.manifest"])
def test_labels_without_a_size_are_found(
    key: Path, tmp_path: Path, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the image is read, so that a list of seeds can leave it out."""
    write = seedlabels.write
    monkeypatch.setattr(seedlabels, "write", lambda *args, **more: write(*args, **more) | {label: "x"})
    with pytest.raises(SeedDamaged, match="don't say what is in it"):
        written(tmp_path / "layout", take(key, tmp_path / "stage", "verdicts"))


def test_the_layer_is_mcvs_too(key: Path, tmp_path: Path) -> None:
    """Names and labels under which MCV's tools look for a cache and for whom it is."""
    import tarfile

    image = written(tmp_path / "layout", take(key, tmp_path / "stage", "kernels", "verdicts"))
    with tarfile.open(tmp_path / "layout/blobs/sha256" / image.layer[7:]) as tar:
        names = tar.getnames()
        told = json.load(tar.extractfile("io.vllm.manifest/manifest.json") or pytest.fail("no list"))
        sizes = sum(member.size for member in tar if member.name.startswith("io.vllm.cache/"))
    assert {name.split("/")[0] for name in names} == {"io.vllm.cache", "io.vllm.manifest"}
    assert told["vllm"] == []
    assert image.labels["cache.vllm.image/cache-size-bytes"] == str(sizes)
    assert image.labels["cache.vllm.image/entry-count"] == "6"  # three kernels, a library, two verdicts
    assert image.labels["cache.vllm.image/format"] == "triton"


# ---- seed make as a whole -----------------------------------------------------------------------------------------


def planned(arch: str = "gfx1151") -> Plan:
    loaded = profile.load(ROOT, arch)
    return plan.make(ROOT, loaded, lock.parse(lock.committed(ROOT, arch)), cuts.load(ROOT, loaded.profile))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tags that were brought into podman's storage."""
    found: list[str] = []
    monkeypatch.setattr(seedmake, "load", lambda caps, folder, tag: found.append(tag))
    return found


def wanted(source: Path, *tiers: str, **more: str | int) -> seedmake.Wanted:
    return msgspec.convert({"source": str(source), "tiers": tiers, **more}, seedmake.Wanted)


def test_make_packs_the_plans_cache_key(tmp_path: Path, loads: list[str]) -> None:
    plan = planned()
    seed_cache.cache(tmp_path / plan.cache_key)
    made = seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path))
    assert made.tiers == ("kernels", "verdicts")
    assert (made.cu, made.seed) == (40, f"{plan.cache_key}-cu40")
    assert loads == [made.seed]
    image = seedlayout.read(Path(made.folder))
    assert image.facts == seedlabels.of_plan(plan, ("kernels", "verdicts"), cu=40)
    assert (image.facts.wave, image.facts.vllm, image.facts.triton) == (
        32,
        plan.versions["vllm"],
        plan.versions["triton"],
    )
    again = seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path / plan.cache_key))
    assert again.digest == made.digest
    assert not (tmp_path / "state/seeds/work").exists()


def test_kernels_alone_are_for_any_number_of_compute_units(tmp_path: Path, loads: list[str]) -> None:
    plan = planned()
    seed_cache.cache(tmp_path / plan.cache_key)
    made = seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path, "kernels"))
    assert (made.cu, made.seed) == (0, plan.cache_key)


def test_artefacts_carry_model_flags_and_processor(tmp_path: Path, loads: list[str]) -> None:
    plan = planned()
    seed_cache.cache(tmp_path / plan.cache_key)
    with pytest.raises(UsageError, match="for one model"):
        seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path, "artefacts"))
    one = wanted(tmp_path, model="Qwen/Qwen3-0.6B", flags="--max-model-len=1024")
    made = seedmake.make(tmp_path / "state", CAPS, plan, one)
    facts = seedlayout.read(Path(made.folder)).facts
    assert facts.tiers == seedtiers.TIERS
    assert (facts.model, facts.flags) == ("Qwen/Qwen3-0.6B", "--max-model-len=1024")
    assert (facts.gpu, facts.cpu) == ("gfx1151, 40 compute units", "avx2,sse2")
    other = seedmake.make(tmp_path / "state", CAPS, plan, msgspec.structs.replace(one, flags="--max-model-len=2048"))
    assert other.seed != made.seed


def test_artefacts_of_an_unknown_processor_are_refused(tmp_path: Path, loads: list[str]) -> None:
    plan = planned()
    (seed_cache.cache(tmp_path / plan.cache_key) / "host.json").unlink()
    with pytest.raises(InputError, match=r"has no host.json"):
        seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path, model="m"))


def test_several_numbers_of_compute_units_need_a_choice(tmp_path: Path, loads: list[str]) -> None:
    plan = planned()
    key = seed_cache.cache(tmp_path / plan.cache_key)
    seed_cache.write(key, f"verdicts/cu32/{name(20)}/kernel_0.autotune.json", "{}")
    with pytest.raises(UsageError, match="32, 40 compute units"):
        seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path))
    made = seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path, cu=32))
    assert made.files == 3 * 3 + 1 + 1


def test_nothing_to_pack(tmp_path: Path, loads: list[str]) -> None:
    plan = planned()
    with pytest.raises(NothingToSeed, match="there is no folder"):
        seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path / "none"))
    seed_cache.cache(tmp_path / "gfx1151-ba9876543210")
    with pytest.raises(NothingToSeed, match=f"holds no caches of {plan.cache_key}") as told:
        seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path))
    assert "it holds those of gfx1151-ba9876543210" in told.value.hint
    (tmp_path / plan.cache_key / "triton").mkdir(parents=True)
    with pytest.raises(NothingToSeed, match="no complete kernels or verdicts"):
        seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path))
    seed_cache.kernel(tmp_path / plan.cache_key, 1)
    with pytest.raises(NothingToSeed, match="no complete verdicts"):
        seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path, "kernels", "verdicts"))


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, '{"gpus": [{"arch": "gfx1151", "cu": Infinity}]}'])
def test_a_damaged_host_json_is_told(tmp_path: Path, loads: list[str], text: str) -> None:
    plan = planned()
    seed_cache.write(seed_cache.cache(tmp_path / plan.cache_key), "host.json", text)
    with pytest.raises(InputError, match=r"host.json is damaged"):
        seedmake.make(tmp_path / "state", CAPS, plan, wanted(tmp_path))


@pytest.mark.parametrize("words", ["kernel", "kernels,winners"])
def test_an_unknown_tier(words: str) -> None:
    with pytest.raises(UsageError, match="unknown tier"):
        seedtiers.tiers(words)


def test_tiers_have_one_order() -> None:
    assert seedtiers.tiers("artefacts, kernels,kernels") == ("kernels", "artefacts")


@pytest.mark.parametrize(
    ("path", "tier"),
    [
        ("inductor/ab/cab.py", "artefacts"),
        ("inductor/ab/x/y.so", "artefacts"),
        ("inductor/ab/../x.so", ""),
        ("inductor/ab/x//y.so", ""),
        ("inductor/ab/x/", ""),
        ("inductor/ab/.x", ""),
        ("inductor/ab/x.lock", ""),
        ("inductor/ab/x.tmp", ""),
        ("inductor/ab/__pycache__/x.py", ""),
        ("inductor/fxgraph/tmp.1/x", ""),
        ("/inductor/ab/x.so", ""),
        (f"triton/{name(1)}/k.ttir", ""),
        (f"verdicts/cu40/{name(1)}/k.autotune.json", "verdicts"),
        (f"verdicts/cu040/{name(1)}/k.autotune.json", ""),
        (f"verdicts/cu40/{name(1)}/k.json", ""),
        ("vllm/torch_compile_cache/0123456789/rank_0_0/backbone/x", "artefacts"),
        ("vllm/assets/x.json", ""),
    ],
)
def test_what_a_path_is(path: str, tier: str) -> None:
    kind = seedtiers.kind(path)
    assert (kind.tier if kind else "") == tier
