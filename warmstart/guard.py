"""The memory guard: does a model fit in what is really free, and with which KV size? docs/memory.md explains it.

It decides on plain values and reads nothing. What it assumes is in `arch/guard.toml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from warmstart import hints
from warmstart.errors import MemoryShort
from warmstart.gpus import GIB, Gpu, Memory, gib
from warmstart.limits import Limits
from warmstart.need import Model
from warmstart.sizes import KV_SPACE, Asked, Need, asked, need

CONTEXT_STEP = 256  # tokens: the step in which the largest context that fits is looked for


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What one device offers."""

    total: int  # bytes that vLLM takes its share of
    free: int  # bytes that may be used, the reserve taken off
    basis: str  # which figure decided, for people
    shared: bool = False  # it is the memory of the whole machine
    cpu: bool = False


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What the guard says. The sizes are of one device."""

    fits: bool
    budget_bytes: int
    need_bytes: int  # with the KV that it is started with; without room for any: with the least
    kv_bytes: int
    parts: dict[str, int]  # what the need is made of
    flags: dict[str, str] = {}  # flags of `vllm serve` to be set over the preset's
    env: dict[str, str] = {}  # variables, likewise
    notes: tuple[str, ...] = ()  # what was changed, and what --force dares
    reason: str
    hint: str = ""


def judge(
    devices: Sequence[Gpu],
    memory: Memory,
    model: Model,
    flags: Mapping[str, object],
    limits: Limits,
    env: Mapping[str, str] | None = None,
    promised: Mapping[str, int] | None = None,
    *,
    force: bool = False,
) -> Judgement:
    """Whether an engine fits on `devices` (the GPUs it may use, in order; none: the cpu image).

    `flags` are those of `vllm serve`, `promised` bytes that other engines hold a lease on but have not taken yet, by
    PCI address or "cpu". With `force` everything fits, and the notes say what may happen.
    """
    wish = asked(flags, env or {}, model, devices, limits)
    if devices and len(devices) < wish.gpus:
        reason = f"the preset wants {wish.gpus} GPUs, and there are {len(devices)} for it"
        none = Judgement(fits=False, budget_bytes=0, need_bytes=0, kv_bytes=0, parts={}, reason=reason)
        return msgspec.structs.replace(none, hint=hints.options(f"--set tensor-parallel-size={len(devices)}"))
    used = devices[: wish.gpus]
    offers = [budget(gpu, memory, limits, promised) for gpu in used] or [budget(None, memory, limits, promised)]
    offer = min(offers, key=lambda one: one.free)
    if not offer.total or (offer.shared and not memory.total):
        return _untold(force=force)
    wanted = need(model, wish, limits, shared=offer.shared)
    judgement = _fit(offer, wanted, wish, model) or _refusal(offer, wanted, wish, model, limits)
    if 0 < model.context < wish.context:
        longer = f"max-model-len {wish.context}: the model was made for {model.context} tokens, and vLLM refuses more"
        stretched = "unless its configuration stretches them (rope scaling)"
        judgement = msgspec.structs.replace(judgement, notes=(*judgement.notes, f"{longer} {stretched}"))
    return _forced(judgement, offer, wanted) if force and not judgement.fits else judgement


def budget(gpu: Gpu | None, memory: Memory, limits: Limits, promised: Mapping[str, int] | None = None) -> Budget:
    """What a GPU offers; None: the machine's memory, for the cpu image."""
    taken = (promised or {}).get(gpu.pci if gpu else "cpu", 0)
    reserve = limits.reserve
    if gpu is None:
        free = memory.available - reserve.cpu - taken
        basis = f"{gib(memory.available)} of memory available, {gib(reserve.cpu)} of it kept for the system"
        return Budget(total=memory.total, free=max(free, 0), basis=basis, shared=True, cpu=True)
    if gpu.uses_gtt:
        # The kernel counts little of what is allocated as GTT, and nothing else of the machine: the smaller one holds.
        unused, available = gpu.gtt_total - gpu.gtt_used, memory.available - reserve.shared
        free = min(unused, available) - taken
        basis = (
            f"{gib(unused)} of GTT unused" if unused <= available else f"{gib(memory.available)} of memory available"
        )
        basis += "" if unused <= available else f", {gib(reserve.shared)} of it kept for the system"
        return Budget(total=gpu.gtt_total, free=max(free, 0), basis=basis, shared=True)
    kept = reserve.display if gpu.display else reserve.vram
    unused = gpu.vram_total - gpu.vram_used
    basis = f"{gib(unused)} of {gib(gpu.vram_total)} VRAM unused, {gib(kept)} of it kept"
    basis += " for the desktop" if gpu.display else ""
    return Budget(total=gpu.vram_total, free=max(unused - kept - taken, 0), basis=basis)


def require(judgement: Judgement) -> None:
    """Raise MemoryShort unless it fits."""
    if not judgement.fits:
        raise MemoryShort(judgement.reason, hint=judgement.hint)


