"""docs/presets.md: its tables are made from the data, its example works, and nothing of the run line is missing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from warmstart import presetfiles, presetlist, presets, runline

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")


def test_the_tables_are_current() -> None:
    made = presetlist.document(ROOT)
    assert made == TEXT, "python -m warmstart.presetlist > new && mv new docs/presets.md"


def test_it_lists_every_preset_every_flag_and_every_key() -> None:
    assert [name for name in presets.names(ROOT) if f"| `{name}` |" not in TEXT] == []
    assert [flag for flag in runline.data(ROOT).why if f"| `--{flag}` |" not in TEXT] == []
    assert [key for key in presetfiles.OURS if f"`{key}`" not in TEXT] == []


def test_the_example_works(tmp_path: Path) -> None:
    (example,) = re.findall(r"```ini\n(.*?)```", TEXT, re.DOTALL)
    for folder in ("presets", "arch"):
        (tmp_path / folder).mkdir()
    shutil.copytree(ROOT / "presets" / "flags", tmp_path / "presets" / "flags")
    shutil.copy(ROOT / "presets" / "flags.toml", tmp_path / "presets")
    shutil.copy(ROOT / "arch" / "rules.toml", tmp_path / "arch")
    (tmp_path / "presets" / "own.ini").write_text(example, encoding="utf-8")
    one = presets.load(tmp_path, "Qwen3-8B")
    assert (one.port, one.model, one.archs) == (8001, "Qwen/Qwen3-8B", ("gfx1151", "gfx1201"))
    assert one.env == {"VLLM_LOGGING_LEVEL": "DEBUG"}
    assert one.flags == {
        "max-model-len": "16384",
        "max-num-seqs": "16",
        "no-enable-prefix-caching": True,
        "compilation-config.cudagraph_mode": "FULL_DECODE_ONLY",
    }
