"""What a model needs, from its own files: weights from the headers of safetensors, KV from its configuration.

No tensor is read. Sizes are bytes of the whole model; what several GPUs share is divided by the guard.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from warmstart import hints, presets
from warmstart.errors import InputError
from warmstart.limits import Guess

INDEX = "model.safetensors.index.json"
MOST_LAYERS = 10_000  # far above any model's; the kinds of layers are counted one by one
MOST = 1 << 60  # bytes, or of anything else
HEADER_LIMIT = 100_000_000  # the format's own limit of a header's size
TYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
STATE_TYPE = "float32"  # of a linear-attention layer's state where the configuration says nothing: the larger choice


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What the guard has to know of a model."""

    weights: int
    source: str  # where the weights' size is from
    context: int = 0  # the longest that it was made for; 0: unknown
    hidden: int = 0
    intermediate: int = 0
    vocabulary: int = 0
    type_bytes: int = 2  # of one value of the model's type
    full_layers: int = 0  # attention layers that keep KV of the whole context
    windows: dict[int, int] = {}  # tokens of a sliding window → layers that have it
    state_layers: int = 0  # layers that keep one state for each sequence
    kv_heads: int = 0
    token_values: int = 0  # values that one attention layer keeps of one token, of all heads
    latent: bool = False  # those are one latent vector (MLA), which every GPU holds whole
    state: int = 0  # bytes of one sequence's state in one layer
    twice: int = 0  # bytes of tables that vLLM holds twice

    @property
    def known(self) -> bool:
        """Whether its configuration was found."""
        return self.full_layers + len(self.windows) + self.state_layers > 0


def find(model: str, hub: Path) -> Path | None:
    """The folder of a model: itself, what is mounted as it, or its snapshot in the Hugging Face cache `hub` (…/hub).
    None: not there."""
    folder = presets.model_folder(model) or presets.cached_folder(model, hub)
    try:
        if folder:
            return folder if folder.is_dir() else None
        snapshots = hub / f"models--{model.replace('/', '--')}" / "snapshots"
        main = snapshots.parent / "refs" / "main"
        if main.is_file() and (snapshots / main.read_text(encoding="utf-8").strip()).is_dir():
            return snapshots / main.read_text(encoding="utf-8").strip()
        return next((entry for entry in sorted(snapshots.iterdir()) if entry.is_dir()), None)
    except (OSError, ValueError):
        return None


def read(folder: Path | None, weights_gb: str = "", name: str = "", rates: Guess | None = None) -> Model:
    """What the files of a model say. Without files, or without all of them, the preset's `weights_gb` (10^9 bytes),
    and without that a guess from the model's `name` with `rates`.

    Raises InputError for files that are broken, and where nothing says how large the weights are.
    """
    config = _json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}
    weights, source = 0, ""
    if folder:
        with _understood(folder / INDEX):
            weights, source = _weights(folder)
    if not weights:
        try:
            weights, source = int(float(weights_gb) * 1e9), "the preset"
        except (ValueError, OverflowError):
            weights = 0
    if weights <= 0 and rates:
        weights, source = guess(name, rates), "a guess from its name"
    if weights <= 0:
        raise InputError(
            "nothing says how large the model is: its files are not here, and the preset has no weights-gb",
            hint=f"fetch the model first, or give its size: {hints.options('--set weights-gb=11')}",
        )
    with _understood((folder or Path()) / "config.json"):
        return _bounded(_model(config, weights, source))


@contextlib.contextmanager
def _understood(file: Path) -> Iterator[None]:
    """Raises InputError where a file's values are not of a model's kinds."""
    try:
        yield
    except (TypeError, ValueError, KeyError, ZeroDivisionError, AttributeError, OverflowError) as bad:
        told = f"{file.name} of {file.parent} can't be understood: {type(bad).__name__}, {bad}"
        raise InputError(told[:300], hint="is it a model's?") from None


def _bounded(model: Model) -> Model:
    numbers = [value for value in msgspec.structs.astuple(model) if isinstance(value, int)]
    if wrong := [number for number in (*numbers, *model.windows) if not 0 <= number <= MOST]:
        raise ValueError(f"a value is {'negative' if wrong[0] < 0 else 'far too large'}")
    return model


def guess(name: str, rates: Guess) -> int:
    """Bytes of weights by the number of parameters in a model's name, "…-9B-…"; 0 when it tells none."""
    told = re.search(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)(?:x(\d+))?[bB](?![A-Za-z0-9])", name.rpartition("/")[2])
    if not told:
        return 0
    count = float(told[1]) * float(told[2] or 1) * 1e9
    if re.search(r"w4a|4[-_]?bit|int4|awq|gptq|nf4|fp4|mxfp4", name, re.IGNORECASE):
        return int(min(count * rates.four + rates.four_rest, count * rates.plain))
    return int(count * (rates.eight if re.search(r"fp8|w8a|8[-_]?bit|int8", name, re.IGNORECASE) else rates.plain))


