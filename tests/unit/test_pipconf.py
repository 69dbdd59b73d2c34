"""pip's configuration as a value and as uv's, and what pip's failures mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmstart import pipconf
from warmstart.errors import CommandFailed, DiskFull, Unreachable, WheelMismatch
from warmstart.pipconf import PipConfig
from warmstart.run import Result

LISTED = r"""
:env:.default-timeout='180'
:env:.find-links='/srv/wheels'
download.index-url='https://user:secret@mirror.example/simple'
global.cert='/etc/ca.crt'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///srv/simple\nhttps://two.example/simple'
global.find-links='/srv/other'
global.index-url='https://ignored.example/simple'
global.trusted-host='mirror.example'
install.index-url='https://for-install-only.example'
"""


# Variables that the library in pip reads, and that win over pip's own setting.
BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def failure(told: str) -> CommandFailed:
    failed = CommandFailed("pip failed with exit code 1")
    failed.result = Result("", told, 1, 0.1)  # type: ignore[attr-defined]
    return failed


def test_the_configuration_is_read_as_pip_reads_it() -> None:
    assert pipconf.parse(LISTED) == PipConfig(
        index_url="https://user:secret@mirror.example/simple",
        extra_index_url=("file:///srv/simple", "https://two.example/simple"),
        find_links=("/srv/wheels",),
        constraint=("/etc/constraints.txt",),
        trusted_host=("mirror.example",),
        cert="/etc/ca.crt",
        timeout="180",
    )
    assert pipconf.parse("") == PipConfig()
    assert pipconf.parse(":env:.no-index='1'").no_index
    assert not pipconf.parse("global.no-index='false'").no_index


def test_uv_is_told_by_environment_what_can_hold_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BUNDLES:
        monkeypatch.delenv(name, raising=False)
    args, env = pipconf.for_uv(pipconf.parse(LISTED))
    assert "secret" not in " ".join(args)
    assert env["UV_DEFAULT_INDEX"] == "https://user:secret@mirror.example/simple"
    assert env["UV_INDEX"] == "file:///srv/simple https://two.example/simple"
    assert env["UV_FIND_LINKS"] == "/srv/wheels"
    assert env["SSL_CERT_FILE"] == "/etc/ca.crt"
    assert env["UV_HTTP_TIMEOUT"] == "180"
    assert args[args.index("--index-strategy") + 1] == "unsafe-best-match"
    assert args[args.index("--constraints") + 1] == "/etc/constraints.txt"
    assert "--no-index" not in args


def test_certificates_in_the_order_that_pip_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, other in zip(BUNDLES, reversed(BUNDLES), strict=True):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, "/srv/bundle.crt")
        env = pipconf.for_uv(PipConfig(cert="/etc/ca.crt"))[1]
        assert (env["SSL_CERT_FILE"], "UV_SYSTEM_CERTS" in env) == ("/srv/bundle.crt", False)


def test_relative_folders_are_those_of_the_working_directory() -> None:
    _, env = pipconf.for_uv(
        PipConfig(find_links=("wheels", "~/wheels", "https://a.example/x"), no_index=True)
    )
    assert env["UV_FIND_LINKS"] == f"{Path('wheels').absolute()},{Path.home()}/wheels,https://a.example/x"


def test_pip_gets_the_users_variables_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example")
    monkeypatch.setenv("NETRC", "/srv/netrc")
    monkeypatch.setenv("PYTHONPATH", "/srv")
    monkeypatch.setenv("PIP_QUIET", "3")
    env = pipconf.environment()
    assert env["PIP_INDEX_URL"] == "https://mirror.example"
    assert env["NETRC"] == "/srv/netrc"
    assert env["PIP_NO_INPUT"] == "1"
    assert env["PIP_QUIET"] == "0"  # its errors are read
    assert "PYTHONPATH" not in env


def test_passwords_are_not_shown() -> None:
    conf = PipConfig(index_url="https://user:secret@mirror.example/simple", find_links=("/srv/wheels",))
    assert conf.places == "https://mirror.example/simple, /srv/wheels"
    assert PipConfig(no_index=True).places == "nowhere"
    assert PipConfig().places == "pip's default index"


# As pip 23.2 and 26.3 write them, shortened.
# ruff: noqa: E501
MISMATCH = """
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package versions
    aa==1.0 from http://u:p@127.0.0.1:8771/aa/aa-1.0-py3-none-any.whl#sha256=ceeb (from -r r.txt (line 1)):
        Expected sha256 0000
             Got        ceeb
"""
SILENT_OLD = """
Looking in indexes: http://127.0.0.1:8779
WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<pip._vendor.urllib3\
.connection.HTTPConnection object at 0x7f>: Failed to establish a new connection: [Errno 111] Connection refused')': /aa/
ERROR: Could not find a version that satisfies the requirement aa==1.0 (from versions: none)
ERROR: No matching distribution found for aa==1.0
"""
SILENT_NEW = """
WARNING: Retrying (Retry(total=0)) after connection broken by 'NameResolutionError("HTTPSConnection(host='wheels.example\
.invalid', port=443): Failed to resolve 'wheels.example.invalid' ([Errno -2] Name or service not known)")': /simple/aa/
ERROR: No matching distribution found for aa==1.0
"""
REFUSED = """
  Could not fetch URL http://127.0.0.1:8772/nope/: 403 Client Error: File not found for url: … - skipping
ERROR: No matching distribution found for nope==1.0
"""
ABSENT = """
ERROR: Could not find a version that satisfies the requirement nope==1.0 (from versions: none)
ERROR: No matching distribution found for nope==1.0
"""
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("told", "error", "message", "hint"),
    [
        (
            MISMATCH,
            WheelMismatch,
            "aa-1.0-py3-none-any.whl from 127.0.0.1:8771: sha256 is ceeb, the lock says 0000",
            "lock",
        ),
        (
            SILENT_OLD,
            Unreachable,
            "http://127.0.0.1:8779 does not answer (Connection refused)",
            "PIP_INDEX_URL",
        ),
        (
            SILENT_NEW,
            Unreachable,
            "wheels.example.invalid does not answer (Name or service not known)",
            "https_proxy",
        ),
        (REFUSED, Unreachable, "127.0.0.1:8772 refuses (403) to serve aa 1.0", "netrc"),
        (ABSENT, Unreachable, "nope==1.0 is not offered by here, there", "PIP_EXTRA_INDEX_URL"),
        (FULL, DiskFull, "the disk filled up while wheels were fetched", "prune"),
    ],
)
def test_what_a_failure_means(told: str, error: type[Exception], message: str, hint: str) -> None:
    found = pipconf.explain(failure(told), "aa 1.0", "here, there")
    assert type(found) is error
    assert found.message == message
    assert hint in found.hint
    assert "\n" not in found.message
    assert "u:p@" not in found.message


def test_an_unknown_failure_stays_what_it_is() -> None:
    failed = failure("ERROR: something else")
    assert pipconf.explain(failed, "aa 1.0", "here") is failed


def test_what_was_not_found_without_a_reason() -> None:
    assert pipconf.not_found(failure(ABSENT)) == "nope==1.0"
    assert pipconf.not_found(failure(SILENT_OLD)) == ""
    assert pipconf.not_found(failure(MISMATCH)) == ""
