"""What the memory guard assumes, as `arch/guard.toml` holds it. The file says where each figure is from."""

from __future__ import annotations

from pathlib import Path

from warmstart import toml
from warmstart.toml import Table


class Large(Table, frozen=True):
    """vLLM's defaults on GPUs with at least so much memory."""

    gib: float
    max_num_seqs: int
    max_num_batched_tokens: int


class Defaults(Table, frozen=True):
    """What vLLM takes when a flag is not given."""

    utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    block: int  # tokens of a KV block
    cpu_block: int
    large: tuple[Large, ...]


class Engine(Table, frozen=True):
    """What an engine needs beside weights and KV, in bytes but where it says otherwise."""

    runtime: int
    hidden_copies: float  # multiples of the hidden size
    intermediate_copies: float
    logit_bytes: int
    graph: int
    largest_capture: int  # tokens
    processes: int


class Guess(Table, frozen=True):
    """Bytes of weights for each parameter, by the bits of one."""

    plain: float
    eight: float
    four: float
    four_rest: float  # bytes in all, on top


class Reserve(Table, frozen=True):
    """Bytes that are left to others."""

    vram: int
    display: int
    shared: int
    cpu: int
    shared_sequences: int  # how many sequences get KV where the processor shares the memory


class Watch(Table, frozen=True):
    """When a running engine is warned about or stopped: seconds, else bytes."""

    warn_seconds: float
    stop_seconds: float
    calm_seconds: float
    warn_available: int
    stop_available: int
    least_available: int
    warn_swap: int
    stop_swap: int
    warn_gtt: int
    stop_gtt: int


class Limits(Table, frozen=True):
    """The whole file."""

    schema: int
    defaults: Defaults
    kv_bytes: dict[str, float]  # by --kv-cache-dtype
    engine: Engine
    guess: Guess
    reserve: Reserve
    watch: Watch


def load(root: Path) -> Limits:
    """The guard's figures of the tree at `root`. Raises ProfileError for a broken file."""
    return toml.read(root / "arch" / "guard.toml", Limits)
