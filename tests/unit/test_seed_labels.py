"""Whom a seed is for: what its labels say, and the reasons for which it is refused here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.seed_cache import FACTS, KEY
from tests.unit.test_seed_make import CAPS, planned
from warmstart import profile, registry, seedlabels, seedlayout, seedtiers
from warmstart.errors import RegistryRefused, SeedDamaged, SeedMismatch, Unreachable, UsageError
from warmstart.probe import Capabilities
from warmstart.registry import Ref
from warmstart.seedlabels import Here

ROOT = Path(__file__).parents[2]
HERE = Here(
    cache_keys=(KEY,), arch="gfx1151", wave=32, versions={"vllm": "0.32.0", "triton": "3.8"}, cus=(40,), cpu=("sse2",)
)
ARTEFACTS = msgspec.structs.replace(
    FACTS, tiers=("artefacts",), model="Qwen/Qwen3", flags="--max-num-seqs=4", gpu="gfx1151, 40 CUs", cpu="sse2"
)


def labels(facts: seedlabels.Facts = FACTS, **changed: str) -> dict[str, str]:
    told = seedlabels.write(facts, epoch=0, entries=3, size=12, manifest="0" * 64, formats=["triton"])
    told |= {f"io.warmstart.{key.replace('_', '-')}": value for key, value in changed.items()}
    return {key: value for key, value in told.items() if value != "-"}


@pytest.mark.parametrize("facts", [FACTS, ARTEFACTS])
def test_labels_say_all_facts(facts: seedlabels.Facts) -> None:
    assert seedlabels.read(labels(facts)) == facts
    assert seedlabels.size(labels(facts)) == (12, "0" * 64)


def test_labels_are_mcvs_too() -> None:
    told = labels()
    summary = json.loads(told["cache.vllm.image/summary"])
    assert summary == {"targets": [{"backend": "hip", "arch": "gfx1151", "warp_size": 32}]}
    assert (told["cache.vllm.image/entry-count"], told["cache.vllm.image/cache-size-bytes"]) == ("3", "12")


@pytest.mark.parametrize("arch", profile.archs(ROOT))
def test_the_wave_is_the_archs_own(arch: str) -> None:
    facts = seedlabels.of_plan(planned(arch), ("kernels",))
    target = json.loads(seedlabels.summary(facts))["targets"][0]
    cdna = arch in {"gfx90a", "gfx942", "gfx950"}
    assert target["warp_size"] == (1 if arch == "cpu" else 64 if cdna else 32)
    assert (target["backend"], target["arch"]) == ("cpu" if arch == "cpu" else "hip", arch)


def test_a_seed_for_this_image_fits() -> None:
    assert seedlabels.misfit(FACTS, HERE) == ""
    seedlabels.require(ARTEFACTS, HERE)


@pytest.mark.parametrize(
    ("facts", "here", "why"),
    [
        ({"arch": "gfx1100"}, {}, "it is for gfx1100, not gfx1151"),
        ({"wave": 64}, {}, "it is for waves of 64, gfx1151 has 32"),
        ({"cache_key": "gfx1151-ba9876543210"}, {}, "cache key gfx1151-ba9876543210, the one here has " + KEY),
        ({"cache_key": "gfx1151-ba9876543210", "vllm": "0.31.0"}, {}, r"\(vllm 0.31.0 instead of 0.32.0\)"),
        ({"cu": 32}, {}, "it is for 32 compute units, the GPU has 40"),
        ({}, {"cus": ()}, "it is for 40 compute units, no such GPU is here"),
        ({"tiers": ("artefacts",), "cpu": "avx512f,sse2"}, {}, "for a processor with avx512f"),
    ],
)
def test_reasons_to_refuse_a_seed(facts: dict[str, Any], here: dict[str, Any], why: str) -> None:
    one, other = msgspec.structs.replace(FACTS, **facts), msgspec.structs.replace(HERE, **here)
    with pytest.raises(SeedMismatch, match=why) as told:
        seedlabels.require(one, other)
    assert told.value.hint


def test_a_seed_for_an_image_that_was_built_here_fits() -> None:
    here = msgspec.structs.replace(HERE, cache_keys=("gfx1151-ba9876543210", KEY))
    assert seedlabels.misfit(FACTS, here) == ""


def test_kernels_are_for_any_number_of_compute_units() -> None:
    assert seedlabels.misfit(msgspec.structs.replace(FACTS, tiers=("kernels",), cu=0), HERE) == ""


def test_another_machines_processor_is_not_judged_here() -> None:
    facts = msgspec.structs.replace(ARTEFACTS, cpu="avx512f")
    assert seedlabels.misfit(facts, msgspec.structs.replace(HERE, cpu=None)) == ""


@pytest.mark.parametrize(
    ("changed", "error", "why"),
    [
        ({"seed": "-"}, SeedMismatch, "no seed of warmstart"),
        ({"seed": "2"}, SeedMismatch, "a seed of format 2"),
        ({"tiers": "kernels,winners"}, SeedMismatch, "kernels,winners"),
        ({"tiers": "verdicts,kernels"}, SeedMismatch, "verdicts,kernels"),
        ({"tiers": "-"}, SeedMismatch, "the seed holds ''"),
        *[({"cu": cu}, SeedDamaged, "can't be read") for cu in ("many", "4_0", " 40", "+40", "-1", "٤٠", "4" * 6)],
        ({"wave": "3_2"}, SeedDamaged, "can't be read"),
        ({"cu": "4" * 10_000}, SeedDamaged, "can't be read"),
        ({"wave": "64"}, SeedDamaged, "contradict each other"),
        ({"arch": "gfx1100"}, SeedDamaged, "contradict each other"),
        ({"cache_key": "../../etc"}, SeedDamaged, "can't be read"),
        ({"model": "\x1b[2J"}, SeedDamaged, "can't be read"),
    ],
)
def test_labels_that_are_none(changed: dict[str, str], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        seedlabels.read(labels(FACTS, **changed))


@pytest.mark.parametrize("size", ["", "١٢", "1_2", "-1", "9" * 19])
def test_a_size_that_is_none(size: str) -> None:
    with pytest.raises(SeedDamaged, match="don't say"):
        seedlabels.size(labels() | {"cache.vllm.image/cache-size-bytes": size})


def test_a_deeply_nested_summary() -> None:
    with pytest.raises(SeedDamaged, match="can't be read"):
        seedlabels.read(labels() | {"cache.vllm.image/summary": "[" * 100_000})


def test_labels_of_another_image() -> None:
    with pytest.raises(SeedMismatch, match="no seed of warmstart"):
        seedlabels.read({"io.warmstart.arch": "gfx1151"})


def test_tags_tell_seeds_apart() -> None:
    facts = [
        FACTS,
        msgspec.structs.replace(FACTS, tiers=("kernels",), cu=0),
        msgspec.structs.replace(FACTS, tiers=("verdicts",)),
        msgspec.structs.replace(FACTS, cu=32),
        ARTEFACTS,
        msgspec.structs.replace(ARTEFACTS, model="other"),
        msgspec.structs.replace(ARTEFACTS, flags=""),
        msgspec.structs.replace(ARTEFACTS, cpu=""),
        msgspec.structs.replace(ARTEFACTS, tiers=seedtiers.TIERS),
    ]
    tags = [seedlabels.tag(one) for one in facts]
    assert len(set(tags)) == len(tags)
    assert tags[:3] == [f"{KEY}-cu40", KEY, f"{KEY}-verdicts-cu40"]


def test_flags_have_one_order_and_no_secrets() -> None:
    words = "--max-num-seqs 4 --api-key abc --port=8000 --enforce-eager --max_model_len=1024 -tp 2".split()
    words += ["--ssl-keyfile-password", "abc", "--hf_token=abc"]
    assert seedlabels.flags(words) == "--enforce-eager --max-model-len=1024 --max-num-seqs=4 --tp=2"
    assert seedlabels.flags(["--sizes", "1", "2", "4"]) == "--sizes=1,2,4"
    assert seedlabels.flags(["--hf-overrides", '{"a": 1}']) == """--hf-overrides='{"a": 1}'"""


def test_the_processor_by_its_features(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu sse sse2 avx512f ht\n\nflags : other\n")
    assert seedlabels.processor("sse|avx", info) == ("avx512f", "sse", "sse2")
    info.write_text("nothing\n")
    assert seedlabels.processor("sse", info) == ()


# ---- names of images, and images that are no seeds ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("registry.example/you/seeds:a", Ref("registry.example", "you/seeds", "a")),
        ("docker://registry.example/you/seeds", Ref("registry.example", "you/seeds")),
        ("localhost:5000/seeds:a", Ref("localhost:5000", "seeds", "a")),
        ("[::1]:5000/seeds:a", Ref("[::1]:5000", "seeds", "a")),
        ("box:5000/seeds", Ref("box:5000", "seeds")),
        (f"r.example/s:a@sha256:{'0' * 64}", Ref("r.example", "s", "a", f"sha256:{'0' * 64}")),
    ],
)
def test_names_in_registries(text: str, ref: Ref) -> None:
    assert registry.parse(text) == ref


def test_a_digest_wins_over_a_tag() -> None:
    assert registry.parse(f"r.example/s:a@sha256:{'0' * 64}").exact == f"r.example/s@sha256:{'0' * 64}"


@pytest.mark.parametrize(
    "text",
    [
        "seeds",
        "you/seeds:a",
        "localhost/warmstart/seed:a",
        "r.example/s@sha256:0",
        "r.example/S:a",
        "--x.y/a",
        "a.b/",
        "",
    ],
)
def test_what_is_no_name_in_a_registry(text: str) -> None:
    with pytest.raises(UsageError, match="is not the name of an image in a registry"):
        registry.parse(text)


@pytest.mark.parametrize(
    ("name", "here"),
    [("localhost:5000", True), ("127.0.0.1:5000", True), ("127.1.2.3", True), ("[::1]:5000", True)]
    + [("registry.example", False), ("10.0.0.1:5000", False)]
    + [("localhost.example:5000", False), ("127.0.0.1.example", False)],
)
def test_only_a_registry_on_loopback_may_speak_plainly(name: str, here: bool) -> None:
    assert registry.on_loopback(Ref(name, "seeds")) is here
    assert registry._verify(Ref(name, "seeds")) == ("false" if here else "true")


@pytest.mark.parametrize(
    ("told", "error", "why"),
    [
        ("manifest unknown: manifest unknown", RegistryRefused, "manifest unknown"),
        ("unauthorized: authentication required", RegistryRefused, "authentication required"),
        ("denied: requested access to the resource is denied", RegistryRefused, "denied"),
        ("dial tcp 1.2.3.4:443: connect: connection refused", Unreachable, "connection refused"),
        ("dial tcp: lookup r.example: no such host", Unreachable, "no such host"),
        ("Digest did not match, expected sha256:a, got sha256:b", SeedDamaged, "gave other bytes"),
    ],
)
def test_what_skopeo_says_becomes_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, told: str, error: type[Exception], why: str
) -> None:
    from warmstart import run
    from warmstart.errors import CommandFailed

    def fail(words: list[str], **_: object) -> run.Result:
        failed = CommandFailed("skopeo failed")
        failed.result = run.Result("", f'time="…" level=fatal msg="Error: {told}"\n', 1, 0.0)  # type: ignore[attr-defined]
        raise failed

    monkeypatch.setattr(run, "run", fail)
    with pytest.raises(error, match=why):
        registry.manifest(CAPS, Ref("r.example", "seeds", "a"))


@pytest.mark.parametrize(("name", "told"), [("localhost:5000", "on this machine"), ("r.example", "https_proxy")])
def test_a_dead_registry(monkeypatch: pytest.MonkeyPatch, name: str, told: str) -> None:
    from warmstart import run
    from warmstart.errors import CommandFailed

    def fail(*_: object, **__: object) -> run.Result:
        raise CommandFailed("dial tcp: connect: connection refused")

    monkeypatch.setattr(run, "run", fail)
    with pytest.raises(Unreachable) as raised:
        registry.manifest(CAPS, Ref(name, "seeds", "a"))
    assert told in raised.value.hint
    assert ("proxy" in raised.value.hint) == (name == "r.example")


def test_another_manifest_than_the_digest_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from warmstart import run

    monkeypatch.setattr(run, "run", lambda *_, **__: run.Result("{}", "", 0, 0.0))
    with pytest.raises(SeedDamaged, match="gave sha256:44136fa355b3… for sha256:0000"):
        registry.manifest(CAPS, Ref("r.example", "seeds", "", f"sha256:{'0' * 64}"))


def test_a_skopeo_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    from warmstart import run
    from warmstart.errors import EngineTooOld

    text = "Flags:\n  --digestfile string  x\n  --retry-times int  x\n"
    monkeypatch.setattr(run, "run", lambda *_, **__: run.Result(text, "", 0, 0.0))
    with pytest.raises(EngineTooOld, match="skopeo lacks --preserve-digests"):
        registry.require(Capabilities(**msgspec.to_builtins(CAPS)))


@pytest.mark.parametrize(
    "manifest",
    [
        {"schemaVersion": 2, "manifests": []},
        {"schemaVersion": 2, "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 5}},
        {"schemaVersion": 2, "config": {"mediaType": seedlayout.CONFIG, "size": 10**9}},
        {"schemaVersion": 2, "config": {"mediaType": seedlayout.CONFIG, "size": "5"}},
        {"schemaVersion": 2, "config": [], "layers": [5]},
        [],
    ],
)
def test_manifests_of_what_is_no_seed(manifest: Any) -> None:
    with pytest.raises(SeedMismatch, match="not a single image"):
        seedlayout.config_digest(json.dumps(manifest).encode())


def blob(**changed: Any) -> dict[str, Any]:
    return {"mediaType": seedlayout.LAYER, "digest": f"sha256:{'0' * 64}", "size": 5} | changed


@pytest.mark.parametrize(
    ("layers", "config", "error"),
    [
        ([blob()], {}, None),
        ([], {}, SeedDamaged),
        ([blob(), blob()], {}, SeedDamaged),
        ([blob(mediaType="application/vnd.oci.image.layer.v1.tar")], {}, SeedDamaged),
        ([blob(size=10**12)], {}, SeedDamaged),
        ([blob(size=0)], {}, SeedDamaged),
        ([blob(digest="sha256:../../x")], {}, SeedMismatch),
        ([blob(digest=5)], {}, SeedMismatch),
        ([blob()], {"config": []}, SeedMismatch),
        ([blob()], {"config": {"Labels": None}}, SeedMismatch),
        ([blob()], {"rootfs": {"diff_ids": []}}, SeedDamaged),
        ([blob()], {"rootfs": {"diff_ids": ["x"]}}, SeedMismatch),
    ],
)
def test_images_are_judged_in_every_field(
    layers: list[Any], config: dict[str, Any], error: type[Exception] | None
) -> None:
    whole = {"config": {"Labels": labels()}, "rootfs": {"diff_ids": [f"sha256:{'1' * 64}"]}} | config
    data = json.dumps(whole).encode()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    manifest = json.dumps({"config": blob(mediaType=seedlayout.CONFIG, digest=digest), "layers": layers}).encode()
    name = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    if error is None:
        assert seedlayout.parse(name, manifest, data).facts == FACTS
        for changed in ((name, manifest, data + b" "), (name, manifest + b" ", data), (digest, manifest, data)):
            with pytest.raises(SeedDamaged, match="what came is not"):
                seedlayout.parse(*changed)
        return
    with pytest.raises(error):
        seedlayout.parse(name, manifest, data)