def _fit(offer: Budget, wanted: Need, wish: Asked, model: Model) -> Judgement | None:
    """The judgement with the KV size that fits, and what is turned for it; None when not even the least fits."""
    if offer.free - wanted.fixed < wanted.kv_least:
        return None
    flags: dict[str, str] = {}
    notes: list[str] = []
    own = wish.utilization
    room = offer.free - wanted.fixed
    if own is not None and not wish.kv_bytes:  # the preset wants to leave more to others, as far as that goes
        room = min(room, max(int(own * offer.total) - wanted.fixed, wanted.kv_least))
    kv = min(wish.kv_bytes or wanted.kv_wanted, room)
    kv -= kv % GIB if offer.cpu else 0
    if wish.kv_bytes and kv < wish.kv_bytes:
        notes.append(f"the KV size is lowered from {wish.kv_bytes} to {kv} bytes: more does not fit")
    # vLLM refuses to start when less is free than this share, even with KV of a given size.
    share = own if own is not None else wish.default_utilization
    largest = _share(offer)
    least = math.ceil((wanted.fixed + kv) / offer.total * 100) / 100
    if not offer.cpu and share > largest:
        flags["gpu-memory-utilization"] = f"{largest:.2f}"
        if own is not None:
            notes.append(f"gpu-memory-utilization lowered from {own} to {largest:.2f}: {offer.basis}")
    elif not offer.cpu and own is not None and own * offer.total < wanted.fixed + kv and least <= largest:
        flags["gpu-memory-utilization"] = f"{least:.2f}"
        notes.append(f"gpu-memory-utilization raised from {own} to {least:.2f}: the model and one sequence need it")
    if not wanted.unknown and not offer.cpu:
        flags["kv-cache-memory-bytes"] = str(kv)
    if wanted.unknown:
        size = "as small as can be" if offer.cpu else "left to vLLM"
        notes.append(f"the model is not here yet, its size is from {model.source}: the KV size is {size}")
    parts = wanted.parts | {"KV": kv}
    sequences = f", KV for {kv / wanted.kv_sequence:.1f} full sequences" if wanted.kv_sequence else ""
    return Judgement(
        fits=True,
        budget_bytes=offer.free,
        need_bytes=sum(parts.values()),
        kv_bytes=kv,
        parts=parts,
        flags=flags,
        env={KV_SPACE: str(kv // GIB)} if offer.cpu else {},
        notes=tuple(notes),
        reason=f"needs {gib(sum(parts.values()))} of {gib(offer.free)}{sequences} ({offer.basis})",
    )


def _untold(*, force: bool) -> Judgement:
    """The kernel does not tell how much memory there is: then nothing can be promised."""
    return Judgement(
        fits=force,
        budget_bytes=0,
        need_bytes=0,
        kv_bytes=0,
        parts={},
        reason="the kernel does not tell how much memory is free",
        hint=f"`{hints.command('doctor')}` says which file can't be read; {hints.options('--force')} starts anyway",
        notes=("--force: nothing keeps this from filling the machine's memory",) if force else (),
    )


def _refusal(offer: Budget, wanted: Need, wish: Asked, model: Model, limits: Limits) -> Judgement:
    parts = wanted.parts | {"KV": wanted.kv_least}
    total = sum(parts.values())
    told = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    twice = "; vLLM holds its embedding table twice" if wanted.twice else ""
    guessed = f"; its weights are from {model.source}" if wanted.unknown else ""
    reason = (
        f"does not fit: it needs {gib(total)} ({told}{twice}{guessed}), {gib(offer.free)} may be used ({offer.basis})"
    )
    return Judgement(
        fits=False,
        budget_bytes=offer.free,
        need_bytes=total,
        kv_bytes=0,
        parts=parts,
        reason=reason,
        hint=_advice(offer, wanted, wish, model, limits),
    )


def _advice(offer: Budget, wanted: Need, wish: Asked, model: Model, limits: Limits) -> str:
    """The largest settings that fit, what vLLM makes of them, else what is missing."""
    missing = gib(wanted.fixed + wanted.kv_least - offer.free)
    share = "" if offer.cpu else f"; the largest gpu-memory-utilization is {_share(offer):.2f}"
    smaller = [wish]
    if wish.sequences > 4:
        smaller.append(msgspec.structs.replace(wish, sequences=4))
    if wish.batch > 512:
        smaller.append(msgspec.structs.replace(smaller[-1], batch=512))
    for tried in smaller:
        if context := _context(offer, tried, model, limits):
            sets = {
                "max-model-len": (context, wish.context),
                "max-num-seqs": (tried.sequences, wish.sequences),
                "max-num-batched-tokens": (tried.batch, wish.batch),
            }
            words = " ".join(f"--set {name}={new}" for name, (new, old) in sets.items() if new != old)
            # Each is part of the key of its compiled code (config/scheduler.py and model.py, compute_hash).
            return f"{hints.options(words)} fits (vLLM compiles again for that, once), or free {missing}{share}"
    return f"free {missing}, or take a smaller checkpoint: no context, however short, fits beside the weights{share}"


def _context(offer: Budget, wish: Asked, model: Model, limits: Limits) -> int:
    """The largest context that fits with these settings, in steps of CONTEXT_STEP; 0 for none."""

    def fits(steps: int) -> bool:
        shorter = msgspec.structs.replace(wish, context=min(steps * CONTEXT_STEP, wish.context))
        tried = need(model, shorter, limits, shared=offer.shared)
        return tried.fixed + tried.kv_least <= offer.free

    # More than the model was made for is nothing to advise, however much fits.
    most = min(wish.context, model.context or wish.context)
    low, high = 0, -(-most // CONTEXT_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return min(low * CONTEXT_STEP, most)


def _forced(judgement: Judgement, offer: Budget, wanted: Need) -> Judgement:
    if offer.shared:
        risk = "--force: the machine may stall in swap until it is switched off, or the kernel kills programs"
    else:
        risk = "--force: vLLM may fail for want of memory, or spill into the machine's memory and freeze the desktop"
    least = wanted.kv_least
    return msgspec.structs.replace(
        judgement,
        fits=True,
        kv_bytes=least,
        flags={} if offer.cpu or wanted.unknown or not least else {"kv-cache-memory-bytes": str(least)},
        env={KV_SPACE: str(least // GIB)} if offer.cpu else {},
        notes=(judgement.reason, risk),
    )


def _share(offer: Budget) -> float:
    """The largest utilisation that fits, in hundredths."""
    return math.floor(offer.free / offer.total * 100) / 100
