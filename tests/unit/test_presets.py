"""Presets: the INI convention, overrides, what is refused and how it is told, and the presets that are shipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstart import presetfiles, presetlist, presets, profile
from warmstart.errors import PresetError, PresetUnfit, UnknownPreset, UsageError, WarmstartError

ROOT = Path(__file__).parents[2]
SHIPPED = presets.names(ROOT)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the data of flags and no preset."""
    (tmp_path / "presets").mkdir()
    shutil.copytree(ROOT / "presets" / "flags", tmp_path / "presets" / "flags")
    shutil.copy(ROOT / "presets" / "flags.toml", tmp_path / "presets")
    (tmp_path / "arch").mkdir()
    shutil.copy(ROOT / "arch" / "rules.toml", tmp_path / "arch")
    return tmp_path


def write(tree: Path, text: str, name: str = "a.ini") -> Path:
    (tree / "presets" / name).write_text(text, encoding="utf-8")
    return tree


WHOLE = """
# a comment
[global]
image = localhost/warmstart/vllm:gfx1100
port = 9000
env.A = global
env.B = b c

[one]
; another comment
model = org/name
archs = gfx1100, gfx1101
env.A = own
max-model-len = 8192
enforce-eager
language-model-only = true
limit-mm-per-prompt = {"image": 0}
notes = measured
  on two lines
"""


def test_a_whole_preset(tree: Path) -> None:
    one = presets.load(write(tree, WHOLE), "one")
    assert one.image == "localhost/warmstart/vllm:gfx1100"
    assert (one.port, one.model, one.archs) == (9000, "org/name", ("gfx1100", "gfx1101"))
    assert one.env == {"A": "own", "B": "b c"}
    assert one.flags == {
        "max-model-len": "8192",
        "enforce-eager": True,
        "language-model-only": True,
        "limit-mm-per-prompt": '{"image": 0}',
    }
    assert one.notes == "measured on two lines"
    assert one.file == "a.ini"
    assert presets.command(one) == [
        *["org/name", "--served-model-name", "one", "--enforce-eager", "--language-model-only"],
        *["--limit-mm-per-prompt", '{"image": 0}', "--max-model-len", "8192"],
    ]


def test_global_holds_for_its_own_file_alone(tree: Path) -> None:
    write(tree, "[other]\nmodel = m\n", "b.ini")
    other = presets.load(write(tree, WHOLE), "other")
    assert (other.port, other.image, other.env) == (presets.PORT, "", {})


def test_set_lies_over_the_preset(tree: Path) -> None:
    over = {
        "max_model_len": "4096",
        "--max-num-seqs": "8",
        "env.A": "mine",
        "model": "other/name",
        "port": "8001",
        "limit-mm-per-prompt": "",
        "enforce-eager": "false",
    }
    one = presets.load(write(tree, WHOLE), "one", over)
    assert one.flags == {
        "max-model-len": "4096",
        "max-num-seqs": "8",
        "language-model-only": True,
        "no-enforce-eager": True,
    }
    assert (one.env["A"], one.model, one.port) == ("mine", "other/name", 8001)


def test_words_of_set() -> None:
    assert presets.sets(["a=1", "b", "env.C=x=y", " d = e "]) == {"a": "1", "b": "true", "env.C": "x=y", "d": "e"}
    for bad in ("=1", "", " =x"):
        with pytest.raises(UsageError):
            presets.sets([bad])


def test_several_values_and_dashes_in_the_command(tree: Path) -> None:
    write(tree, "[one]\nmodel = m\nserved-model-name = a 'b c'\nseed = -1\n")
    command = presets.command(presets.load(tree, "one"))
    assert command == ["m", "--seed=-1", "--served-model-name", "a", "b c"]


