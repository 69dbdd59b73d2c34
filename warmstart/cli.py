"""The command line: verbs, their options, and how a failure is told. The verbs themselves are in build.py."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from warmstart import log, signals
from warmstart.errors import DiskFull, InputError, Interrupted, Terminated, UsageError, WarmstartError

Verb = Callable[[argparse.Namespace], int]
Option = tuple[str, dict[str, Any]]
Verbs = Mapping[str, tuple[Verb, str, Sequence[Option]]]


def name(verb: Verb) -> str:
    """What a verb's function is called on the command line: patches_check is patches-check, exec_ is exec."""
    return verb.__name__.rstrip("_").replace("_", "-")


class Parser(argparse.ArgumentParser):
    """argparse, but what it refuses is one line and a hint like everything else."""

    def error(self, message: str) -> NoReturn:
        import difflib

        found = re.fullmatch(r"(?:argument \S+: )?invalid choice: '(.*)' \(choose from (.*)\)", message)
        if not found:
            raise UsageError(message, hint=f"{self.prog} --help")
        known = re.findall(r"[\w-]+", found[2])
        near = difflib.get_close_matches(found[1], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"{self.prog} knows no {found[1]!r}", hint=hint)


def parser(verbs: Verbs) -> argparse.ArgumentParser:
    """The parser for a table of verbs: name → (function, one line of help, options)."""
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object a line on stdout, all else on stderr")
    common.add_argument("--dry-run", action="store_true", help="show the commands, change nothing")
    common.add_argument("--debug", action="store_true", help="echo commands, show tracebacks")
    common.add_argument("-q", "--quiet", action="store_true", help="only warnings and results")
    top = Parser(
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


def main(verbs: Verbs, argv: Sequence[str], last: Callable[[], None] = lambda: None) -> int:
    """Run a verb and return its exit code: 0, or the code of the error, after telling it in one line and a hint.

    `last` is called when all is done: a signal that comes before it has returned still ends as an exit code.
    """
    try:
        status = _main(verbs, argv)
        last()
        return status
    except (Interrupted, Terminated) as again:  # while a failure, or the first Ctrl-C, was being told
        return again.code


def _main(verbs: Verbs, argv: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of another encoding must not end a build
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
    try:
        args = parser(verbs).parse_args(argv)
    except UsageError as failure:
        return _tell(failure, False)
    log.configure(json=args.json, quiet=args.quiet, debug=args.debug)
    if args.dry_run:
        from warmstart import run

        run.dry_run()
    try:
        signals.catch()
        done: int = args.function(args)
        sys.stdout.flush()
        return done
    except WarmstartError as failure:
        return _tell(failure, args.debug)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing to tell and nobody to tell it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as problem:
        if known := _disk(problem):
            return _tell(known, args.debug)
        raise


def arch(given: str, known: Sequence[str] = ()) -> str:
    """The arch asked for, or that of this machine, said aloud when it was chosen for the user."""
    if given:
        return given
    from warmstart import host

    found, why = host.default_arch(known=known)
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
    from warmstart import run

    file = Path(path)
    if run.recorder.on:
        log.info(f"would write {path}")
        return 0
    try:
        if file.exists() and not file.is_file():  # a device or a pipe is written to, never replaced
            with file.open("w", encoding="utf-8") as stream:
                stream.write(text)
            return 0
        file = file.resolve()
        beside = file.with_name(f".{file.name}.new")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as problem:
        raise InputError(f"{path} can't be written: {getattr(problem, 'strerror', None) or problem}") from None
    log.info(f"wrote {path}")
    return 0


def _tell(failure: WarmstartError, debug: bool) -> int:
    log.error(failure.message, failure.hint, failure.code)
    if debug:
        import traceback

        traceback.print_exc()
    return failure.code


def _disk(problem: OSError) -> WarmstartError | None:
    """What the disk has to do with a failure; None when it is a bug."""
    where = problem.filename or "the disk"
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{where}: {problem.strerror}", hint="free some space; `make prune` frees what warmstart kept")
    if problem.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR):
        return InputError(f"{where}: {problem.strerror}", hint="warmstart writes below .warmstart/ in its own folder")
    return None
