"""Every failure a user can meet: one line, a hint, an exit code of its own.

`docs/exit-codes.md` is generated from this file (`python -m warmstart.errors`) and a test compares the two.
Code 1 is kept for bugs, 2 for argparse, 130 and 143 for Ctrl-C and SIGTERM.
"""

from __future__ import annotations


class WarmstartError(Exception):
    """Base of all expected failures. `message` is one line; `hint` says what to do about it."""

    code = 1
    meaning = "unexpected failure: a bug in warmstart"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(WarmstartError):
    code = 2
    meaning = "the command line is wrong"


class UnknownArch(WarmstartError):
    code = 10
    meaning = "no profile for this arch"


class ProfileError(WarmstartError):
    code = 11
    meaning = "a profile or another data file has an unknown key or a bad value"


class RuleError(WarmstartError):
    code = 12
    meaning = "the profile combines things that are known to fail together"


class InputError(WarmstartError):
    code = 13
    meaning = "a file given on the command line can't be read or is not what it should be"


class PatchError(WarmstartError):
    code = 14
    meaning = "a patch does not apply, or its header is incomplete"


class LockMissing(WarmstartError):
    code = 20
    meaning = "the arch has no lock"


class LockMismatch(WarmstartError):
    code = 21
    meaning = "the lock was made for another profile"


class LockNotResolved(WarmstartError):
    code = 22
    meaning = "the lock holds pins without hashes where hashes are needed"


class LockMoved(WarmstartError):
    code = 23
    meaning = "the packages in the lock are no longer offered, and --frozen was asked for"


class EngineMissing(WarmstartError):
    code = 30
    meaning = "buildah or podman is not installed"


class EngineTooOld(WarmstartError):
    code = 31
    meaning = "the installed buildah or podman lacks a feature that is needed"


class EngineBroken(WarmstartError):
    code = 32
    meaning = "the engine is installed but can't start a container"


class Unreachable(WarmstartError):
    code = 40
    meaning = "a registry or a package index does not answer"


class DiskFull(WarmstartError):
    code = 41
    meaning = "too little free disk space"


class BaseMismatch(WarmstartError):
    code = 42
    meaning = "the base image is not the one that the lock names"


class WheelMismatch(WarmstartError):
    code = 43
    meaning = "a wheel's sha256 is not the one in the lock"


class HostUnsupported(WarmstartError):
    code = 44
    meaning = "this operating system can't build or run the images"


class SetupFailed(WarmstartError):
    code = 45
    meaning = "the set-up of the tools failed (tools/setup)"


class Busy(WarmstartError):
    code = 46
    meaning = "another build of this arch holds the lock and --no-wait was given, or somebody keeps a cache to himself"


class BuildFailed(WarmstartError):
    code = 50
    meaning = "a build step failed"


class VerifyFailed(WarmstartError):
    code = 51
    meaning = "the image tests failed"


class OverBudget(WarmstartError):
    code = 52
    meaning = "the image is larger than its profile allows"


class ImageMissing(WarmstartError):
    code = 53
    meaning = "no such image: build or pull it first"


class CommandFailed(WarmstartError):
    code = 54
    meaning = "a tool that warmstart called failed"


class SeedMismatch(WarmstartError):
    code = 60
    meaning = "the seed is for another image, arch or GPU, or is no seed"


class SeedDamaged(WarmstartError):
    code = 61
    meaning = "the seed is not what was made: a digest or its list of files differs"


class SeedUnsafe(WarmstartError):
    code = 62
    meaning = "the seed holds something that no seed may hold"


class NothingToSeed(WarmstartError):
    code = 63
    meaning = "there is no cache, or no seed, to work with"


class RegistryRefused(WarmstartError):
    code = 64
    meaning = "the registry answers, but has no such image or doesn't allow it"


class UnknownPreset(WarmstartError):
    code = 70
    meaning = "no preset of that name"


class PresetError(WarmstartError):
    code = 71
    meaning = "a preset, or --set, has an unknown key or flag or a bad value"


class PresetUnfit(WarmstartError):
    code = 72
    meaning = "the preset is for another arch, or is known not to work"


class HostWarnings(WarmstartError):
    code = 73
    meaning = "doctor: nothing worse than a warning"


class HostFaults(WarmstartError):
    code = 74
    meaning = "doctor: something on this machine is wrong"


class HostUnreadable(WarmstartError):
    code = 75
    meaning = "doctor: nothing wrong was found, but something could not be read"


class MemoryShort(WarmstartError):
    code = 76
    meaning = "the model does not fit in the memory that is free"


class MemoryPressure(WarmstartError):
    code = 77
    meaning = "the engine was stopped before it made the machine stall"


class DeviceHeld(WarmstartError):
    code = 80
    meaning = "another engine or program holds the device"


class PortTaken(WarmstartError):
    code = 81
    meaning = "another program listens on the port"


class ModelMissing(WarmstartError):
    code = 82
    meaning = "the model is not there, or may not be fetched"


class StartFailed(WarmstartError):
    code = 83
    meaning = "the engine ended before it was ready"


class EngineStopped(WarmstartError):
    code = 84
    meaning = "the engine was stopped or removed while it started"


class NoEngine(WarmstartError):
    code = 85
    meaning = "no such engine runs"


class MemoryKept(WarmstartError):
    code = 86
    meaning = "the engine is gone, but the device's memory did not come back"


class ClockDoubtful(WarmstartError):
    code = 78
    meaning = "the device's clock can't be trusted: verdicts measured by it are doubtful"


class NoDevice(WarmstartError):
    code = 79
    meaning = "there is no GPU that the image can use"


class Interrupted(WarmstartError):
    code = 130
    meaning = "stopped by Ctrl-C"


class Terminated(WarmstartError):
    code = 143
    meaning = "stopped by SIGTERM"


def table() -> list[tuple[int, str, str]]:
    """All exit codes as (code, error name, meaning), sorted by code."""
    found = [(c.code, c.__name__, c.meaning) for c in _subclasses(WarmstartError)]
    return sorted([(0, "", "done"), (1, "", WarmstartError.meaning), *found])


def markdown() -> str:
    """The text of docs/exit-codes.md."""
    rows = "\n".join(f"| {code} | {name and f'`{name}`'} | {meaning} |" for code, name, meaning in table())
    return (
        "# Exit codes\n\nGenerated from `warmstart/errors.py` by `python -m warmstart.errors`.\n\n"
        f"| code | error | meaning |\n|---|---|---|\n{rows}\n\n"
        "`make` itself always ends with 2; these are the codes of `.venv/bin/python build.py`. An image's entry point "
        "ends\nwith 64 for a machine without a GPU of the image's arch, 65 where there is no place for caches, "
        "127 for a command\nthat is not there, 130 by Ctrl-C before the command began, "
        "else with the code of the command.\n"
    )


def _subclasses(cls: type[WarmstartError]) -> list[type[WarmstartError]]:
    found: list[type[WarmstartError]] = []
    for sub in cls.__subclasses__():
        found += [sub, *_subclasses(sub)]
    return found


if __name__ == "__main__":
    print(markdown(), end="")
