"""Where the inputs come from: real pip and uv against small indexes on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import profile, solve, wheels
from warmstart.errors import DiskFull, Unreachable, WheelMismatch
from warmstart.lock import Wheel
from warmstart.profile import Profile
from warmstart.schema import Index

ROOT = Path(__file__).parents[2]
PURE = "py3-none-any"
NATIVE = "cp311-cp311-manylinux_2_28_x86_64"


class Server(ThreadingHTTPServer):
    """A folder as an index on loopback. It notes what was asked and can be slow, silent or unwilling."""

    def __init__(self, folder: Path, absent: int = 404) -> None:
        self.asked: list[str] = []
        self.absent = absent
        self.slow = ""  # wheels whose name begins so come in drips
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.scheme = "http"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.place}"

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is part of some tests."""


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        name = self.path.rsplit("/", 1)[-1]
        if not (self.server.slow and name.startswith(self.server.slow) and name.endswith(".whl")):
            super().do_GET()
            return
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        time.sleep(600)

    def send_error(self, code: int, *rest: Any, **more: Any) -> None:
        super().send_error(self.server.absent if code == 404 else code, *rest, **more)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def put(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    needs: tuple[str, ...] = (),
    tag: str = PURE,
    size: int = 0,
    listed: str = "",
) -> Wheel:
    """Make a wheel and list it in the index `folder`, with the hash `listed` if it is to lie about it."""
    file = folder / name / f"{name}-{version}-{tag}.whl"
    file.parent.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"# from {folder.name}\n",
        f"{info}/METADATA": head + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
        archive.writestr(zipfile.ZipInfo("ballast"), os.urandom(size))
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "".join(f"{path},,\n" for path in files))
    digest = wheels.sha256(file)
    with (file.parent / "index.html").open("a", encoding="utf-8") as page:
        href = file.name.replace("+", "%2B")
        page.write(f'<a href="{href}#sha256={listed or digest}">{file.name}</a><br>\n')
    return Wheel(name, version, "python", file.name, digest, file.stat().st_size)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration and no caches of the machine's user."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith(("_proxy", "_ca_bundle")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def start(folder: Path, absent: int = 404) -> Server:
            folder.mkdir(parents=True, exist_ok=True)
            server = Server(folder, absent)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return server

        yield start


def cpu(requires: tuple[str, ...] = (), indexes: tuple[Index, ...] = (), **more: Any) -> Profile:
    known = profile.load(ROOT, "cpu").profile
    changed = msgspec.structs.replace(known.wheels, requires=requires, indexes=indexes, **more)
    return msgspec.structs.replace(known, wheels=changed)


def vendor(server: Server, *packages: str) -> Index:
    return Index(name="vendor", url=server.url, packages=packages)


def configure(monkeypatch: pytest.MonkeyPatch, server: Server | str) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", server if isinstance(server, str) else server.url)


def names(wheelhouse: Path) -> list[str]:
    return sorted(p.name for p in wheelhouse.iterdir() if p.name != wheels.STAMP)


Serve = Callable[..., Server]
Patch = pytest.MonkeyPatch


def test_fetched_from_the_configured_index_and_only_once(
    tmp_path: Path, serve: Serve, monkeypatch: Patch
) -> None:
    server = serve(tmp_path / "index")
    locked = [
        put(tmp_path / "index", "aa"),
        put(tmp_path / "index", "native", tag=NATIVE),
        put(tmp_path / "index", "local", "1.0+cpu", tag="cp38-abi3-manylinux_2_17_x86_64"),
    ]
    configure(monkeypatch, server)
    house = tmp_path / "house"
    wheels.fetch(cpu(), locked, house)
    assert names(house) == sorted(w.file for w in locked)
    server.asked.clear()
    wheels.fetch(cpu(), locked, house)
    assert server.asked == []


@pytest.mark.parametrize("how", ["folder", "file index"])
def test_fetched_without_a_server(tmp_path: Path, monkeypatch: Patch, how: str) -> None:
    one = put(tmp_path / "index", "aa")
    if how == "folder":
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index" / "aa"))
    else:
        configure(monkeypatch, (tmp_path / "index").as_uri())
    wheels.fetch(cpu(), [one], tmp_path / "house")
    assert names(tmp_path / "house") == [one.file]


