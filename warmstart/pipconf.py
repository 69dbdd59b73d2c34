"""The machine's own pip configuration: read as pip reads it, handed to uv, and named in failures.

Wheels are fetched by pip itself, so that whatever a user has set up for it (mirrors, folders, proxies,
passwords, certificates) simply works. Only the resolver, uv, needs a translation.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import msgspec

from warmstart import run
from warmstart.errors import CommandFailed, DiskFull, Unreachable, WarmstartError, WheelMismatch

# What pip and the helpers that hand it passwords may read, beyond run.PASSED.
PASSED = tuple(
    "PIP_ KEYRING_ PYTHON_KEYRING_ NETRC XDG_CONFIG_DIRS AWS_ AZURE_ ARTIFACTS_ CLOUDSDK_ GOOGLE_".split()
)
# Bundles in which the common distributions keep the certificates that an administrator added.
SYSTEM_CERTS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")

NETWORK_HINT = (
    "behind a proxy set https_proxy; for a mirror set PIP_INDEX_URL, for a folder of wheels PIP_FIND_LINKS "
    "(or `pip config set global.index-url …`)"
)
TROUBLE = re.compile(
    r"connection broken by|connection error|Failed to establish|ReadTimeout|timed out|SSLError|ProxyError"
    r"|IncompleteRead|Connection reset|Temporary failure|certificate verify failed|ConnectionError"
    r"|ProtocolError|incomplete-download"
)
DISK = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)

# pip fetches no source archive without asking its build backend for metadata, and some would install torch for that.
# This stands in for the backend and answers with the metadata in the archive (the hook: PEP 517).
BACKEND = """
import email, pathlib, shutil, sys

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    facts = email.message_from_string(pathlib.Path("PKG-INFO").read_text(encoding="utf-8"))
    info = pathlib.Path(folder, f"{facts['Name'].replace('-', '_')}-{facts['Version']}.dist-info")
    info.mkdir()
    shutil.copy("PKG-INFO", info / "METADATA")
    return info.name

