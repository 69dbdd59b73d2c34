"""The command line: verbs, their options, and how a failure is told. The verbs themselves are in build.py."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from warmstart import log, signals
from warmstart.errors import InputError, WarmstartError

Verb = Callable[[argparse.Namespace], int]
Option = tuple[str, dict[str, Any]]
Verbs = Mapping[str, tuple[Verb, str, Sequence[Option]]]

ARCH: Option = ("arch", {"nargs": "?", "default": "", "help": "an arch; default: this machine's GPU, else cpu"})
FROZEN: Option = ("--frozen", {"action": "store_true", "help": "only from the committed, resolved lock"})


def parser(verbs: Verbs) -> argparse.ArgumentParser:
    """The parser for a table of verbs: name → (function, one line of help, options)."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object a line on stdout, all else on stderr")
    common.add_argument("--dry-run", action="store_true", help="show the commands, change nothing")
    common.add_argument("--debug", action="store_true", help="echo commands, show tracebacks")
    common.add_argument("-q", "--quiet", action="store_true", help="only warnings and results")
    top = argparse.ArgumentParser(
        prog="warmstart",
        description="Slim vLLM images for AMD GPUs that start warm.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=22),
    )
    below = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (function, text, options) in verbs.items():
        verb = below.add_parser(name, help=text, description=text, parents=[common])
        for flag, settings in options:
            verb.add_argument(flag, **settings)
        verb.set_defaults(function=function)
    return top


def main(verbs: Verbs, argv: Sequence[str]) -> int:
    """Run a verb and return its exit code: 0, or the code of the error, after telling it in one line and a hint."""
    args = parser(verbs).parse_args(argv)
    log.configure(json=args.json, quiet=args.quiet, debug=args.debug)
    if args.dry_run:
        from warmstart import run

        run.dry_run()
    signals.catch()
    try:
        done: int = args.function(args)
        sys.stdout.flush()
        return done
    except WarmstartError as failure:
        log.error(failure.message, failure.hint, failure.code)
        if args.debug:
            import traceback

            traceback.print_exc()
        return failure.code
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing to tell and nobody to tell it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def arch(given: str) -> str:
    """The arch asked for, or that of this machine, said aloud when it was chosen for the user."""
    if given:
        return given
    from warmstart import host

    found, why = host.default_arch()
    log.info(f"ARCH={found}: {why}")
    return found


def show(args: argparse.Namespace, value: Any, text: str) -> int:
    """A verb's result on stdout: `value` as JSON with --json, else `text`."""
    if args.json:
        import msgspec

        print(json.dumps(msgspec.to_builtins(value), ensure_ascii=False), flush=True)
    elif text:
        print(text, flush=True)
    return 0


def write(path: str, text: str) -> int:
    """Write a verb's result to a file the user named, whole or not at all. Raises InputError."""
    file = Path(path)
    beside = file.with_name(f".{file.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as problem:
        raise InputError(f"{path} can't be written: {problem.strerror}") from None
    log.info(f"wrote {path}")
    return 0
