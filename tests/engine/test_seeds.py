"""Seeds on real podman and skopeo: made of a cache, pushed to a registry on loopback, pulled by digest elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.error import URLError

import pytest

from tests import seed_cache
from tests.checkout import free_port
from tests.unit.test_seed_make import planned
from warmstart import cachedir, seedlayout, seedmake, seeds
from warmstart import registry as registries
from warmstart.engine import Capabilities
from warmstart.errors import RegistryRefused, SeedDamaged, SeedMismatch, Unreachable
from warmstart.plan import Plan
from warmstart.seedlabels import Here
from warmstart.seedmake import Wanted
from warmstart.seeds import Moved
from warmstart.seedstore import NAME, Seed

CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Debian's docker-registry on loopback: its name, and the folder that it stores in."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("needs docker-registry (Debian's package of that name)")
    folder = tmp_path_factory.mktemp("registry")
    port = free_port()
    (folder / "config.yml").write_text(CONFIG.format(folder=folder / "store", port=port))
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=1).close()
                break
            except (URLError, OSError):
                time.sleep(0.1)
        else:
            pytest.fail(f"docker-registry does not answer: {(folder / 'log').read_text()}")
        yield f"127.0.0.1:{port}", folder / "store"
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned("gfx1151")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> Path:
    """A folder of caches."""
    folder = tmp_path_factory.mktemp("caches")
    seed_cache.cache(folder / plan.cache_key)
    return folder


@pytest.fixture
def here(caps: Capabilities, plan: Plan) -> Here:
    """A machine with the GPU that the seed is for."""
    return seeds.here(caps, plan, seed_cache.CU)


@pytest.fixture(scope="module")
def seed(caps: Capabilities, state: Path, plan: Plan, source: Path) -> Seed:
    return seedmake.make(state, caps, plan, Wanted(source=str(source)))


@pytest.fixture(scope="module")
def pushed(caps: Capabilities, state: Path, seed: Seed, registry: tuple[str, Path]) -> Moved:
    return seeds.push(state, caps, f"{registry[0]}/team/seeds")


def pull(state: Path, caps: Capabilities, source: str, here: Here, into: Path | str) -> Moved:
    return seeds.pull(state, caps, source, lambda: here, str(into))


def content(key: Path) -> dict[str, bytes]:
    tops = ("triton", "verdicts", "vllm", "inductor")
    return {str(f.relative_to(key)): f.read_bytes() for t in tops for f in (key / t).rglob("*") if f.is_file()}


def podman(*words: str) -> str:
    return subprocess.run(["podman", *words], check=True, capture_output=True, text=True).stdout


def test_a_seed_lies_in_podmans_storage_under_one_name(seed: Seed) -> None:
    image = json.loads(podman("image", "inspect", f"{NAME}:{seed.seed}"))[0]
    assert image["RepoTags"] == [f"{NAME}:{seed.seed}"]
    assert image["Labels"] == seedlayout.read(Path(seed.folder)).labels
    assert len(image["RootFS"]["Layers"]) == 1
    assert image["Created"].startswith("20")


def test_a_seed_made_again_is_the_same_and_another_replaces_it(
    caps: Capabilities, state: Path, plan: Plan, source: Path, seed: Seed, tmp_path: Path
) -> None:
    image = json.loads(podman("image", "inspect", f"{NAME}:{seed.seed}"))[0]["Id"]
    assert seedmake.make(state, caps, plan, Wanted(source=str(source))).digest == seed.digest
    assert json.loads(podman("image", "inspect", f"{NAME}:{seed.seed}"))[0]["Id"] == image
    shutil.copytree(source, tmp_path / "changed")
    seed_cache.kernel(tmp_path / "changed" / plan.cache_key, 5)
    try:
        other = seedmake.make(state, caps, plan, Wanted(source=f"{tmp_path}/changed"))
        assert (other.seed, other.digest != seed.digest) == (seed.seed, True)
        assert subprocess.run(["podman", "image", "exists", image], check=False).returncode == 1
    finally:
        assert seedmake.make(state, caps, plan, Wanted(source=str(source))).digest == seed.digest


def test_pushed_and_pulled_by_digest_byte_by_byte(
    caps: Capabilities, state: Path, plan: Plan, source: Path, seed: Seed, pushed: Moved, here: Here, tmp_path: Path
) -> None:
    assert pushed.where.endswith(f"/team/seeds@{seed.digest}")
    done = pull(state, caps, pushed.where, here, tmp_path / "cache")
    assert (done.digest, done.placed, done.files) == (seed.digest, seed.files, seed.files)
    found, first = content(tmp_path / "cache" / plan.cache_key), content(source / plan.cache_key)
    assert len(found) == seed.files
    groups = [path for path in found if "/__grp__" in path]
    assert {p: d for p, d in found.items() if p not in groups}.items() <= first.items()
    for group in groups:  # the one file that is made small, and right for its new place
        place = f"/cache/{plan.cache_key}/{group.rpartition('/')[0]}"
        paths = json.loads(found[group])["child_paths"]
        assert sorted(name.rpartition(".")[2] for name in paths) == ["hsaco", "json"]
        assert all(path == f"{place}/{name}" for name, path in paths.items())
    assert not (state / "seeds" / "work").exists()


def test_a_tag_is_resolved_to_its_digest(
    caps: Capabilities, state: Path, pushed: Moved, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = pushed.where.partition("@")[0]
    done = pull(state, caps, f"{name}:{pushed.seed}", here, tmp_path / "cache")
    assert done.where == pushed.where
    assert f"{name}:{pushed.seed} is {pushed.digest}" in capsys.readouterr().err


def test_a_second_pull_fetches_nothing(
    caps: Capabilities, state: Path, pushed: Moved, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(state, caps, pushed.where, here, tmp_path / "cache")
    monkeypatch.setattr(registries, "fetch", lambda *_: pytest.fail("fetched"))
    done = pull(state, caps, pushed.where, here, tmp_path / "cache")
    assert (done.placed, done.files > 0) == (0, True)


@pytest.mark.parametrize("wrong", [{"arch": "gfx1100"}, {"wave": 64}, {"cache_keys": ("gfx1151-0",)}, {"cus": (32,)}])
def test_another_machines_seed_is_refused_before_its_layer_is_fetched(
    caps: Capabilities,
    state: Path,
    pushed: Moved,
    here: Here,
    wrong: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import msgspec

    monkeypatch.setattr(registries, "fetch", lambda *_: pytest.fail("fetched"))
    with pytest.raises(SeedMismatch, match="the seed is refused: it is for"):
        pull(state, caps, pushed.where, msgspec.structs.replace(here, **wrong), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_blob_that_was_tampered_with_is_refused(
    caps: Capabilities, state: Path, plan: Plan, seed: Seed, registry: tuple[str, Path], here: Here, tmp_path: Path
) -> None:
    where = seeds.push(state, caps, f"{registry[0]}/tampered/seeds").where
    layer = seedlayout.read(Path(seed.folder)).layer.removeprefix("sha256:")
    blob = registry[1] / "docker/registry/v2/blobs/sha256" / layer[:2] / layer / "data"
    data = blob.read_bytes()
    try:
        for bad in (data[:-1] + bytes([data[-1] ^ 1]), data[:-20], data + b"x"):
            blob.write_bytes(bad)
            with pytest.raises((SeedDamaged, Unreachable)):
                pull(state, caps, where, here, tmp_path / "cache")
            assert content(tmp_path / "cache" / plan.cache_key) == {}
    finally:
        blob.write_bytes(data)
    assert pull(state, caps, where, here, tmp_path / "cache").placed == seed.files


def test_what_a_registry_does_not_have(
    caps: Capabilities, state: Path, pushed: Moved, here: Here, tmp_path: Path
) -> None:
    name = pushed.where.partition("@")[0]
    for missing in (f"{name}@sha256:{'0' * 64}", f"{name}:none", f"{name}-none:a"):
        with pytest.raises(RegistryRefused):
            pull(state, caps, missing, here, tmp_path / "cache")


def test_a_registry_that_is_not_there(caps: Capabilities, state: Path, here: Here, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9 does not answer"):
        pull(state, caps, "127.0.0.1:9/seeds:a", here, tmp_path / "cache")


def test_an_image_that_is_no_seed(
    caps: Capabilities, state: Path, base: str, registry: tuple[str, Path], here: Here, tmp_path: Path
) -> None:
    name = f"{registry[0]}/team/base:1"
    podman("push", "--quiet", "--tls-verify=false", base, name)
    with pytest.raises(SeedMismatch, match="no seed of warmstart"):
        pull(state, caps, name, here, tmp_path / "cache")


def test_a_volume_takes_it_any_user_reads_it_and_it_is_a_source_again(
    caps: Capabilities, state: Path, plan: Plan, base: str, seed: Seed, here: Here
) -> None:
    volume = f"warmstart-test-{time.time_ns()}"
    try:
        done = pull(state, caps, seed.seed, here, volume)
        assert done.placed == seed.files
        inside = [
            "run",
            "--rm",
            "--pull=never",
            "--network=none",
            "--user=4321:4321",
            f"--volume={volume}:/cache",
            base,
        ]
        file = f"/cache/{plan.cache_key}/triton/{seed_cache.name(1)}/kernel_1.json"
        assert json.loads(podman(*inside, "cat", file)) == {"name": "kernel_1"}
        podman(*inside, "sh", "-c", f"rm {file} && mkdir /cache/{plan.cache_key}/triton/own /cache/other")
        assert pull(state, caps, seed.seed, here, volume).placed == 0  # its index is there: Triton mends the entry
        podman(*inside, "sh", "-c", f"rm /cache/{plan.cache_key}/triton/{seed_cache.name(1)}/*")
    except subprocess.CalledProcessError as failed:
        pytest.fail(failed.stderr)
    else:
        assert pull(state, caps, seed.seed, here, volume).placed == 3
        assert seedmake.make(state, caps, plan, Wanted(source=volume, cu=seed_cache.CU)).digest == seed.digest
    finally:
        subprocess.run(["podman", "volume", "rm", "--force", volume], check=False, capture_output=True)


def test_a_seed_is_verified_without_being_put_anywhere(
    caps: Capabilities, state: Path, seed: Seed, pushed: Moved, here: Here, plan: Plan
) -> None:
    for source in (seed.seed, f"{NAME}:{seed.seed}", seed.folder, pushed.where):
        told = seeds.verify(state, caps, source, lambda arch: here)
        assert (told.files, told.digest, told.misfit) == (seed.files, seed.digest, "")
    elsewhere = partial(seeds.here, caps, plan, 32)
    assert "40 compute units" in seeds.verify(state, caps, seed.seed, lambda arch: elsewhere()).misfit


def test_ls_says_what_is_here_and_whether_it_fits(state: Path, seed: Seed, here: Here) -> None:
    rows = {row.seed: row for row in seeds.ls(state, lambda arch: here)}
    assert rows[seed.seed].fits == "yes"
    assert (rows[seed.seed].tiers, rows[seed.seed].digest) == (("kernels", "verdicts"), seed.digest)


def test_a_volume_that_is_not_there(caps: Capabilities) -> None:
    from warmstart.errors import NothingToSeed

    with pytest.raises(NothingToSeed, match="there is no volume warmstart-none"):
        cachedir.locate(caps, "warmstart-none")
