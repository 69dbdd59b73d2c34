"""What an engine will need on one device, from the model, the flags of `vllm serve` and the guard's figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from warmstart import hints
from warmstart.errors import PresetError
from warmstart.gpus import GIB, Gpu
from warmstart.limits import Limits
from warmstart.need import Model

SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}  # as vLLM reads them
# A value to try instead of one that is no number. vLLM takes a suffix where it expects large ones only.
LARGE = {
    "max-model-len": "8192",
    "max-num-batched-tokens": "2048",
    "kv-cache-memory-bytes": "4G",
    "kv-cache-memory": "4G",
}
SMALL = {"max-num-seqs": "16"}
# On the cpu platform this counts before the flag (platforms/cpu.py), in whole GiB, and the cpu image has it.
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that decide what an engine needs, with vLLM's own where a flag is not given."""

    context: int
    any_context: bool  # vLLM may choose a shorter one (max-model-len auto)
    sequences: int
    many: bool  # that number was asked for, it is not vLLM's default
    batch: int
    kv_bytes: int | None
    kv_value: float  # bytes of one KV value; 0: the model's type
    utilization: float | None
    default_utilization: float
    tensor: int  # GPUs that share each layer
    pipeline: int  # groups that share the layers
    data: int  # times that the model is there whole
    eager: bool  # it captures no graphs
    cpu: bool  # the cpu image
    block: int  # tokens of a KV block, before a state makes it larger
    captures: tuple[int, ...] | None  # sizes of graphs, if given

    @property
    def gpus(self) -> int:
        """How many GPUs it wants."""
        return self.tensor * self.pipeline * self.data


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device."""

    parts: dict[str, int]  # weights, activations, graphs … without KV
    kv_least: int  # vLLM refuses to start with less
    kv_wanted: int  # for all sequences at full length, or the few that shared memory allows
    kv_sequence: int  # one sequence at full length
    twice: bool  # an embedding table is held twice
    unknown: bool  # without the model's configuration KV can't be told

    @property
    def fixed(self) -> int:
        """All but KV."""
        return sum(self.parts.values())


def asked(
    flags: Mapping[str, object], env: Mapping[str, str], model: Model, devices: Sequence[Gpu], limits: Limits
) -> Asked:
    """The settings in the flags of `vllm serve` (names without dashes). Raises PresetError for what is no number."""
    given = {name.lstrip("-").replace("_", "-"): value for name, value in flags.items()}
    vram = devices[0].vram_total if devices else 0
    fitting = [row for row in limits.defaults.large if vram >= row.gib * GIB]
    default = max(fitting, key=lambda row: row.gib) if fitting else limits.defaults
    context = _number(given, "max-model-len", 0)
    kv = _number(given, "kv-cache-memory-bytes", 0) or _number(given, "kv-cache-memory", 0)
    space = env.get(KV_SPACE, "") if not devices else ""
    share = given.get("gpu-memory-utilization", given.get("device-memory-utilization"))
    return Asked(
        context=context if context > 0 else model.context,
        any_context=context < 0,
        sequences=_number(given, "max-num-seqs", default.max_num_seqs),
        many="max-num-seqs" in given,
        batch=_number(given, "max-num-batched-tokens", default.max_num_batched_tokens),
        kv_bytes=int(space) * GIB if re.fullmatch(r"[0-9]{1,9}", space) else _whole(kv, whole=not devices) or None,
        kv_value=limits.kv_bytes.get(str(given.get("kv-cache-dtype", "auto")), 0.0),
        utilization=None if share is None else _fraction(str(share)),
        default_utilization=limits.defaults.utilization,
        tensor=max(_number(given, "tensor-parallel-size", 1), 1),
        pipeline=max(_number(given, "pipeline-parallel-size", 1), 1),
        data=max(_number(given, "data-parallel-size", 1), 1),
        eager=bool(given.get("enforce-eager")) or not devices,
        cpu=not devices,
        block=limits.defaults.block if devices else limits.defaults.cpu_block,
        captures=_captures(given),
    )


def need(model: Model, wish: Asked, limits: Limits, *, shared: bool) -> Need:
    """What each device needs. `shared`: its memory is also the processor's."""
    engine = limits.engine
    one = _sequence(model, wish)
    shortest = msgspec.structs.replace(wish, context=wish.block) if wish.any_context else wish
    least = _sequence(model, shortest, spare=1)  # a block stays empty, vLLM points to it for what is no longer kept
    if model.state_layers and not wish.eager:
        # For graphs vLLM wants a block for the state of each sequence (its check in config/compilation.py).
        least = max(least, wish.sequences * _group(model) * _block(model, wish)[1] // wish.pipeline)
    least = max(_whole(least, whole=wish.cpu), GIB if wish.cpu else 0)
    count = wish.sequences if wish.many or not shared else min(wish.sequences, limits.reserve.shared_sequences)
    rows = model.hidden * engine.hidden_copies + model.intermediate * engine.intermediate_copies / wish.tensor
    return Need(
        parts={
            "weights": model.weights // (wish.tensor * wish.pipeline),
            "the second copy of its embeddings": model.twice // wish.pipeline,
            "activations": int(wish.batch * rows * model.type_bytes)
            + min(wish.sequences, wish.batch) * model.vocabulary * engine.logit_bytes // wish.tensor,
            "graphs": 0 if wish.eager else graphs(wish, engine.largest_capture) * engine.graph,
            "runtime": 0 if wish.cpu else engine.runtime,
            "processes": engine.processes if shared else 0,
        },
        kv_least=least,
        kv_wanted=max(least, _whole(count * one, whole=wish.cpu)),
        kv_sequence=one,
        twice=model.twice > 0,
        unknown=not model.known,
    )


def graphs(wish: Asked, largest: int) -> int:
    """How many graphs vLLM captures: pieces up to twice as many tokens as sequences, whole ones up to those."""
    if wish.captures is not None:
        return len(wish.captures) + len([size for size in wish.captures if size <= wish.sequences])
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    pieces = [size for size in sizes if size <= min(2 * wish.sequences, largest)]
    return len(pieces) + len([size for size in pieces if size <= wish.sequences])


def _sequence(model: Model, wish: Asked, *, spare: int = 0) -> int:
    """Bytes of KV and states of one sequence at full length on one device, and of `spare` blocks.

    vLLM's own reckoning (v1/core/kv_cache_utils.py): one pool of blocks of one size for all kinds of layers. Each kind
    is split into groups of equally many layers, and a block belongs to one group.
    """
    if not model.known:
        return 0
    block, page = _block(model, wish)
    full = -(-wish.context // block)
    kinds = [(model.full_layers, full)]
    for window, layers in model.windows.items():
        kinds.append((layers, -(-min(window - 1 + wish.batch, wish.context) // block) + 1))
    # With prefix caching, the default, a state is kept for the running block and the one before it.
    kinds.append((model.state_layers, 2))
    group = _group(model)
    blocks = spare + sum(-(-layers // group) * count for layers, count in kinds if layers)
    return blocks * group * page // wish.pipeline


def _block(model: Model, wish: Asked) -> tuple[int, int]:
    """Tokens of a block, and the bytes that it takes of one layer: beside states a block is as large as a state."""
    shards = 1 if model.latent else min(wish.tensor, model.kv_heads or 1)
    token = model.token_values * (wish.kv_value or model.type_bytes) / shards
    state = model.state // wish.tensor if model.state_layers else 0
    if not token:
        return wish.block, state
    block = max(wish.block, -(-int(state) // int(wish.block * token)) * wish.block)
    return block, int(block * token)


def _group(model: Model) -> int:
    """Layers of a group: of the smallest kind, or of the largest where that has less than half as many more."""
    counts = [layers for layers in (model.full_layers, *model.windows.values(), model.state_layers) if layers]
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _whole(size: int, *, whole: bool) -> int:
    """Bytes, up to the next GiB if `whole`."""
    return -(-size // GIB) * GIB if whole else size


def _captures(given: Mapping[str, object]) -> tuple[int, ...] | None:
    sizes: Any = given.get("cudagraph-capture-sizes")
    if sizes is None:
        try:
            config = json.loads(str(given.get("compilation-config", "{}")))
            sizes = config.get("cudagraph_capture_sizes") if isinstance(config, dict) else None
        except (ValueError, RecursionError):
            return None  # not JSON: vLLM says what is wrong with it
    words = [sizes] if isinstance(sizes, str) else sizes
    if not isinstance(words, (list, tuple)):
        return None
    return tuple(int(size) for size in words if re.fullmatch(r"[0-9]{1,9}", str(size)))


def _number(given: Mapping[str, object], name: str, default: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if str(value) in {"auto", "-1"}:
        return -1
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([kmgKMG]?)", str(value).replace("_", "").replace(",", ""))
    if not found:
        suffix = ", or with k, M, G" if name in LARGE else ""
        hint = hints.options(f"--set {name}={LARGE.get(name) or SMALL.get(name, 1)}") + suffix
        raise PresetError(f"{name} {str(value)[:40]!r} is no number", hint=hint)
    return int(float(found[1]) * SUFFIXES[found[2]])


def _fraction(value: str) -> float:
    try:
        if 0 < (share := float(value)) <= 1:
            return share
    except ValueError:
        pass
    hint = hints.options("--set gpu-memory-utilization=0.8")
    raise PresetError(f"gpu-memory-utilization {value[:40]!r} is no share", hint=hint)
