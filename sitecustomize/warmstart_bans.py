"""Configurations that are known to fault on an arch are not tried: caches/bans.toml, installed with the image.

The file is read when an autotuner first chooses among several. Standard library only.
"""

import importlib
from typing import Any

BANS = "/opt/warmstart/caches/bans.toml"

known: "dict[str, list[dict[str, Any]]]" = {}  # arch → its bans
warned: "set[str]" = set()


def install(module: Any) -> None:
    """Take banned configurations from what triton.runtime.autotuner's Autotuner chooses from."""
    prune = module.Autotuner.prune_configs
    if hasattr(prune, "warmstart_bans"):
        return

    def prune_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        configs = prune(self, *args, **kwargs)
        try:
            return allowed(self.base_fn.__name__, configs, module.driver)
        except Exception as problem:
            warn_once(f"banned configurations are tried: {type(problem).__name__}: {problem}")
            return configs

    prune_configs.warmstart_bans = True  # type: ignore[attr-defined]
    module.Autotuner.prune_configs = prune_configs


def allowed(kernel: str, configs: Any, driver: Any) -> Any:
    """The configurations without banned ones; all of them where none would be left."""
    if not isinstance(configs, (list, tuple)) or len(configs) < 2 or not (bans := bans_of(driver)):
        return configs
    left = [config for config in configs if not any(banned(ban, kernel, config.all_kwargs()) for ban in bans)]
    if not left:
        warn_once(f"all configurations of {kernel} are banned on this GPU: tried all the same")
        return configs
    return left if len(left) < len(configs) else configs


def banned(ban: "dict[str, Any]", kernel: str, values: "dict[str, Any]") -> bool:
    """Whether a ban is about this configuration of this kernel."""
    fnmatch = importlib.import_module("fnmatch")
    same = all(values.get(name) == value for name, value in ban["config"].items())
    return same and bool(fnmatch.fnmatchcase(kernel, ban["kernel"]))


def bans_of(driver: Any) -> "list[dict[str, Any]]":
    """The bans of the arch in use."""
    if not known:
        known[""] = read(BANS)
    if not known[""]:
        return []
    arch = str(driver.active.get_current_target().arch).split(":")[0]
    if arch not in known:
        fnmatch = importlib.import_module("fnmatch")
        known[arch] = [ban for ban in known[""] if fnmatch.fnmatchcase(arch, ban["arch"])]
    return known[arch]


def read(file: str) -> "list[dict[str, Any]]":
    """The bans of a file; none when there is none. Raises what tomllib does, once."""
    known[""] = []
    try:
        with open(file, "rb") as data:
            return list(importlib.import_module("tomllib").load(data).get("ban", []))
    except FileNotFoundError:
        return []


def warn_once(text: str) -> None:
    """One line on stderr, the first time."""
    if text not in warned:
        warned.add(text)
        importlib.import_module("warmstart_hooks").warn(text)