BROKEN = [
    ("[one]\n[one]\n", "'one' already exists"),
    ("[one]\nseed = 1\nseed = 2\n", "'seed'"),
    ("[one]\nmax-num-seqs = 1\nmax_num_seqs = 2\n", "max-num-seqs is there twice"),
    ("seed = 1\n", "line 1 stands below no"),
    ("[one\nseed = 1\n", "line 1 stands below no"),
    ("[one]\n= 1\n", "line 2 is neither"),
    ("[one]\nseed = 1\x07\n", "control character"),
    ("[one]\nmodel = a\n  b\n", "spans several lines"),
    ("[o\x01ne]\n", "control character"),
    ("[a b]\n", "letters, digits"),
    ("[one]\nmax-num-seqs = 16 # graphs\n", "a comment needs a line of its own"),
    ("[one]\nmodl = x\n", "did you mean model?"),
    ("[one]\nmax-model-length = 1\n", "did you mean max-model-len?"),
    ("[one]\nenv.A-B = 1\n", "is no name of a variable"),
    ("[one]\nenv.VLLM_ATTENTION_BACKEND = X\n", "Use --attention-backend."),
    ('[one]\ncompilation-config = {"full_cuda_graph": true}\n', "cudagraph_mode"),
    ("[one]\nport = 0\n", "from 1 to 65535"),
    ("[one]\nport = 80a\n", "from 1 to 65535"),
    ("[one]\narchs = gfx1151 rdna3\n", "'rdna3' is no arch"),
    ("[one]\nimage = -v/:/x\n", "is no image"),
    ("[one]\nmodel = --trust-remote-code\n", "model can't be"),
    ("[one]\nenv.HIP_VISIBLE_DEVICES = 0\nenv.ROCR_VISIBLE_DEVICES = 0\n", "both set"),
]


@pytest.mark.parametrize(("text", "told"), BROKEN)
def test_a_broken_file_is_told_in_one_line(tree: Path, text: str, told: str) -> None:
    write(tree, text)
    with pytest.raises(PresetError) as raised:
        presets.load(tree, "one")
    assert told in f"{raised.value.message} {raised.value.hint}"
    assert raised.value.message.startswith("a.ini")
    assert all(c.isprintable() for c in raised.value.message + raised.value.hint)
    assert raised.value.code == 71


def test_no_text_is_told_in_one_line(tree: Path) -> None:
    (tree / "presets" / "a.ini").write_bytes(b"[one]\nmodel = \xff\n")
    with pytest.raises(PresetError, match="not UTF-8"):
        presets.names(tree)


def test_a_preset_in_two_files(tree: Path) -> None:
    write(tree, "[one]\n")
    with pytest.raises(PresetError, match=r"b\.ini: preset one is in a\.ini"):
        presets.load(write(tree, "[one]\n", "b.ini"), "one")


def test_what_is_wrong_in_set_names_set(tree: Path) -> None:
    with pytest.raises(PresetError, match=r"--set: .*max-num-seq\b"):
        presets.load(write(tree, WHOLE), "one", {"max-num-seq": "1"})


@pytest.mark.parametrize(
    "over",
    [
        {"port": "80a"},
        {"archs": "rdna3"},
        {"image": "-v/:/x"},
        {"model": "--x"},
        {"weights-gb": "many"},
        {"env.HIP_VISIBLE_DEVICES": "0"},
    ],
)
def test_a_bad_value_names_where_it_is_from(tree: Path, over: dict[str, str]) -> None:
    write(tree, f"{WHOLE}\n[two]\nmodel = m\nenv.ROCR_VISIBLE_DEVICES = 0\n")
    with pytest.raises(PresetError, match=r"^--set: "):
        presets.load(tree, "two", over)


def test_no_version_is_named_before_the_image_is_known(tree: Path) -> None:
    write(tree, "[one]\nmodel = m\n")
    with pytest.raises(PresetError, match="--set: vLLM has no flag --max-modle-len"):
        presets.load(tree, "one", {"max-modle-len": "3"})
    with pytest.raises(PresetError, match=r"--set: vLLM 0\.32\.0 has no flag --max-modle-len"):
        presets.load(tree, "one", {"max-modle-len": "3"}, "0.32.0")


def test_a_broken_file_leaves_the_others(tree: Path) -> None:
    write(write(tree, WHOLE), "[mine\nmodel = m\n", "mine.ini")
    assert presets.load(tree, "one").model == "org/name"
    with pytest.raises(PresetError, match=r"^mine\.ini: line 1"):
        presets.load(tree, "mine")
    rows, broken = presetlist.listed(tree)
    assert [(row["name"], bool(row["problem"])) for row in rows] == [("one", False), ("presets/mine.ini", True)]
    assert [problem.message for problem in broken] == [rows[1]["problem"]]
    table = presetlist.text(rows)
    assert "org/name" in table
    assert "broken: mine.ini: line 1 stands below no" in table