def test_a_damaged_file_is_fetched_again(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    one = put(tmp_path / "index", "aa")
    configure(monkeypatch, serve(tmp_path / "index"))
    house = tmp_path / "house"
    house.mkdir()
    (house / one.file).write_bytes(b"half")
    wheels.fetch(cpu(), [one], house)
    assert wheels.sha256(house / one.file) == one.sha256


def test_the_vendors_index_comes_second_and_for_its_own_only(
    tmp_path: Path, serve: Serve, monkeypatch: Patch
) -> None:
    general, own = serve(tmp_path / "general"), serve(tmp_path / "vendor", 403)
    configure(monkeypatch, general)
    aa, tt, both = (
        put(tmp_path / "general", "aa"),
        put(tmp_path / "vendor", "tt", "2.0+rocm10.0.0"),
        put(tmp_path / "general", "both"),
    )
    put(tmp_path / "vendor", "aa", "9.0")
    wheels.fetch(cpu(indexes=(vendor(own, "tt", "both"),)), [aa, tt, both], tmp_path / "house")
    assert names(tmp_path / "house") == sorted([aa.file, tt.file, both.file])
    assert {path.split("/")[1] for path in own.asked} == {"tt"}
    assert "/tt/" in general.asked


def test_another_hash(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    good = put(tmp_path / "index", "good", size=wheels.ALONE // 4)
    other = put(tmp_path / "index", "other")
    expected = hashlib.sha256(b"locked").hexdigest()
    configure(monkeypatch, serve(tmp_path / "index"))
    wanted = [good, msgspec.structs.replace(other, sha256=expected)]
    with pytest.raises(WheelMismatch, match=rf"^{other.file} from 127.*{other.sha256}.*{expected}"):
        wheels.fetch(cpu(), wanted, tmp_path / "house")
    assert set(names(tmp_path / "house")) <= {good.file}


def test_a_mismatch_is_not_hidden_by_a_second_place(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    one = msgspec.structs.replace(put(tmp_path / "general", "tt"), sha256="0" * 64)
    configure(monkeypatch, serve(tmp_path / "general"))
    with pytest.raises(WheelMismatch):
        wheels.fetch(cpu(indexes=(vendor(serve(tmp_path / "vendor"), "tt"),)), [one], tmp_path / "house")


def test_a_hash_that_an_index_lies_about(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    one = put(tmp_path / "index", "aa")
    shutil.rmtree(tmp_path / "index")
    put(tmp_path / "index", "aa", listed=one.sha256, size=10)
    configure(monkeypatch, serve(tmp_path / "index"))
    with pytest.raises(WheelMismatch):
        wheels.fetch(cpu(), [one], tmp_path / "house")
    assert names(tmp_path / "house") == []


def test_not_offered(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    server = serve(tmp_path / "index")
    configure(monkeypatch, server.url.replace("://", "://user:secret@"))
    gone = Wheel("gone", "1.0", "python", "gone-1.0-py3-none-any.whl", "0" * 64)
    with pytest.raises(Unreachable, match=f"gone==1.0 is not offered by http://{server.place}") as caught:
        wheels.fetch(cpu(), [gone], tmp_path / "house")
    assert "PIP_EXTRA_INDEX_URL" in caught.value.hint
    assert "secret" not in caught.value.message + caught.value.hint
    assert names(tmp_path / "house") == []


def test_refused(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    server = serve(tmp_path / "index", 403)
    configure(monkeypatch, server)
    gone = Wheel("gone", "1.0", "python", "gone-1.0-py3-none-any.whl", "0" * 64)
    with pytest.raises(Unreachable, match=rf"{server.place} refuses \(403\) to serve gone 1.0"):
        wheels.fetch(cpu(), [gone], tmp_path / "house")


def test_silent(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    server = serve(tmp_path / "index")
    one = put(tmp_path / "index", "aa")
    configure(monkeypatch, server)
    server.shutdown()
    server.server_close()
    with pytest.raises(
        Unreachable, match=rf"{server.place} does not answer \(Connection refused\)"
    ) as caught:
        wheels.fetch(cpu(), [one], tmp_path / "house")
    assert "https_proxy" in caught.value.hint


def test_a_silent_vendor_is_named(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    configure(monkeypatch, serve(tmp_path / "general"))
    away = serve(tmp_path / "vendor")
    one = put(tmp_path / "vendor", "tt")
    index = vendor(away, "tt")
    away.shutdown()
    away.server_close()
    with pytest.raises(
        Unreachable, match=r"^index vendor: .* does not answer .*; and tt 1.0 is not offered where"
    ):
        wheels.fetch(cpu(indexes=(index,)), [one], tmp_path / "house")


def test_certificates_of_pips_configuration(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    one = put(tmp_path / "index", "aa")
    server = serve(tmp_path / "index")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1".split()
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.scheme = "https"
    configure(monkeypatch, server)
    with pytest.raises(Unreachable, match=rf"{server.place} does not answer \(certificate verify failed"):
        wheels.fetch(cpu(), [one], tmp_path / "house")
    monkeypatch.setenv("PIP_CERT", str(cert))
    wheels.fetch(cpu(), [one], tmp_path / "house")
    assert names(tmp_path / "house") == [one.file]
    assert solve.resolve(cpu(("aa",)), ())[0].sha256 == one.sha256


# argv: wheelhouse, wheels as JSON. Fetches them as the command line would.
FETCH = """
import sys
from pathlib import Path
import msgspec
from warmstart import log, profile, signals, wheels
from warmstart.errors import WarmstartError
from warmstart.lock import Wheel
log.configure(quiet=True)
signals.catch()
known = profile.load(Path.cwd(), "cpu").profile
try:
    wheels.fetch(known, msgspec.json.decode(sys.argv[2], type=list[Wheel]), Path(sys.argv[1]))
except WarmstartError as failure:
    sys.exit(failure.code)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_broken_off(
    tmp_path: Path, serve: Serve, monkeypatch: Patch, number: signal.Signals, code: int
) -> None:
    quick = put(tmp_path / "index", "quick")
    halved = put(tmp_path / "index", "halved", size=4_000_000)
    server = serve(tmp_path / "index")
    server.slow = "halved"
    configure(monkeypatch, server)
    house = tmp_path / "house"
    # As a job of its own, so that the other one is done and kept.
    wanted = msgspec.json.encode([quick, msgspec.structs.replace(halved, size=wheels.ALONE)]).decode()
    child = subprocess.Popen([sys.executable, "-c", FETCH, house, wanted], cwd=ROOT)
    await_(lambda: (house / quick.file).exists() and coming(house, "halved"))
    pips = running(house)
    assert pips
    os.kill(child.pid, number)
    assert child.wait(120) == code
    await_(lambda: not running(house))
    if number == signal.SIGKILL:  # nobody was left to clean up: the next fetch does
        assert list(house.glob(f"{wheels.PART}*"))
        (house / f"{wheels.STAMP}.{child.pid}-1").write_text("{")  # as when it was killed while it wrote that
    else:
        assert names(house) == [quick.file]
    server.slow = ""
    wheels.fetch(cpu(), [quick, halved], house)
    assert names(house) == sorted([quick.file, halved.file])


def test_a_failure_ends_the_other_pips(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    halved = msgspec.structs.replace(put(tmp_path / "index", "halved", size=4_000_000), size=wheels.ALONE)
    gone = Wheel("gone", "1.0", "python", "gone-1.0-py3-none-any.whl", "0" * 64)
    server = serve(tmp_path / "index")
    server.slow = "halved"
    configure(monkeypatch, server)
    began = time.monotonic()
    with pytest.raises(Unreachable, match="gone"):
        wheels.fetch(cpu(), [gone, halved], tmp_path / "house")
    assert time.monotonic() - began < 300  # the slow one would take 600 s
    assert names(tmp_path / "house") == []
    assert not running(tmp_path / "house")


def test_a_failure_ends_also_what_had_not_begun(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    many = [put(tmp_path / "index", f"w{i}", size=1000) for i in range(3 * wheels.WORKERS)]
    gone = Wheel("gone", "1.0", "python", "gone-1.0-py3-none-any.whl", "0" * 64, 2 * wheels.ALONE)
    configure(monkeypatch, serve(tmp_path / "index"))
    wanted = [gone, *(msgspec.structs.replace(w, size=wheels.ALONE) for w in many)]  # a job each
    caught: list[BaseException] = []

    def fetch() -> None:
        try:
            wheels.fetch(cpu(), wanted, tmp_path / "house")
        except Unreachable as failed:
            caught.append(failed)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(240)
    assert not thread.is_alive()
    assert "gone" in str(caught[0])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    big = put(tmp_path / "index", "big", size=4_000_000)
    configure(monkeypatch, serve(tmp_path / "index"))
    house = tmp_path / "house"
    house.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", house], check=True)
    try:
        with pytest.raises(DiskFull, match="needs"):
            wheels.fetch(cpu(), [big], house)
        with pytest.raises(DiskFull, match="filled up"):  # an index that tells no sizes
            wheels.fetch(cpu(), [msgspec.structs.replace(big, size=0)], house)
        assert names(house) == []
    finally:
        subprocess.run(["umount", house], check=True)


def await_(done: Callable[[], Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def coming(house: Path, name: str) -> bool:
    """Whether a pip downloads a file whose name begins so. Unlike glob, os.walk bears folders that go meanwhile."""
    return any(file.startswith(name) for top, _, files in os.walk(house) if "/tmp/" in f"{top}/" for file in files)


def running(house: Path) -> list[str]:
    """Processes that work for a wheelhouse, but those that only fetch into it by our code."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{house}/{wheels.PART}".encode() in (told := file.read_bytes()):
                found.append(told.replace(b"\0", b" ").decode())
    return found


def test_resolved_with_vendors_packages_from_their_index_alone(
    tmp_path: Path, serve: Serve, monkeypatch: Patch
) -> None:
    general, own = serve(tmp_path / "general"), serve(tmp_path / "vendor", 403)
    configure(monkeypatch, general)
    put(tmp_path / "general", "aa", needs=("bb", "heavy"))
    put(tmp_path / "general", "heavy")
    bb = put(tmp_path / "general", "bb", needs=("cc>=2",))
    put(tmp_path / "vendor", "bb", "9.0")
    put(tmp_path / "general", "cc", "3.0")  # newer, but not the vendor's
    cc = put(tmp_path / "vendor", "cc", "2.0+rocm1")
    put(tmp_path / "vendor", "unneeded", needs=("absent",))
    put(tmp_path / "general", "absent")
    found = solve.resolve(cpu(("aa==1.0",), (vendor(own, "cc", "unneeded"),)), ("heavy",))
    assert [(w.name, w.version, w.source) for w in found] == [
        ("aa", "1.0", "pip"),
        ("bb", "1.0", "pip"),
        ("cc", "2.0+rocm1", "vendor"),
    ]
    assert [w.sha256 for w in found][1:] == [bb.sha256, cc.sha256]
    assert not any(path.startswith("/bb") for path in own.asked)
    assert not any(path.startswith("/cc") for path in general.asked)


def test_resolved_without_the_vendors_index(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    configure(monkeypatch, serve(tmp_path / "general"))
    away = serve(tmp_path / "vendor")
    index = vendor(away, "cc")
    away.shutdown()
    away.server_close()
    cc = put(tmp_path / "general", "cc", "2.0")
    given = cpu(("cc",), (index,))
    with pytest.raises(Unreachable, match=rf"index vendor \({away.place}\) does not answer") as caught:
        solve.resolve(given, ())
    assert "--without-index vendor" in caught.value.hint
    (found,) = solve.resolve(given, (), without_indexes=["vendor"])
    assert (found.sha256, found.source) == (cc.sha256, "pip")


def test_resolved_over_all_configured_places(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    one, two = serve(tmp_path / "one"), serve(tmp_path / "two")
    configure(monkeypatch, one)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{two.url} {(tmp_path / 'three').as_uri()}")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "four" / "dd"))
    put(tmp_path / "one", "aa", "1.0")
    put(tmp_path / "two", "aa", "3.0", needs=("bb", "dd"))
    put(tmp_path / "three", "bb", "1.0")
    dd = put(tmp_path / "four", "dd", tag=NATIVE, size=5)
    put(tmp_path / "four", "dd", tag=PURE)
    put(tmp_path / "four", "dd", "2.0", tag="cp312-cp312-manylinux_2_28_x86_64")  # newer, for another Python
    first = solve.resolve(cpu(("aa",)), ())
    assert [(w.name, w.version) for w in first] == [("aa", "3.0"), ("bb", "1.0"), ("dd", "1.0")]
    assert first[2] == dd
    assert solve.resolve(cpu(("aa",)), ()) == first
    wheels.fetch(cpu(), first, tmp_path / "house")
    assert names(tmp_path / "house") == sorted(w.file for w in first)


# A build back end in 10 lines, because the indexes of these tests have none.
BACKEND = """
import pathlib
TEXT = "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\nRequires-Dist: {needs}\\n"
WHEEL = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "{name}-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(TEXT)
    (info / "WHEEL").write_text(WHEEL)
    return info.name
"""


def test_what_the_profile_allows_as_sources(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    configure(monkeypatch, serve(tmp_path / "index"))
    put(tmp_path / "index", "aa")
    tree = tmp_path / "selector-1.0"
    tree.mkdir()
    (tree / "backend.py").write_text(BACKEND.format(name="selector", needs="aa"), encoding="utf-8")
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: selector\nVersion: 1.0\n", encoding="utf-8")
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (tree / "pyproject.toml").write_text(system, encoding="utf-8")
    folder = tmp_path / "index" / "selector"
    folder.mkdir()
    with tarfile.open(folder / "selector-1.0.tar.gz", "w:gz") as archive:
        archive.add(tree, tree.name)
    (folder / "index.html").write_text(
        '<a href="selector-1.0.tar.gz">selector-1.0.tar.gz</a>', encoding="utf-8"
    )
    with pytest.raises(Unreachable, match=r"selector==1\.0 is offered without a wheel"):
        solve.resolve(cpu(("selector",)), ())
    given = cpu(("selector",), from_source={"selector": {}})
    found = solve.resolve(given, ())
    assert [w.file for w in found] == ["aa-1.0-py3-none-any.whl", "selector-1.0.tar.gz"]
    wheels.fetch(given, found, tmp_path / "house")
    assert names(tmp_path / "house") == [w.file for w in found]


def test_resolved_under_the_users_constraints_and_the_profiles_overrides(
    tmp_path: Path, serve: Serve, monkeypatch: Patch
) -> None:
    configure(monkeypatch, serve(tmp_path / "index"))
    for version in ("1.0", "2.0", "3.0"):
        put(tmp_path / "index", "aa", version, needs=("bb==1.0",))
        put(tmp_path / "index", "bb", version)
    (tmp_path / "constraints.txt").write_text("aa<3\n", encoding="utf-8")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    found = solve.resolve(cpu(("aa",), overrides=("bb>=2",)), ())
    assert [(w.name, w.version) for w in found] == [("aa", "2.0"), ("bb", "3.0")]


def test_sources_are_fetched_without_what_their_build_asks_for(
    tmp_path: Path, serve: Serve, monkeypatch: Patch
) -> None:
    own = serve(tmp_path / "vendor", 403)  # has no setuptools either
    configure(monkeypatch, serve(tmp_path / "general"))
    tree = tmp_path / "tool-1.0"
    tree.mkdir()
    (tree / "setup.py").write_text("import torch_of_no_index\n", encoding="utf-8")
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n", encoding="utf-8")
    folder = tmp_path / "vendor" / "tool"
    folder.mkdir(parents=True)
    archive = folder / "tool-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tree, tree.name)
    (folder / "index.html").write_text(f'<a href="{archive.name}">{archive.name}</a>', encoding="utf-8")
    locked = Wheel("tool", "1.0", "python", archive.name, wheels.sha256(archive), source="vendor")
    wheels.fetch(cpu((), (vendor(own, "tool"),)), [locked], tmp_path / "house")
    assert names(tmp_path / "house") == [archive.name]


def test_an_override_of_what_an_index_lists_stands_for_it_alone(
    tmp_path: Path, serve: Serve, monkeypatch: Patch
) -> None:
    configure(monkeypatch, serve(tmp_path / "general"))
    own = serve(tmp_path / "vendor", 403)
    put(tmp_path / "general", "aa", needs=("tt[every]",))
    put(tmp_path / "general", "tt", "9.0")
    tt = put(tmp_path / "vendor", "tt", "2.0", needs=("nowhere", 'elsewhere ; extra == "every"'))
    found = solve.resolve(cpu(("aa", "tt==2.0"), (vendor(own, "tt"),), overrides=("tt==2.0",)), ())
    assert [(w.name, w.version, w.source) for w in found] == [("aa", "1.0", "pip"), ("tt", "2.0", "vendor")]
    assert found[1].sha256 == tt.sha256


def test_unresolvable(tmp_path: Path, serve: Serve, monkeypatch: Patch) -> None:
    server = serve(tmp_path / "index")
    configure(monkeypatch, server)
    put(tmp_path / "index", "aa", needs=("nowhere",))
    with pytest.raises(Unreachable, match=f"nowhere is not offered by {server.url}"):
        solve.resolve(cpu(("aa",)), ())
    with pytest.raises(Unreachable, match="aa==7 is not offered"):
        solve.resolve(cpu(("aa==7",)), ())
