"""Triton's cache in two tiers: a baked seed, which nobody writes, below the volume, which everybody may.

Triton takes it by TRITON_CACHE_MANAGER=warmstart_cache:SeededCacheManager (3.4 to 3.9). A kernel that only the seed has
is copied to TRITON_CACHE_DIR when it is asked for, because Inductor's launcher reads that directory by itself. Triton's
index of an entry holds absolute paths; here its files are looked for beside it, so that a moved cache hits.

Verdicts depend on the number of compute units, which Triton's key does not hold. They lie under
WARMSTART_VERDICTS/cu<N>/, N from WARMSTART_CU, which the entry point sets; where nobody counted, N is 0, and only what
was also tuned without a count is found.

What is broken counts as missing: it is compiled or tuned once more and replaced. Where the volume can't be written, the
process goes on in a directory of its own below the temporary one, and the volume is read like a seed.
"""

import atexit
import errno
import importlib
import json
import os
import shutil
import tempfile
import threading
from typing import Any

import warmstart_files as files  # type: ignore[import-not-found] # beside this file
from triton.runtime.cache import FileCacheManager  # type: ignore[import-not-found]
from warmstart_whole import INDEX, is_verdict, is_whole, whole_group  # type: ignore[import-not-found]

VERDICT = ".autotune.json"
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)

given_up: "list[str]" = []  # cache directories that could not be written, read as seeds from then on
asides: "set[str]" = set()  # what is used in their place
warned: "set[str]" = set()
lock = threading.Lock()


def renew() -> None:
    """In a forked process: a lock that nobody holds."""
    global lock
    lock = threading.Lock()


os.register_at_fork(after_in_child=renew)