def test_a_broken_preset_leaves_the_others(tree: Path) -> None:
    write(tree, WHOLE + "[two]\nmodl = m\n")
    rows, broken = presetlist.listed(tree)
    assert [(row["name"], row["model"], bool(row["problem"])) for row in rows] == [
        ("one", "org/name", False),
        ("two", "", True),
    ]
    assert len(broken) == 1


def test_the_list_ends_with_what_is_broken(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import build
    from warmstart import cli

    monkeypatch.setattr(build, "ROOT", write(write(tree, WHOLE), "seed = 1\n", "mine.ini"))
    assert cli.main(build.VERBS, ["presets"]) == PresetError.code
    told = capsys.readouterr()
    assert "org/name" in told.out
    assert "mine.ini" in told.err


def test_unknown_preset() -> None:
    with pytest.raises(UnknownPreset) as raised:
        presets.load(ROOT, "qwen3-0.6b-smok")
    assert "did you mean Qwen3-0.6B-smoke?" in raised.value.hint
    assert raised.value.code == 70
    with pytest.raises(UnknownPreset) as raised:
        presets.load(ROOT, "")
    assert "did you mean" not in raised.value.hint


def test_a_preset_for_another_arch(tree: Path) -> None:
    one = presets.load(write(tree, WHOLE), "one")
    presets.usable(one, "gfx1100")
    presets.usable(one)
    with pytest.raises(PresetUnfit) as raised:
        presets.usable(one, "gfx1151")
    assert raised.value.code == 72
    assert "gfx1100, gfx1101" in raised.value.hint


def test_a_tombstone_is_refused_with_its_reason() -> None:
    gemma = presets.load(ROOT, "gemma-4-E4B-it-w4a16")
    with pytest.raises(PresetUnfit, match="twice"):
        presets.usable(gemma, "gfx1102")
    presets.usable(gemma, "gfx1102", force=True)


def test_hints_are_in_the_words_of_make(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")
    with pytest.raises(UnknownPreset) as unknown:
        presets.load(ROOT, "smok")
    assert unknown.value.hint.startswith("did you mean PRESET=smoke-cpu? `make presets` lists all: ")
    with pytest.raises(PresetUnfit) as refused:
        presets.usable(presets.load(ROOT, "gemma-4-E4B-it-w4a16"), "gfx1102")
    assert refused.value.hint == "`make up PRESET=gemma-4-E4B-it-w4a16 ARGS='--force'` tries all the same"
    with pytest.raises(PresetUnfit) as unfit:
        presets.usable(presets.load(write(tree, WHOLE), "one"), "gfx1151")
    assert "`make presets` shows" in unfit.value.hint
    with pytest.raises(UsageError) as nameless:
        presets.sets(["=1"])
    assert nameless.value.hint.startswith("ARGS='--set ")
    (warning,) = presets.load(ROOT, "Llama-3.1-70B-fp8").warnings
    assert "; ARGS='--set model=amd/" in warning
    assert "ARGS='--set model=…'" in presetlist.one(presets.load(ROOT, "instinct"))
    assert "ARGS='--set model=…'" in presetlist.text(presetlist.rows(ROOT))


def test_a_preset_without_a_model_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PresetError, match="names no model"):
        presets.usable(presets.load(ROOT, "smoke-cpu"), "cpu")
    presets.usable(presets.load(ROOT, "smoke-cpu", {"model": "/a/folder"}), "cpu")
    monkeypatch.setenv("MAKELEVEL", "1")
    with pytest.raises(PresetError, match="names no model: ARGS='--set model=…'"):
        presets.usable(presets.load(ROOT, "smoke-cpu"), "cpu")


def test_quantising_at_every_start_is_told() -> None:
    (warning,) = presets.load(ROOT, "Llama-3.1-70B-fp8").warnings
    assert "2 to 5 minutes" in warning
    assert "amd/Llama-3.1-70B-Instruct-FP8-KV" in warning
    over = {"model": "amd/Llama-3.1-70B-Instruct-FP8-KV", "quantization": ""}
    assert presets.load(ROOT, "Llama-3.1-70B-fp8", over).warnings == ()


def test_an_unknown_vllm_is_told(tree: Path) -> None:
    one = presets.load(write(tree, "[one]\nmodel = m\nnew-flag = 1\n"), "one", version="9.9.9")
    assert one.flags == {"new-flag": "1"}
    assert "vLLM 9.9.9" in one.warnings[0]


def test_no_secret_is_shown(tree: Path) -> None:
    write(tree, "[one]\nmodel = m\nenv.HF_TOKEN = hf_S3CRETS3CRET\nenv.X = see hf_S3CRETS3CRET\nenv.MY_KEY = S3CRET\n")
    one = presets.load(tree, "one", {"notes": "hf_S3CRETS3CRET"})
    assert one.env["MY_KEY"] == "S3CRET"
    shown = (
        f"{presets.masked(one)} {presetlist.one(one)} {presetlist.rows(tree)} {presetlist.text(presetlist.rows(tree))}"
    )
    assert "S3CRET" not in shown


def test_a_secret_with_a_control_character_is_not_shown(tree: Path) -> None:
    for text in (
        "env.HF_TOKEN = S3CRET\x07",
        "api-key = S3CRET",
        "env.A-TOKEN = S3CRET",
        "dtype = hf_S3CRETS3CRET",
        "env.HF_TOKEN S3CRET",
        "api-key S3CRET",
        "= S3CRET",
    ):
        with pytest.raises(PresetError) as raised:
            presets.load(write(tree, f"[one]\n{text}\n"), "one")
        assert "S3CRET" not in raised.value.message + raised.value.hint, text


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_presets_fit_their_vllm(name: str) -> None:
    one = presets.load(ROOT, name)
    known = profile.archs(ROOT)
    assert set(one.archs) <= set(known)
    assert one.notes, "what was measured, and by whom, or that nothing was"
    for arch in one.archs or known:
        fitted = presets.load(ROOT, name, version=profile.load(ROOT, arch).profile.versions.vllm)
        assert fitted.flags == one.flags
        assert [w for w in fitted.warnings if "not checked" in w] == []


def test_what_the_project_promises_is_shipped() -> None:
    strix = presets.load(ROOT, "Qwen3.6-35B-A3B-AWQ")
    assert strix.archs == ("gfx1151",)
    assert strix.flags["max-num-batched-tokens"] == "8192"
    assert "enforce-eager" not in strix.flags
    nine = presets.load(ROOT, "Qwen3.5-9B-w4a16")
    assert nine.model == "RedHatAI/Qwen3.5-9B-quantized.w4a16"
    pair = presets.load(ROOT, "R9700-pair")
    assert (pair.env, pair.archs) == ({"NCCL_P2P_DISABLE": "1", "NCCL_PROTO": "Simple"}, ("gfx1201",))
    for name in ("instinct", "Llama-3.3-70B", "DeepSeek-R1", "gpt-oss-120b"):
        assert presets.load(ROOT, name).env["VLLM_ROCM_USE_AITER"] == "1"
    assert presets.load(ROOT, "mi200").env["VLLM_ROCM_USE_AITER"] == "0"
    assert presets.load(ROOT, "DeepSeek-R1").flags["block-size"] == "1"


@pytest.mark.parametrize("name", ["Qwen3.6-35B-A3B-AWQ", "Qwen3.5-9B-w4a16"])
def test_text_presets_load_no_vision_tower_and_capture_few_graphs(name: str) -> None:
    one = presets.load(ROOT, name)
    assert one.flags["language-model-only"] is True
    assert int(str(one.flags["max-num-seqs"])) <= 16


def test_the_list(tmp_path: Path) -> None:
    rows = presetlist.rows(ROOT)
    assert [row["name"] for row in rows] == SHIPPED
    table = presetlist.text(rows).splitlines()
    assert len(table) == len(SHIPPED) + 1
    assert any("refused:" in line for line in table)


text = st.text(st.characters(codec="utf-8"), max_size=40)


@given(key=text, value=text)
def test_whatever_stands_in_a_file_is_a_preset_or_one_line(key: str, value: str) -> None:
    _one_line(lambda: presetfiles.spelled("x", {key: value}))
    _one_line(lambda: presets.load(ROOT, "smoke-cpu", {key: value}))


def _one_line(call: Callable[[], object]) -> None:
    told: list[WarmstartError] = []
    try:
        call()
    except WarmstartError as failure:
        told.append(failure)
    for one in told:
        assert all(c.isprintable() for c in one.message + one.hint)
