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

import warmstart
from warmstart import hints, log, signals
from warmstart.errors import DiskFull, InputError, Interrupted, Terminated, UsageError, WarmstartError

Verb = Callable[[argparse.Namespace], int]
Option = tuple[str, dict[str, Any]]
Verbs = Mapping[str, tuple[Verb, str, Sequence[Option]]]


def name(verb: Verb) -> str:
    """What a verb's function is called on the command line: patches_check is patches-check, exec_ is exec."""
    return verb.__name__.rstrip("_").replace("_", "-")


COMMON: tuple[Option, ...] = (
    ("--json", {"action": "store_true", "help": "one JSON object a line on stdout, all else on stderr"}),
    ("--dry-run", {"action": "store_true", "help": "show the commands, change nothing"}),
    ("--debug", {"action": "store_true", "help": "echo commands, show tracebacks"}),
    ("--quiet", {"action": "store_true", "help": "only warnings and results"}),
)

# What a verb is given by its place is a variable of make.
VARIABLES = {"arch": "ARCH", "preset": "PRESET", "file": "FILE", "kind": "KIND", "do": "DO", "what": "REF"}
EXAMPLES = {"file": "vllm.log", "kind": "quadlet"}


class Parser(argparse.ArgumentParser):
    """argparse, but what it refuses is one line and a hint like everything else."""

    verb = ""
    options: Sequence[Option] = ()

    def error(self, message: str) -> NoReturn:
        raise _refused(self.verb, self.options, message)


def parser(verbs: Verbs) -> Parser:
    """The parser for a table of verbs: name → (function, one line of help, options)."""
    common = Parser(add_help=False)
    for flag, settings in COMMON:
        common.add_argument(*(["-q"] if flag == "--quiet" else []), flag, **settings)
    top = Parser(
        prog=hints.PROGRAM,
        description="Slim vLLM images for AMD GPUs that start warm.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=22),
    )
    top.add_argument("--version", action="version", version=f"warmstart {warmstart.__version__}")
    below = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (function, text, options) in verbs.items():
        verb = below.add_parser(name, help=text, description=text, parents=[common])
        verb.verb, verb.options = name, options
        for flag, settings in options:
            verb.add_argument(flag, **settings)
        verb.set_defaults(function=function)
    return top


def parse(verbs: Verbs, argv: Sequence[str]) -> argparse.Namespace:
    """The words of a command line by option. Raises UsageError."""
    args, rest = parser(verbs).parse_known_args(argv)
    if rest:
        raise _left_over(verbs, args.verb, rest)
    return args


def _refused(verb: str, options: Sequence[Option], message: str) -> UsageError:
    """What argparse refuses, in the words of whoever typed it."""
    found = re.fullmatch(r"(?:argument (\S+): )?(.*)", message, re.DOTALL)
    name, what = (found[1] or "", found[2]) if found else ("", message)
    option = name.rpartition("/")[2]
    settings = dict(options).get(option, {})
    if choice := re.match(r"invalid choice: '(.*)' \(choose from (.*?)\)", what):
        return _no_choice(verb, option, choice[1], re.findall(r"[\w-]+", choice[2]))
    if what.startswith(("expected ", "invalid ")):
        value = next(iter(settings.get("choices", ())), settings.get("metavar") or option.strip("-").upper())
        wrong = re.search(r"value: (.*)", what)
        told = f"{option} can't be {wrong[1]}" if wrong else f"{option} needs a value"
        return UsageError(told, hint=f"{hints.options(f'{option} {value}')}; `{hints.usage(verb)}` says more")
    if what.startswith("ignored explicit argument"):
        return UsageError(f"{option} takes no value", hint=hints.options(option))
    if missing := re.match(r"the following arguments are required: ([^,]+)", what):
        return _missing(verb, missing[1])
    if several := re.match(r"ambiguous option: ([^\s=]+)\S* could match (.*)", what):
        return UsageError(f"{several[1]} can be {several[2].replace(', ', ' or ')}", hint="write it out")
    return UsageError(message, hint=f"`{hints.usage(verb)}` shows what it takes")