def header_bytes(file: Path) -> int:
    """Bytes of all tensors of one safetensors file, by its header. Raises InputError for another kind of file, and for
    one that ends before its tensors do.
    """
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: Any = json.loads(stream.read(size)) if 0 < size <= HEADER_LIMIT else None
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        whole = 8 + size + max((int(end) for _, end in spans), default=0)
        there = file.stat().st_size
        if there < whole <= MOST:
            told = f"{file} is cut off: it has {there} of {whole} bytes"
            raise InputError(told, hint="fetch it again: a download may have broken off")
        return sum(int(end) - int(begin) for begin, end in spans)
    except OSError as bad:
        raise InputError(f"{file} can't be read: {bad.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError):
        raise InputError(
            f"{file} is no safetensors file", hint="fetch it again: a download may have broken off"
        ) from None


def _weights(folder: Path) -> tuple[int, str]:
    """The size of the weights and where it is from; 0 where a file of several is missing and no index says the sum."""
    index = folder / INDEX
    if index.is_file():
        content = _json(index)
        names = sorted({str(name) for name in dict(content.get("weight_map", {})).values()})
        files = [folder / Path(name).name for name in names]
        if files and all(file.is_file() for file in files):
            return sum(map(header_bytes, files)), "its files' headers"
        total = dict(content.get("metadata", {})).get("total_size", 0)
        return (int(total), "its index") if isinstance(total, (int, float)) else (0, "")
    # Mistral's releases hold everything a second time in consolidated files, which vLLM skips.
    files = [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("consolidated")]
    return sum(map(header_bytes, files or sorted(folder.glob("*.safetensors")))), "its files' headers"


def _model(config: dict[str, Any], weights: int, source: str) -> Model:
    own = config.get("text_config") or config.get("llm_config") or config
    layers = int(own.get("num_hidden_layers") or 0)
    if not 0 <= layers <= MOST_LAYERS:
        raise ValueError(f"no model has so many layers: {str(layers)[:20]}")
    if not layers:
        return Model(weights=weights, source=source)
    heads = int(own.get("num_attention_heads") or 1)
    hidden = int(own.get("hidden_size") or 0)
    kv_heads = int(own.get("num_key_value_heads") or heads)
    head = int(own.get("head_dim") or hidden // heads)
    size = TYPES.get(str(own.get("dtype") or own.get("torch_dtype") or config.get("dtype") or ""), 2)
    rank = int(own.get("kv_lora_rank") or 0)
    full, windows, states = _layers(own, layers)
    return Model(
        weights=weights,
        source=source,
        context=int(own.get("max_position_embeddings") or 0),
        hidden=hidden,
        intermediate=int(own.get("intermediate_size") or own.get("moe_intermediate_size") or 4 * hidden),
        vocabulary=int(own.get("vocab_size") or 0),
        type_bytes=size,
        full_layers=full,
        windows=windows,
        state_layers=states,
        kv_heads=1 if rank else kv_heads,
        token_values=rank + int(own.get("qk_rope_head_dim") or 0) if rank else 2 * kv_heads * head,
        latent=rank > 0,
        state=_state(own, size) if states else 0,
        twice=_twice(own, layers, size),
    )


def _layers(own: dict[str, Any], layers: int) -> tuple[int, dict[int, int], int]:
    """How many layers keep the whole context, which keep a window of it, and how many keep a state."""
    window = own.get("sliding_window") if own.get("use_sliding_window", True) else None
    kinds = own.get("layer_types")
    if not kinds:
        every = int(own.get("full_attention_interval") or 0)
        pattern = int(own.get("sliding_window_pattern") or 0)
        if every:
            kinds = ["full_attention" if i % every == every - 1 else "linear_attention" for i in range(layers)]
        elif window and pattern:
            kinds = ["full_attention" if i % pattern == pattern - 1 else "sliding_attention" for i in range(layers)]
        else:
            kinds = ["sliding_attention" if window else "full_attention"] * layers
    chunk = own.get("attention_chunk_size")
    states = sum(1 for kind in kinds if re.match(r"linear|mamba|conv|recurrent|ssm", str(kind)))
    sliding = sum(1 for kind in kinds if window and str(kind).startswith("sliding"))
    chunked = sum(1 for kind in kinds if chunk and str(kind).startswith("chunked"))
    windows = {int(size): count for size, count in ((window, sliding), (chunk, chunked)) if size and count}
    # A layer that uses the KV of another keeps none (Gemma's E models).
    shared = int(own.get("num_kv_shared_layers") or 0)
    return max(len(kinds) - states - sliding - chunked - shared, 0), windows, states


def _state(own: dict[str, Any], size: int) -> int:
    """Bytes of one layer's state: a gated delta net's, else Mamba's. The shapes are vLLM's (mamba_utils.py)."""
    recurrent = TYPES.get(str(own.get("mamba_ssm_dtype") or own.get("mamba_ssm_cache_dtype") or STATE_TYPE), 4)
    if own.get("linear_num_value_heads"):
        keys, values = int(own["linear_num_key_heads"]), int(own["linear_num_value_heads"])
        key, value = int(own["linear_key_head_dim"]), int(own["linear_value_head_dim"])
        steps = int(own.get("linear_conv_kernel_dim") or 4) - 1
        return (2 * keys * key + values * value) * steps * size + values * value * key * recurrent
    inner = int(own.get("mamba_num_heads") or 0) * int(own.get("mamba_head_dim") or 0)
    inner = inner or int(own.get("mamba_expand") or 2) * int(own.get("hidden_size") or 0)
    width = int(own.get("ssm_state_size") or own.get("mamba_d_state") or own.get("state_size") or 128)
    groups = int(own.get("n_groups") or own.get("mamba_n_groups") or 1)
    steps = int(own.get("conv_kernel") or own.get("mamba_d_conv") or 4) - 1
    return (inner + 2 * groups * width) * steps * size + inner * width * recurrent


def _twice(own: dict[str, Any], layers: int, size: int) -> int:
    """Bytes of per-layer embeddings, which vLLM holds a second time. Seen with a model of 42 layers of 256 values."""
    width, words = own.get("hidden_size_per_layer_input"), own.get("vocab_size_per_layer_input")
    return int(words or own.get("vocab_size") or 0) * layers * int(width) * size if width else 0


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as bad:
        raise InputError(f"{file} can't be read: {bad.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{file} is not JSON", hint="fetch it again: a download may have broken off") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} holds no JSON object", hint="is it a model's?")
    return content
