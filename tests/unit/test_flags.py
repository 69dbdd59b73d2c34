"""What vLLM's versions know of flags and variables: the committed data, and how a flag is judged by it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tools import vllm_flags
from warmstart import flags, profile
from warmstart.errors import ProfileError

ROOT = Path(__file__).parents[2]
CPU = "0.32.0"
ROCM = "0.33.0"


def test_every_arch_has_data_of_its_vllm() -> None:
    missing = {
        arch: version
        for arch in profile.archs(ROOT)
        if flags.known(ROOT, version := profile.load(ROOT, arch).profile.versions.vllm) is None
    }
    assert missing == {}


@pytest.mark.parametrize("version", flags.versions(ROOT))
def test_data_is_of_its_version_and_whole(version: str) -> None:
    known = flags.known(ROOT, version)
    assert known is not None
    assert known.version == version
    assert len(known.names) > 200
    kinds = (known.switch, known.plain, known.one, known.several, known.json)
    assert sum(map(len, kinds)) == len(known.names), "a flag is of one kind"
    assert {target.removeprefix("no-") for target in known.alias.values()} <= known.names
    assert not known.alias.keys() & known.names
    assert known.choices.keys() <= known.names
    assert {"max-model-len", "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization"} <= known.one
    assert {"enforce-eager", "language-model-only"} <= known.switch
    assert {"compilation-config", "limit-mm-per-prompt"} <= known.json
    assert "served-model-name" in known.several
    assert "VLLM_CACHE_ROOT" in known.env


def test_the_newest_is_taken_without_a_version() -> None:
    newest = flags.known(ROOT)
    assert newest is not None
    assert newest.version == flags.versions(ROOT)[0] == ROCM


def test_a_local_version_is_its_release() -> None:
    assert flags.known(ROOT, f"{ROCM}+rocm100") is flags.known(ROOT, ROCM)
    assert flags.known(ROOT, "0.1") is None
    assert flags.known(ROOT, "main") is None


def test_flags_of_the_hand_kept_file_exist() -> None:
    known = flags.known(ROOT)
    assert known is not None
    assert set(flags.kept(ROOT).ours) <= known.names


def test_what_is_gone_is_in_no_newer_version() -> None:
    for one in flags.kept(ROOT).gone:
        assert one.instead.endswith("."), one.name
        for version in flags.versions(ROOT):
            known = flags.known(ROOT, version)
            assert known is not None
            assert one.name not in known.names, (one.name, version)


GOOD = [
    ("max-model-len", "8192", ("max-model-len", "8192")),
    ("enforce-eager", "", ("enforce-eager", True)),
    ("enforce-eager", "true", ("enforce-eager", True)),
    ("enforce-eager", "false", ("no-enforce-eager", True)),
    ("no-enable-prefix-caching", "", ("no-enable-prefix-caching", True)),
    ("no-enable-prefix-caching", "false", ("enable-prefix-caching", True)),
    ("disable-log-stats", "true", ("disable-log-stats", True)),
    ("disable-log-stats", "false", ("disable-log-stats", None)),
    ("served-model-name", "a 'b c'", ("served-model-name", ("a", "b c"))),
    ("compilation-config", '{"cudagraph_mode": "FULL"}', ("compilation-config", '{"cudagraph_mode": "FULL"}')),
    ("compilation-config.cudagraph_mode", "FULL", ("compilation-config.cudagraph_mode", "FULL")),
    ("dtype", "bfloat16", ("dtype", "bfloat16")),
    ("seed", "-1", ("seed", "-1")),
]


@pytest.mark.parametrize(("key", "value", "wanted"), GOOD)
@pytest.mark.parametrize("version", [CPU, ROCM])
def test_good_flags(version: str, key: str, value: str, wanted: tuple[str, flags.Value | None]) -> None:
    assert flags.check(ROOT, key, value, version) == wanted


BAD = [
    ("max-model-length", "1", "has no flag --max-model-length", "did you mean max-model-len?"),
    ("model-name", "x", "has no flag", "did you mean"),
    ("enforce-eager", "yes", "takes no value", "switches it on"),
    ("max-model-len", "", "needs a value", ""),
    ("compilation-config", "FULL", "takes a JSON object", "compilation-config.a"),
    ("compilation-config", "[1]", "takes a JSON object", ""),
    ("compilation-config", "[" * 100_000, "takes a JSON object", ""),
    ("max-num-seqs.x", "1", "has no parts", ""),
    ("dtype", "bloat16", "dtype can't be 'bloat16'", "bfloat16"),
    ("quantization", "awk", "quantization can't be", "did you mean awq?"),
    ("served-model-name", "'a", "No closing quotation", ""),
    ("Max Len", "1", "is no flag", ""),
    ("host", "0.0.0.0", "host can't be set", "port"),
    ("api-key", "x", "api-key can't be set", "VLLM_API_KEY"),
    ("num-scheduler-steps", "8", "no num-scheduler-steps since", "async-scheduling"),
    ("compilation-config", '{"full_cuda_graph": true}', "compilation-config.full_cuda_graph", "cudagraph_mode"),
    ("compilation-config.full_cuda_graph", "true", "full_cuda_graph", "cudagraph_mode"),
    ("quantization", "ptpc_fp8", "quantization=ptpc_fp8", "fp8_per_channel"),
]


@pytest.mark.parametrize(("key", "value", "what", "hint"), BAD)
@pytest.mark.parametrize("version", [CPU, ROCM])
def test_bad_flags(version: str, key: str, value: str, what: str, hint: str) -> None:
    with pytest.raises(flags.Bad) as raised:
        flags.check(ROOT, key, value, version)
    assert what in raised.value.what
    assert hint in raised.value.hint
    assert "\n" not in raised.value.what + raised.value.hint


def test_the_other_way_to_switch_off_came_in_0_33() -> None:
    assert flags.check(ROOT, "disable-prefix-caching", "", ROCM) == ("no-enable-prefix-caching", True)
    assert flags.check(ROOT, "disable-log-requests", "", ROCM) == ("no-enable-log-requests", True)
    with pytest.raises(flags.Bad, match="has no disable-log-requests"):
        flags.check(ROOT, "disable-log-requests", "", CPU)


def test_without_a_version_any_known_one_will_do() -> None:
    assert flags.check(ROOT, "disable-log-requests", "") == ("no-enable-log-requests", True)
    flags.check_env(ROOT, "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM")  # gone in 0.33
    with pytest.raises(flags.Bad) as raised:
        flags.check(ROOT, "max-modle-len", "3")
    assert raised.value.what == "vLLM has no flag --max-modle-len"
    with pytest.raises(flags.Bad) as raised:
        flags.check_env(ROOT, "VLLM_ROCM_USE_AITR")
    assert raised.value.what == "vLLM does not know VLLM_ROCM_USE_AITR"


def test_nothing_is_checked_without_data() -> None:
    assert flags.check(ROOT, "whatever", "1", "9.9") == ("whatever", "1")
    assert flags.check(ROOT, "whatever", "", "9.9") == ("whatever", True)
    with pytest.raises(flags.Bad, match="swap-space"):  # but what is gone stays gone
        flags.check(ROOT, "swap-space", "1", "9.9")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("VLLM_ATTENTION_BACKEND", "--attention-backend"),
        ("VLLM_USE_V1", "only V1"),
        ("VLLM_V1_USE_PREFILL_DECODE_ATTENTION", "ROCM_ATTN"),
        ("VLLM_ROCM_USE_AITR", "did you mean VLLM_ROCM_USE_AITER?"),
        ("A-B", ""),
    ],
)
def test_bad_variables(name: str, hint: str) -> None:
    with pytest.raises(flags.Bad) as raised:
        flags.check_env(ROOT, name, ROCM)
    assert hint in raised.value.hint


@pytest.mark.parametrize("name", ["VLLM_FOO", "VLLM_MODEL", "VLLM_X"])
def test_a_variable_is_like_another_by_what_follows_vllm(name: str) -> None:
    with pytest.raises(flags.Bad) as raised:
        flags.check_env(ROOT, name, ROCM)
    assert "did you mean" not in raised.value.hint


def test_good_variables() -> None:
    for name in ("VLLM_ROCM_USE_AITER", "HF_TOKEN", "NCCL_PROTO", "_x"):
        flags.check_env(ROOT, name, ROCM)
    flags.check_env(ROOT, "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", CPU)
    with pytest.raises(flags.Bad, match=r"since 0\.33"):
        flags.check_env(ROOT, "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", ROCM)


def test_a_mistake_in_the_data_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "presets" / "flags").mkdir(parents=True)
    (tmp_path / "presets" / "flags.toml").write_text("schema = 1\nhashd = []\n", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"presets/flags\.toml"):
        flags.kept(tmp_path)
    (tmp_path / "presets" / "flags" / "1.0.toml").write_text("version = ", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"flags/1\.0\.toml"):
        flags.known(tmp_path, "1.0")


class _Paired(argparse.BooleanOptionalAction):
    """As vLLM 0.33 has it: --enable-x also as --disable-x."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: object) -> None:
        super().__init__(option_strings, dest)
        self.negative_option_strings = {"--no-enable-x", "--disable-x"}
        self.option_strings = ["--enable-x", "--disable-x"]


def test_the_tool_tells_flags_by_kind() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--max-len", "-m", "--max-length", type=int)
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction)
    parser.add_argument("--enable-x", action=_Paired)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--kind", choices=["a", None])
    parser.add_argument("--config", help="Should either be a valid JSON string or JSON keys passed individually.")
    kinds, choices, alias = vllm_flags.flags(parser)
    assert kinds == {
        "switch": ["eager", "enable-x"],
        "plain": ["quiet"],
        "one": ["max-len", "kind"],
        "several": ["names"],
        "json": ["config"],
    }
    assert choices == {"kind": ["a"]}
    assert alias == {"max-length": "max-len", "disable-x": "no-enable-x"}


def test_the_tool_writes_lists_that_toml_reads() -> None:
    import tomllib

    names = [f"flag-{i}" for i in range(60)]
    assert tomllib.loads(vllm_flags.toml_list("one", reversed(names)))["one"] == sorted(names)
    assert tomllib.loads(vllm_flags.toml_list("one", [])) == {"one": []}