def _no_choice(verb: str, name: str, given: str, known: Sequence[str]) -> UsageError:
    """A verb, an option or a word has another value than those that there are."""
    variable = VARIABLES.get(name, "")
    near = _near(given, known)
    if not verb:
        told, hint = f"there is no verb {given!r}", f"`{hints.usage()}` lists all"
        hint = f"did you mean {near}? {hint}" if near else hint
    else:
        told = f"{verb} knows no {hints.word(variable, given)!r}" if variable else f"{name} can't be {given!r}"
        hint = f"there are {', '.join(known)}"
        hint = f"did you mean {hints.word(variable, near) if variable else near}?" if near else hint
    return UsageError(told, hint=hint)


def _missing(verb: str, name: str) -> UsageError:
    """A word that a verb can't do without is not there."""
    if not verb:
        return UsageError("which verb?", hint=f"`{hints.usage()}` lists all")
    given = {"kind": {"KIND": "quadlet", "PRESET": "…"}}.get(name, {VARIABLES[name]: EXAMPLES.get(name, "…")})
    lists = {"up": "presets", "watch": "status"}.get(verb, "")
    more = f"; `{hints.call(lists)}` lists them" if lists else ""
    return UsageError(f"which {name}?", hint=f"`{hints.call(verb, **given)}`{more}")


def _left_over(verbs: Verbs, verb: str, rest: Sequence[str]) -> UsageError:
    """Words that a verb doesn't take. What stands behind one that is wrong may be a secret, so it isn't shown."""
    _, _, options = verbs[verb]
    usage = f"`{hints.usage(verb)}` shows what {verb} takes"
    meant = ""
    odd = next((word.partition("=")[0] for word in rest if word.startswith("-")), "")
    if odd:
        own = [name for name, _ in (*options, *COMMON) if name.startswith("--")]
        near = _near(odd, own)
        others = [other for other, (_, _, has) in verbs.items() if odd in dict(has)]
        if not near and not others:
            far = {name for _, _, has in verbs.values() for name, _ in has if name.startswith("--")}
            meant = _near(odd, sorted(far))
            others = [other for other, (_, _, has) in verbs.items() if meant in dict(has)]
        there = f"{meant or odd} is an option of {', '.join(others[:3])}; " if others else ""
        return UsageError(f"{verb} has no option {odd}", hint=(f"did you mean {near}? " if near else there) + usage)
    last = next((name for name, _ in reversed(options) if not name.startswith("-")), "")
    if last not in ("arch", "preset") or not re.fullmatch(r"[\w.-]+", rest[0]):
        return UsageError(f"{verb} takes fewer words", hint=usage)
    hint = f"one at a time: `{hints.call(verb, **{VARIABLES[last]: rest[0]})}`"
    return UsageError(f"{verb} takes one {last}, not {rest[0]!r} as well", hint=hint)


def _near(given: str, known: Sequence[str]) -> str:
    """The one of the known words that was probably meant; their dashes make none alike."""
    import difflib

    bare = {word.strip("-"): word for word in known}
    found = difflib.get_close_matches(given.strip("-").lower(), bare, n=1, cutoff=0.7)
    return bare[found[0]] if found else ""


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
        args = parse(verbs, argv)
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


def until_stopped(does: Callable[[], None], *, follows: bool) -> int:
    """Do something that, when it follows, has no end but Ctrl-C, which is no failure then."""
    try:
        does()
    except Interrupted:
        if not follows:
            raise
    return 0


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
        return DiskFull(f"{where}: {problem.strerror}", hint=f"free some space; `{hints.call('prune')}` frees some")
    if problem.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR):
        return InputError(f"{where}: {problem.strerror}", hint="warmstart writes below .warmstart/ in its own folder")
    return None