__legacy__ = sys.modules[__name__]  # what pip asks of a project without pyproject.toml
"""


class PipConfig(msgspec.Struct, frozen=True):
    """pip's settings that decide where wheels come from. Empty means pip's own default."""

    index_url: str = ""
    extra_index_url: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    constraint: tuple[str, ...] = ()
    trusted_host: tuple[str, ...] = ()
    cert: str = ""
    client_cert: str = ""
    proxy: str = ""
    timeout: str = ""
    retries: str = ""
    keyring_provider: str = ""

    @property
    def places(self) -> str:
        """Where pip looks, for people, without passwords."""
        indexes = () if self.no_index else (self.index_url or "pip's default index", *self.extra_index_url)
        return ", ".join(without_password(place) for place in (*indexes, *self.find_links)) or "nowhere"


def read() -> PipConfig:
    """The configuration that `pip download` would use here: files, then PIP_* variables.

    Raises CommandFailed when a configuration file is broken.
    """
    listed = run.run([sys.executable, "-Im", "pip", "config", "list"], env=environment(), always=True)
    return parse(listed.stdout)


def parse(listed: str) -> PipConfig:
    """The output of `pip config list` as a value. [download] wins over [global], PIP_* over both."""
    found: dict[str, str] = {}
    for section in ("global", "download", ":env:"):
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                found[key[len(section) + 1 :].replace("_", "-")] = str(ast.literal_eval(value))
    found["timeout"] = found.get("timeout", found.get("default-timeout", ""))
    settings: dict[str, object] = {}
    for field in msgspec.structs.fields(PipConfig):
        text = found.get(field.name.replace("_", "-"), "")
        if field.type is bool:
            settings[field.name] = text.lower() in {"1", "true", "yes", "on", "y", "t"}
        else:
            settings[field.name] = text.strip() if field.type is str else tuple(text.split())
    return msgspec.convert(settings, PipConfig)


def environment() -> dict[str, str]:
    """Variables for pip: the user's own for it, and that it neither asks questions nor draws bars."""
    env = {k: v for k, v in os.environ.items() if k.startswith(PASSED)}
    env |= {"PIP_QUIET": "0", "PIP_VERBOSE": "0", "PIP_NO_COLOR": "1", "PIP_PROGRESS_BAR": "off"}
    env |= {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if run.program("keyring"):
        env.setdefault("PIP_KEYRING_PROVIDER", "subprocess")  # with no-input, pip doesn't look for one
    return env


def unbuilt(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment for a pip that fetches source archives of setuptools projects without building them.

    `folder` is one for temporary files. pip must not run with -I, which ignores PYTHONPATH.
    """
    backend = folder / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(BACKEND, encoding="utf-8")
    return ["--no-build-isolation", "--use-pep517", "--ignore-requires-python"], {"PYTHONPATH": str(backend.parent)}


def for_uv(conf: PipConfig) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that make uv look where pip looks, with pip's rule: the best of all indexes.

    Addresses go into the environment, because they can hold passwords and arguments are shown.
    """
    args = ["--no-config", "--no-python-downloads", "--index-strategy", "unsafe-best-match"]
    args += ["--no-index"] if conf.no_index else []
    for file in conf.constraint:
        args += ["--constraints", file if "://" in file else str(Path(file).expanduser().absolute())]
    # The library that pip uses lets these two variables win over pip's own setting.
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or conf.cert
    links = [link if "://" in link else str(Path(link).expanduser().absolute()) for link in conf.find_links]
    env = {
        "UV_DEFAULT_INDEX": conf.index_url,
        "UV_INDEX": " ".join(conf.extra_index_url),
        "UV_FIND_LINKS": ",".join(links),
        "UV_INSECURE_HOST": " ".join(conf.trusted_host),
        "UV_HTTP_TIMEOUT": conf.timeout.partition(".")[0],
        "UV_HTTP_RETRIES": conf.retries,
        "UV_KEYRING_PROVIDER": "subprocess" if _has_keyring(conf) else "",
        "SSL_CERT_FILE": bundle,
        "SSL_CLIENT_CERT": conf.client_cert,
        "UV_SYSTEM_CERTS": "" if bundle or not any(Path(p).is_file() for p in SYSTEM_CERTS) else "true",
        "ALL_PROXY": conf.proxy,
        "HTTPS_PROXY": conf.proxy,
        "HTTP_PROXY": conf.proxy,
        "UV_NO_PROGRESS": "1",
    }
    return args, {k: v for k, v in (environment() | env).items() if v}


def without_password(url: str) -> str:
    """An address without user and password."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", url)


def explain(failed: CommandFailed, wanted: str, place: str) -> WarmstartError:
    """What a failed `pip download` means. `wanted` names the wheels, `place` where pip looked.

    Returns WheelMismatch, DiskFull or Unreachable, or the failure as it was.
    """
    told = output(failed)
    if DISK.search(told):
        return DiskFull("the disk filled up while wheels were fetched", hint="`make prune` frees old caches")
    if mismatch := _mismatch(told):
        return mismatch
    if refused := re.search(r"Could not fetch URL (\S+): (40[137]) ", told):
        return Unreachable(
            f"{_host(refused[1])} refuses ({refused[2]}) to serve {wanted}",
            hint="does that index have it, does it want a password? pip takes one from ~/.netrc or keyring",
        )
    if TROUBLE.search(told):
        return Unreachable(f"{_silent(told) or place} does not answer ({_reason(told)})", hint=NETWORK_HINT)
    missing = re.search(r"(?:No matching distribution found for|satisfies the requirement) (\S+)", told)
    if missing:
        return Unreachable(
            f"{missing[1]} is not offered by {place}",
            hint="set PIP_EXTRA_INDEX_URL to an index that has it, or `make lock` for what is offered now",
        )
    return failed


def not_found(failed: CommandFailed) -> str:
    """The requirement that pip did not find, when nothing in its output says why. Else empty."""
    told = output(failed)
    missing = re.search(r"No matching distribution found for (\S+)", told)
    return missing[1] if missing and not TROUBLE.search(told) else ""


def output(failed: CommandFailed) -> str:
    """All that the failed command wrote."""
    result = getattr(failed, "result", None)
    return f"{result.stdout}\n{result.stderr}" if result else failed.message


def _mismatch(told: str) -> WheelMismatch | None:
    lines = r"^\s+(\S+?)==\S+ from (\S+).*\n\s+Expected sha256 ([0-9a-f]+)\n\s+Got\s+([0-9a-f]+)"
    found = re.search(lines, told, re.MULTILINE)
    if not found:
        return None
    file = without_password(found[2]).partition("#")[0].rsplit("/", 1)[-1]
    return WheelMismatch(
        f"{file or found[1]} from {_host(found[2])}: sha256 is {found[4]}, the lock says {found[3]}",
        hint="it was replaced where it is offered, or damaged on its way; if it is right, `make lock`",
    )


def _silent(told: str) -> str:
    """The host that gave no answer, as far as pip names it."""
    if found := re.search(r"host='([^']+)', port=(\d+)", told):
        return found[1] if found[2] in {"80", "443"} else f"{found[1]}:{found[2]}"
    looked = re.search(r"^Looking in indexes: (.+)$", told, re.MULTILINE)
    return looked[1] if looked else ""


def _reason(told: str) -> str:
    found = re.search(r"\[Errno -?\d+\] ([^'\")]+)|(certificate verify failed|[Rr]ead timed out)", told)
    return (found[1] or found[2]).strip() if found else "the connection broke"


def _host(url: str) -> str:
    return without_password(url).partition("://")[2].partition("/")[0] or url


def _has_keyring(conf: PipConfig) -> bool:
    return conf.keyring_provider != "disabled" and run.program("keyring") is not None
