"""A model's needs from its files: headers of safetensors and config.json."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from warmstart import limits, need
from warmstart.errors import InputError

QWEN = {  # a hybrid: one full-attention layer after three linear ones
    "text_config": {
        "num_hidden_layers": 32,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
}


def tensors(file: Path, **sizes: int) -> None:
    """A safetensors file whose header tells these tensors; their bytes are a hole, as nobody may read them."""
    at, header = 0, {"__metadata__": {"format": "pt"}}
    for name, size in sizes.items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at, at + size]}  # type: ignore[dict-item]
        at += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + at)


def model(folder: Path, config: dict[str, Any], **sizes: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors(folder / "model.safetensors", **(sizes or {"a": 1000}))
    return folder


def test_weights_from_one_header(tmp_path: Path) -> None:
    found = need.read(model(tmp_path, QWEN, embed=2_034_237_440, lm_head=500))
    assert (found.weights, found.source) == (2_034_237_940, "its files' headers")


def test_weights_from_several_files_and_an_index(tmp_path: Path) -> None:
    model(tmp_path, QWEN)
    (tmp_path / "model.safetensors").unlink()
    tensors(tmp_path / "model-00001-of-00002.safetensors", a=700)
    index = {
        "metadata": {"total_size": 1000},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert need.read(tmp_path).weights == 1000  # a file is missing: the index says the sum
    assert need.read(tmp_path).source == "its index"
    tensors(tmp_path / "model-00002-of-00002.safetensors", b=250)
    tensors(tmp_path / "unrelated.safetensors", c=9)
    assert need.read(tmp_path).weights == 950


def test_consolidated_files_hold_it_a_second_time(tmp_path: Path) -> None:
    model(tmp_path, QWEN, a=640)
    tensors(tmp_path / "consolidated.safetensors", a=640)
    assert need.read(tmp_path).weights == 640


def test_a_hybrid(tmp_path: Path) -> None:
    found = need.read(model(tmp_path, QWEN))
    assert (found.full_layers, found.state_layers, found.windows) == (8, 24, {})
    assert found.token_values == 2 * 4 * 256
    assert found.state == (2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4


def test_types_of_layers_by_name(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "chunked_attention", "full_attention"],
        "sliding_window": 1024,
        "attention_chunk_size": 8192,
        "num_attention_heads": 8,
        "hidden_size": 1024,
    }
    found = need.read(model(tmp_path, config))
    assert (found.full_layers, found.windows, found.state_layers) == (1, {1024: 2, 8192: 1}, 0)
    assert found.token_values == 2 * 8 * 128  # neither head_dim nor KV heads: hidden / heads, as many as heads


@pytest.mark.parametrize(
    ("more", "full", "windows"),
    [
        ({"sliding_window": 4096}, 0, {4096: 6}),  # Mistral: every layer
        ({"sliding_window": 4096, "use_sliding_window": False}, 6, {}),  # Qwen2: has one, does not use it
        ({"sliding_window": 512, "sliding_window_pattern": 6}, 1, {512: 5}),  # Gemma 3
        ({"sliding_window": None}, 6, {}),
        ({"num_kv_shared_layers": 2}, 4, {}),  # they use the KV of others
    ],
)
def test_sliding_windows(tmp_path: Path, more: dict[str, Any], full: int, windows: dict[int, int]) -> None:
    config = {"num_hidden_layers": 6, "num_attention_heads": 8, "hidden_size": 1024, **more}
    found = need.read(model(tmp_path, config))
    assert (found.full_layers, found.windows) == (full, windows)


def test_latent_attention(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512}
    found = need.read(model(tmp_path, {**config, "qk_rope_head_dim": 64}))
    assert (found.token_values, found.latent) == (576, True)


def test_per_layer_embeddings_are_held_twice(tmp_path: Path) -> None:
    own = {"num_hidden_layers": 42, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
    found = need.read(model(tmp_path, {"text_config": {**own, "num_attention_heads": 8, "hidden_size": 2560}}))
    assert found.twice == 262_144 * 42 * 256 * 2  # 5.6 GB


def test_without_files_the_presets_figure(tmp_path: Path) -> None:
    found = need.read(None, "11.0")
    assert (found.weights, found.source, found.known) == (11_000_000_000, "the preset", False)
    with pytest.raises(InputError, match="how large") as raised:
        need.read(None)
    assert "weights-gb" in raised.value.hint
    with pytest.raises(InputError):
        need.read(None, "eleven")


def test_a_configuration_alone(tmp_path: Path) -> None:
    model(tmp_path, QWEN)
    (tmp_path / "model.safetensors").unlink()
    found = need.read(tmp_path, "11")
    assert (found.weights, found.full_layers) == (11_000_000_000, 8)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 20, struct.pack("<Q", 2) + b"[]", b"PK\x03\x04 a zip"])
def test_a_file_that_is_no_safetensors(tmp_path: Path, content: bytes) -> None:
    model(tmp_path, QWEN)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="no safetensors"):
        need.read(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{broken",
        "[" * 100_000,
        '{"num_hidden_layers": "many", "a": 1}',
        '{"num_hidden_layers": Infinity}',
        '{"num_hidden_layers": NaN}',
        '{"num_hidden_layers": -3}',
        '{"num_hidden_layers": 2000000000}',
        '{"num_hidden_layers": 4, "linear_num_value_heads": 4, "layer_types": ["linear"]}',
        '{"num_hidden_layers": 4, "hidden_size": 1e300, "num_attention_heads": 2}',
        '{"num_hidden_layers": 4, "sliding_window": -8}',
        '{"num_hidden_layers": 4, "layer_types": 7}',
        '{"num_hidden_layers": 4, "text_config": [1]}',
    ],
)
def test_a_broken_configuration(tmp_path: Path, text: str) -> None:
    model(tmp_path, QWEN)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json") as told:
        need.read(tmp_path)
    assert told.value.message.isprintable()
    assert len(told.value.message) < 500


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": ["a"]},
        {"weight_map": "a"},
        {"weight_map": 7},
        {"metadata": [1]},
        {"metadata": {"total_size": float("nan")}},
        {"metadata": {"total_size": float("inf")}},
    ],
)
def test_a_broken_index(tmp_path: Path, index: dict[str, Any]) -> None:
    model(tmp_path, QWEN)
    (tmp_path / need.INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"index\.json of .* can't be understood"):
        need.read(tmp_path)


def test_a_download_that_broke_off(tmp_path: Path) -> None:
    file = model(tmp_path, QWEN) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(InputError, match=r"model.safetensors is cut off: it has \d+ of \d+ bytes"):
        need.read(tmp_path)


@pytest.mark.parametrize("end", ["Infinity", "NaN", "null", '"x"', "[" * 50_000])
def test_sizes_of_a_header_that_are_none(tmp_path: Path, end: str) -> None:
    text = f'{{"a": {{"data_offsets": [0, {end}]}}}}'.encode()
    model(tmp_path, QWEN)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(InputError, match="no safetensors"):
        need.read(tmp_path)


def test_where_a_model_lies(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    folder = hub / "models--Qwen--Qwen3-0.6B"
    assert need.find("Qwen/Qwen3-0.6B", hub) is None
    model(folder / "snapshots" / "abc", QWEN)
    assert need.find("Qwen/Qwen3-0.6B", hub) == folder / "snapshots" / "abc"
    model(folder / "snapshots" / "aaa", QWEN)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc\n")
    assert need.find("Qwen/Qwen3-0.6B", hub) == folder / "snapshots" / "abc"
    assert need.find(str(tmp_path), hub) == tmp_path
    inside = f"/models/hub/{folder.name}/snapshots/abc"
    assert need.find(inside, hub) == folder / "snapshots" / "abc"
    assert need.find("/models/none", hub) is None
    assert need.find("no\0name", hub) is None


def test_a_folder_is_one_by_its_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the run line: what would be fetched from the hub is not judged by a folder that happens to be here."""
    model(tmp_path / "mine" / "tiny", QWEN)
    monkeypatch.chdir(tmp_path)
    assert need.find("mine/tiny", tmp_path / "hub") is None
    assert need.find("./mine/tiny", tmp_path / "hub") == tmp_path / "mine" / "tiny"
    assert need.find("./none", tmp_path / "hub") is None


