"""Images in registries, by skopeo: named whole, resolved to a digest, and taken by that digest alone.

Passwords, certificates and mirrors are skopeo's own affair (`skopeo login`, registries.conf). A registry on this
machine's loopback address may speak plain HTTP; any other has to be named as insecure in registries.conf.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from warmstart import failure, probe, run
from warmstart.errors import CommandFailed, EngineTooOld, RegistryRefused, SeedDamaged, Unreachable, UsageError
from warmstart.probe import Capabilities
from warmstart.run import Result

NEEDED = "digestfile preserve-digests retry-times src-tls-verify dest-tls-verify".split()
TRIES = 3  # a registry that is busy, or a connection that breaks

_NAME = re.compile(
    r"(?P<registry>(localhost(?=:)|[a-zA-Z0-9][\w-]*(\.[\w-]+)+|\[[0-9a-fA-F:]+\]|[a-zA-Z0-9][\w-]*(?=:\d))(:\d+)?)"
    r"/(?P<path>[a-z0-9]+([._/-]+[a-z0-9]+)*)(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_REFUSED = re.compile(
    r"unauthorized|denied|forbidden|authentication required|manifest unknown|name unknown|not found|name invalid"
    r"|unsupported|manifest invalid|method not allowed|too large",
    re.IGNORECASE,
)


class Ref(msgspec.Struct, frozen=True):
    """The name of an image in a registry."""

    registry: str
    path: str
    tag: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        """Without tag and digest."""
        return f"{self.registry}/{self.path}"

    @property
    def exact(self) -> str:
        """By digest if there is one, else by tag: both at once are no name to skopeo."""
        return f"{self.name}@{self.digest}" if self.digest else f"{self.name}:{self.tag or 'latest'}"

    def at(self, digest: str) -> Ref:
        """The same by that digest."""
        return msgspec.structs.replace(self, digest=digest)


def parse(text: str) -> Ref:
    """A name with its registry, as HOST[:PORT]/PATH[:TAG][@DIGEST]. Raises UsageError."""
    found = _NAME.fullmatch(text.removeprefix("docker://"))
    if not found:
        raise UsageError(
            f"{text!r} is not the name of an image in a registry",
            hint="host[:port]/path[:tag][@sha256:…], for example registry.example/you/seeds:gfx1151-0123456789ab",
        )
    return Ref(found["registry"], found["path"], found["tag"] or "", found["digest"] or "")


def on_loopback(ref: Ref) -> bool:
    """Whether the registry is on this machine, by name or address."""
    host = re.sub(r":\d+$", "", ref.registry).strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require(caps: Capabilities) -> None:
    """Raises EngineMissing, and EngineTooOld when skopeo lacks what is needed."""
    told = run.run(["skopeo", "copy", "--help"], env=probe.environment(caps), ok=range(256), always=True).stdout
    if missing := [f"--{flag}" for flag in NEEDED if flag not in probe.flags(told)]:
        raise EngineTooOld(f"skopeo lacks {', '.join(missing)}", hint="Debian 12 or any later release has a newer one")


def manifest(caps: Capabilities, ref: Ref) -> tuple[Ref, bytes]:
    """The manifest behind a name, and the name by its digest.

    Raises SeedDamaged when it is not the one that the name's digest asks for, RegistryRefused, Unreachable.
    """
    data = _inspect(caps, ref, "--raw")
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if ref.digest and found != ref.digest:
        told = f"{ref.name} gave {found[:19]}… for {ref.digest[:19]}…"
        raise SeedDamaged(told, hint="the registry, or the way from it, changed it")
    return ref.at(found), data


def config(caps: Capabilities, ref: Ref) -> bytes:
    """The config of an image. Raises as `manifest` does."""
    return _inspect(caps, ref, "--raw", "--config")


def fetch(caps: Capabilities, ref: Ref, layout: Path) -> None:
    """Bring an image into an OCI layout, unchanged. Raises as `manifest` does."""
    words = ["--preserve-digests", f"--src-tls-verify={_verify(ref)}", f"docker://{ref.exact}", f"oci:{layout}:seed"]
    _skopeo(caps, ref, "copy", *words)


def push(caps: Capabilities, layout: Path, tag: str, ref: Ref, digest_file: Path) -> str:
    """Bring the image `tag` of an OCI layout to a registry, unchanged; returns its digest there."""
    words = ["--preserve-digests", f"--dest-tls-verify={_verify(ref)}", f"--digestfile={digest_file}"]
    _skopeo(caps, ref, "copy", *words, f"oci:{layout}:{tag}", f"docker://{ref.exact}")
    return "" if run.recorder.on else digest_file.read_text(encoding="utf-8").strip()


def _inspect(caps: Capabilities, ref: Ref, *words: str) -> bytes:
    told = _skopeo(caps, ref, "inspect", *words, f"--tls-verify={_verify(ref)}", f"docker://{ref.exact}", always=True)
    return told.stdout.encode()


def _verify(ref: Ref) -> str:
    return "false" if on_loopback(ref) else "true"


def _skopeo(caps: Capabilities, ref: Ref, verb: str, *words: str, always: bool = False) -> Result:
    tries = TRIES if verb == "copy" else 1
    command: Sequence[str] = ["skopeo", verb, f"--retry-times={tries}", *words]
    try:
        return run.run(command, env=probe.environment(caps), always=always)
    except CommandFailed as failed:
        told = getattr(failed, "result", Result("", failed.message, 1, 0.0)).stderr
        reason = _reason(told, failed.code)
        if re.search(r"digest (mis|did not |does not )match|doesn't match|size mismatch", told, re.IGNORECASE):
            hint = "the registry, or the way from it, changed it"
            raise SeedDamaged(f"{ref.registry} gave other bytes than it announced: {reason}", hint=hint) from None
        if _REFUSED.search(told):
            missing = re.search(r"manifest unknown|name unknown|not found", told, re.IGNORECASE)
            hint = f"skopeo list-tags docker://{ref.name}" if missing else f"skopeo login {ref.registry}"
            raise RegistryRefused(
                f"{ref.registry} refuses {ref.exact.partition('/')[2]}: {reason}", hint=hint
            ) from None
        hint = "set https_proxy, or name a mirror in registries.conf (CONTAINERS_REGISTRIES_CONF)"
        if on_loopback(ref):
            hint = "it is on this machine: does it run, and on that port?"
        raise Unreachable(f"registry {ref.registry} does not answer: {reason}", hint=hint) from None


def _reason(output: str, code: int) -> str:
    """The end of skopeo's last line: what comes before names what we asked for."""
    last = failure.reason(output.splitlines(), code)
    message = re.search(r'msg="((?:[^"\\]|\\.)*)"', last)
    parts = re.sub(r'\\"', '"', message[1] if message else last).split(": ")
    told = ": ".join(dict.fromkeys(parts[-2:]))
    return "".join(c if c.isprintable() else "?" for c in told)  # a registry wrote it