class SeededCacheManager(FileCacheManager):  # type: ignore[misc]
    """What Triton's own manager does, below it a seed and beside it the verdicts of this number of compute units.

    Without WARMSTART_SEED and WARMSTART_VERDICTS, and for Triton's dumps and overrides, it is Triton's own.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self.seed, self.verdicts = os.environ.get("WARMSTART_SEED"), os.environ.get("WARMSTART_VERDICTS")
        self.stock = override or dump or not (self.seed or self.verdicts)
        if self.stock:
            super().__init__(key, override, dump)
            return
        self.key, self.lock_path = key, None
        self.cache_dir = os.path.join(cache_root(), key)  # made by the first that writes to it

    def get_group(self, filename: str) -> Any:
        """Name → path of the files of a kernel that is whole; None for one to compile."""
        if self.stock:
            return super().get_group(filename)
        try:
            return whole_group(self.cache_dir, filename) or self.adopted_group(filename)
        except Exception as problem:
            warn_once("read", f"a cached kernel can't be used: {type(problem).__name__}: {problem}")
            return None

    def get_file(self, filename: str) -> Any:
        """The path of a file that is whole; None for one to make."""
        if self.stock:
            return super().get_file(filename)
        try:
            if filename.endswith(VERDICT):
                return next((path for path in self.verdict_paths(filename) if is_verdict(path)), None)
            path = os.path.join(self.cache_dir, filename)
            return path if is_whole(path) else self.adopted_file(filename)
        except Exception as problem:
            warn_once("read", f"a cached file can't be used: {type(problem).__name__}: {problem}")
            return None

    def put(self, data: Any, filename: str, binary: bool = True) -> Any:
        """The path under which a file now is, all of it or as it was before; raises OSError where nothing can be."""
        if self.stock:
            return super().put(data, filename, binary)
        data = data if isinstance(data, bytes) else str(data).encode("utf-8")
        if filename.endswith(VERDICT) and self.verdicts:
            path = next(self.verdict_paths(filename))
            try:
                return write(path, data)
            except OSError as problem:
                warn_once("verdict", f"a verdict can't be kept ({problem.strerror}): the next start tunes again")
                return path  # which Triton's autotuner does not look at
        try:
            return write(os.path.join(self.cache_dir, filename), data)
        except OSError as problem:
            if not self.go_aside(problem):
                raise
            return write(os.path.join(self.cache_dir, filename), data)

    def put_group(self, filename: str, group: Any) -> Any:
        """Note which files are one kernel; they lie beside this index, also when the disk filled up half-way."""
        if self.stock:
            return super().put_group(filename, group)
        index = json.dumps({"child_paths": group})
        path = self.put(index, f"{INDEX}{filename}", binary=False)
        for name, child in group.items():
            if os.path.dirname(child) != self.cache_dir and not os.path.exists(os.path.join(self.cache_dir, name)):
                with open(child, "rb") as file:
                    write(os.path.join(self.cache_dir, name), file.read())
        return path

    # ---- the seed ----
    def below(self) -> list[str]:
        """Directories of this entry that are only read."""
        seeds = [os.path.join(self.seed, "triton")] if self.seed else []
        return [os.path.join(root, self.key) for root in [*given_up, *seeds]]

    def adopted_group(self, filename: str) -> Any:
        """A kernel of the seed, copied to the cache; where that is impossible, as it lies in the seed."""
        for folder in self.below():
            if group := whole_group(folder, filename):
                copied = self.adopt(folder, [*group, f"{INDEX}{filename}"])
                return (
                    {name: os.path.join(self.cache_dir, os.path.basename(name)) for name in group} if copied else group
                )
        return None

    def adopted_file(self, filename: str) -> "str | None":
        """A single file of the seed, likewise."""
        for folder in self.below():
            if is_whole(path := os.path.join(folder, filename)):
                return os.path.join(self.cache_dir, filename) if self.adopt(folder, [filename]) else path
        return None

    def adopt(self, folder: str, names: "list[str]") -> bool:
        """Copy files of one entry into the cache, in this order; False where nothing can be written."""
        for last_try in (False, True):
            try:
                for name in names:
                    with open(os.path.join(folder, os.path.basename(name)), "rb") as file:
                        write(os.path.join(self.cache_dir, os.path.basename(name)), file.read())
                return True
            except OSError as problem:
                if last_try or not self.go_aside(problem):
                    return False
        return False

    def verdict_paths(self, filename: str) -> Any:
        """Where a verdict of this machine may lie: the volume, then the seed."""
        part = os.path.join(f"cu{compute_units()}", self.key, filename)
        if self.verdicts:
            yield os.path.join(self.verdicts, part)
        else:
            yield os.path.join(self.cache_dir, filename)
        if self.seed:
            yield os.path.join(self.seed, "verdicts", part)

    def go_aside(self, problem: OSError) -> bool:
        """Go on in a directory of this process; False when the problem is another one, or there is none."""
        root = os.path.dirname(self.cache_dir)
        if problem.errno not in UNWRITABLE or root in asides:
            return False
        with lock:
            if cache_root() == root:
                try:
                    aside = tempfile.mkdtemp(prefix="warmstart-triton-")
                except OSError:
                    return False
                given_up.insert(0, root)
                asides.add(aside)
                # In the environment, so that Inductor, compilers in other processes and children find it too.
                os.environ["TRITON_CACHE_DIR"] = aside
                remove_at_exit(aside)
                warn_once(
                    "aside", f"{root} can't be written ({problem.strerror}): this process keeps its kernels in {aside}"
                )
        self.cache_dir = os.path.join(cache_root(), self.key)
        return os.path.dirname(self.cache_dir) != root


def cache_root() -> str:
    """Triton's cache directory; raises RuntimeError as Triton does."""
    root = importlib.import_module("triton.knobs").cache.dir
    if not root:
        raise RuntimeError("Could not create or locate cache dir")
    return str(root)


def compute_units() -> int:
    """Compute units of the GPU in use, as the entry point counted them; 0 where nobody did."""
    told = os.environ.get("WARMSTART_CU", "")
    return int(told) if told.isascii() and told.isdecimal() else 0


def write(path: str, data: bytes) -> str:
    """Put a file in its place, whole at any moment; raises OSError."""
    try:
        return write_once(path, data)
    except FileNotFoundError:  # the entry was pruned meanwhile
        return write_once(path, data)


def write_once(path: str, data: bytes) -> str:
    """As write."""
    files.make(os.path.dirname(path))
    files.put(path, data)
    return path


def remove_at_exit(folder: str) -> None:
    """Remove a directory when the process that made it ends."""
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def warn_once(kind: str, text: str) -> None:
    """One line on stderr, the first time for this kind of problem."""
    if kind not in warned:
        warned.add(kind)
        importlib.import_module("warmstart_hooks").warn(text)