@pytest.mark.parametrize(
    ("name", "gb"),
    [
        ("Qwen/Qwen3-0.6B", (1.2, 1.3)),  # 1.5 GB on disk: embeddings and head are counted apart in its name
        ("RedHatAI/Qwen3.5-9B-quantized.w4a16", (11.0, 11.5)),  # 11.0
        ("cyankiwi/Qwen3.6-35B-A3B-AWQ-4bit", (22, 30)),  # 22; the active 3B are not what is loaded
        ("org/Model-8x7B-FP8", (56, 65)),
        ("org/Model-70B", (140, 145)),
        ("org/b2b-model", (0, 0)),
        ("openai/whisper-large", (0, 0)),
    ],
)
def test_a_guess_from_the_name(name: str, gb: tuple[float, float]) -> None:
    rates = limits.load(Path(__file__).parents[2]).guess
    assert gb[0] * 1e9 <= need.guess(name, rates) <= gb[1] * 1e9


def test_the_guess_comes_last() -> None:
    rates = limits.load(Path(__file__).parents[2]).guess
    assert need.read(None, "11", "org/Model-70B", rates).weights == 11_000_000_000
    assert need.read(None, "", "org/Model-70B", rates).source == "a guess from its name"
    with pytest.raises(InputError, match="how large"):
        need.read(None, "", "org/whisper", rates)
