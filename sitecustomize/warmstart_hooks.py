"""What Python loads first in every process of the image. Standard library only; a failure here costs nothing.

Installed as site-packages/warmstart_hooks.py with `warmstart.pth`, because Debian's and Ubuntu's Python has a
sitecustomize.py of its own that hides any other; `warmstart.start` is what Python 3.15 and later read instead. Every
start of Python pays for this file, so it holds what it takes to wait (`python bench/hooks.py`); warmstart_calls holds
the rest.

Hook `lost`: the image leaves out distributions that serving does not need. Importing one of them says, in one
line, which feature it belongs to; code that tries an import and goes on without it is not disturbed.

The other hooks wait, each in a file of its own that is not read before the module it changes has been imported.
WARMSTART_HOOKS=0 switches all of them off, WARMSTART_HOOK_<NAME>=0 one: the names in WAITING, LOST, WORKERS (compile,
but in threads instead of processes). Some also need the variable that says what to do (NEEDS).
"""

import os
import sys

LOST = "/opt/warmstart/lost.json"

PACKAGES = ("triton", "torch", "vllm", "warmstart_workers")  # those that hooks wait for: warmstart_calls.WAITING
# What each start of Python asks for, in vain where the distribution has none of them.
OPTIONAL = ("sitecustomize", "usercustomize", "apport_python_hook")


def find_lost(name, path=None, target=None):  # type: ignore[no-untyped-def] # annotations cost each start too
    """Last on sys.meta_path: asked only for modules that nobody else has. Those below a package are not ours."""
    if path is None and name not in OPTIONAL and (calls := rest()):  # type: ignore[no-untyped-call]
        calls.lost(name)


def find_awaited(name, path=None, target=None):  # type: ignore[no-untyped-def]
    """First on sys.meta_path: finds nothing itself, but has the hooks called after a module they wait for."""
    if name.partition(".")[0] not in PACKAGES:  # this line is what all other imports pay
        return None
    calls = rest()  # type: ignore[no-untyped-call]
    return calls and calls.awaited(name, path, target)


def rest():  # type: ignore[no-untyped-def]
    """warmstart_calls; None when it can't be imported, which is no reason for the import that it is for to fail."""
    try:
        import warmstart_calls  # type: ignore[import-not-found] # beside this file
    except Exception:
        return None
    return warmstart_calls


finder = type(sys.implementation)  # a class costs ten times as much as one of these
LostFinder = finder(find_spec=find_lost)  # type: ignore[call-arg]
AwaitedFinder = finder(find_spec=find_awaited)  # type: ignore[call-arg]
installed = False


def install():  # type: ignore[no-untyped-def]
    """Put the hooks in place, unless WARMSTART_HOOKS=0. Runs once however often it is called."""
    global installed
    # What os.environ holds underneath: a variable that is missing costs it an exception.
    variables = getattr(os.environ, "_data", None) or os.environb
    if installed or variables.get(b"WARMSTART_HOOKS") == b"0":
        return
    installed = True
    if variables.get(b"WARMSTART_HOOK_LOST") != b"0":
        sys.meta_path.append(LostFinder)
    for package in PACKAGES:
        if package in sys.modules:
            rest().imported_before(package)  # type: ignore[no-untyped-call]
    sys.meta_path.insert(0, AwaitedFinder)


def __getattr__(name):  # type: ignore[no-untyped-def]
    """What warmstart_calls holds is found here too."""
    return getattr(rest(), name)  # type: ignore[no-untyped-call]


try:
    install()  # type: ignore[no-untyped-call]
except Exception as problem:  # fail open: a start without hooks is slower, not broken
    sys.stderr.write(f"warmstart: hooks are off: {problem}\n")
