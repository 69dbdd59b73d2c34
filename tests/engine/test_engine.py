"""Builds, images and containers on real buildah and podman, in a store of their own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import EPOCH
from warmstart import engine
from warmstart.engine import Capabilities
from warmstart.errors import BaseMismatch, BuildFailed, DiskFull, ImageMissing, Unreachable
from warmstart.run import run

NAME = "localhost/warmstart-test"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "a" / "context").mkdir(parents=True)
    return tmp_path / "a"


def build(caps: Capabilities, work: Path, text: str, *tags: str, epoch: int = EPOCH, **options: Any) -> str:
    options = {"context": work / "context", "log_file": work / "build.log"} | options
    return engine.build(caps, text, tags=tags, epoch=epoch, **options)


def inside(caps: Capabilities, image: str, *command: str) -> str:
    return run(["podman", "run", "--rm", "--network=none", image, *command]).stdout.strip()


def cached(work: Path) -> int:
    return (work / "build.log").read_text().count("Using cache")


def working() -> str:
    return run(["buildah", "containers", "--quiet"]).stdout


# ---- builds --------------------------------------------------------------------------------------


def test_a_build_gets_its_tags_and_is_found(caps: Capabilities, base: str, work: Path) -> None:
    text = f'FROM {base}\nRUN echo made > /made\nENV A="b c"\nLABEL io.warmstart.plan-id=p1\n'
    image = build(caps, work, text, f"{NAME}:one", f"{NAME}:two")
    info = engine.inspect(caps, f"{NAME}:two")
    assert info.image_id == image
    assert set(info.tags) == {f"{NAME}:one", f"{NAME}:two"}
    assert info.env["A"] == "b c"
    assert info.labels["io.warmstart.plan-id"] == "p1"
    assert info.created == "2023-11-14T22:13:20Z"
    assert [layer.size_bytes > 0 for layer in info.layers] == [True, True, False, False]
    assert "echo made > /made" in info.layers[1].created_by
    assert 0 < sum(layer.size_bytes for layer in info.layers) <= info.size_bytes
    assert engine.find(caps, "io.warmstart.plan-id", "p1") == image
    assert engine.find(caps, "io.warmstart.plan-id", "p2") is None


def test_every_file_has_the_epoch_and_two_builds_are_identical(
    caps: Capabilities, base: str, work: Path
) -> None:
    (work / "context" / "file").write_text("x")
    text = f"FROM {base}\nCOPY file /copied\nRUN echo x > /made\n"
    first = build(caps, work, text, no_cache=True)
    (work / "context" / "file").touch()
    assert build(caps, work, text, no_cache=True) == first
    assert cached(work) == 0
    assert inside(caps, first, "stat", "-c", "%Y", "/copied", "/made").split() == [str(EPOCH)] * 2


def test_only_what_follows_a_change_is_built_anew(caps: Capabilities, base: str, work: Path) -> None:
    text = "FROM {base}\nRUN echo first{n}\nRUN echo second\nRUN echo third > /third{m}\n"
    first = build(caps, work, text.format(base=base, n="", m=""))
    assert build(caps, work, text.format(base=base, n="", m="")) == first
    assert cached(work) == 3
    build(caps, work, text.format(base=base, n="", m="!"))
    assert cached(work) == 2
    build(caps, work, text.format(base=base, n="!", m=""))
    assert cached(work) == 0


def test_a_stage_that_ends_with_a_label_can_be_mounted_from_the_cache(
    caps: Capabilities, base: str, work: Path
) -> None:
    """buildah 1.28 mounts a cached stage as it was before its last instruction."""
    text = (
        f"FROM {base} AS parts\nRUN echo part > /part\nLABEL io.warmstart.stage=parts\n"
        f"FROM {base}\nRUN --mount=type=bind,from=parts,source=/part,target=/from : {{n}} && cp /from /part\n"
    )
    build(caps, work, text.format(n=1))
    image = build(caps, work, text.format(n=2))
    assert cached(work) == 2
    assert inside(caps, image, "cat", "/part") == "part"


def test_what_a_build_may_see(caps: Capabilities, base: str, work: Path) -> None:
    (work / "secret").write_text("password\n")
    (work / "more").mkdir()
    (work / "more" / "file").write_text("from more\n")
    lines: list[str] = []
    image = build(
        caps,
        work,
        f"FROM {base}\n"
        "RUN --mount=type=secret,id=key,target=/key cat /key\n"
        "RUN --mount=type=secret,id=none,target=/none [ ! -e /none ]\n"
        "RUN --mount=type=bind,from=more,source=file,target=/m cat /m; cat /m > /m2\n"
        "RUN cat /volume/file; touch /volume/x && exit 1 || true\n"
        "RUN [ ! -e /volume/x ]\n",
        contexts={"more": work / "more"},
        secrets={"key": work / "secret", "none": work / "missing"},
        volumes=[(work / "more", "/volume")],
        on_line=lines.append,
    )
    assert "password" in lines
    assert "from more" in lines
    assert inside(caps, image, "cat", "/m2") == "from more"
    assert "password" not in run(["podman", "history", "--no-trunc", image]).stdout
    left = inside(caps, image, "ls", "-A", "/").split()
    assert "m2" in left
    assert not {"key", "m", "none"} & set(left)
    assert inside(caps, image, "ls", "-A", "/volume") == ""


def test_a_device_is_there_in_a_build(caps: Capabilities, base: str, work: Path) -> None:
    text = f"FROM {base}\nRUN [ -c /dev/kfd ] && : > /dev/kfd\n"
    build(caps, work, text, devices=["/dev/null:/dev/kfd"])
    with pytest.raises(BuildFailed):
        build(caps, work, text, no_cache=True)


def test_only_the_target_is_built(caps: Capabilities, base: str, work: Path) -> None:
    text = f"FROM {base} AS one\nRUN echo one > /one\nFROM one AS two\nRUN false\n"
    assert inside(caps, build(caps, work, text, target="one"), "cat", "/one") == "one"


def test_the_context_and_the_cwd_stay_clean(caps: Capabilities, base: str, work: Path) -> None:
    build(caps, work, f"FROM {base}\nCOPY . /all\n")
    assert list((work / "context").iterdir()) == []
    assert list((work / "tmp").iterdir()) == []


# ---- failures ------------------------------------------------------------------------------------


def test_a_failing_step_is_named_and_leaves_nothing(caps: Capabilities, base: str, work: Path) -> None:
    text = f"FROM {base}\nRUN true\nRUN --mount=type=tmpfs,target=/t echo the reason >&2; exit 3\n"
    with pytest.raises(BuildFailed) as caught:
        build(caps, work, text, f"{NAME}:failed")
    assert caught.value.message == "step 'RUN echo the reason >&2; exit 3' failed: the reason"
    assert str(work / "build.log") in caught.value.hint
    assert not engine.exists(caps, f"{NAME}:failed")
    assert working() == ""
    again = subprocess.run([work / "build.sh"], check=False, capture_output=True, text=True)
    assert again.returncode != 0
    assert "the reason" in again.stdout + again.stderr


def test_a_full_disk_is_told_as_such(caps: Capabilities, base: str, work: Path) -> None:
    step = "RUN --mount=type=tmpfs,target=/small,tmpfs-size=1m head -c 2000000 /dev/zero > /small/x"
    with pytest.raises(DiskFull, match="no space left"):
        build(caps, work, f"FROM {base}\n{step}\n")


def test_a_base_that_is_not_there_is_not_pulled(caps: Capabilities, work: Path) -> None:
    with pytest.raises(BuildFailed, match="no-such-image"):
        build(caps, work, "FROM localhost/no-such-image:1\nRUN true\n")


def test_too_little_disk_is_told_before_a_build(caps: Capabilities) -> None:
    engine.need_disk(caps, 1)
    with pytest.raises(DiskFull, match=r"GB free, 1000000\.0 GB needed") as caught:
        engine.need_disk(caps, 10**15)
    assert "make prune" in caught.value.hint


# ---- images and containers -----------------------------------------------------------------------


def test_a_rootfs_becomes_the_same_image_each_time(caps: Capabilities, rootfs: Path, work: Path) -> None:
    def make(epoch: int) -> str:
        return engine.import_rootfs(caps, rootfs, f"{NAME}:rootfs", epoch, work / "base.log")

    first = make(EPOCH)
    assert make(EPOCH) == first
    assert make(EPOCH + 1) != first
    assert inside(caps, f"{NAME}:rootfs", "sh", "-c", "echo works") == "works"


def test_a_missing_image_is_told(caps: Capabilities) -> None:
    assert not engine.exists(caps, f"{NAME}:nothing")
    with pytest.raises(ImageMissing, match="nothing"):
        engine.inspect(caps, f"{NAME}:nothing")
    assert not engine.remove(caps, f"{NAME}:nothing")


def test_removing_a_tag_keeps_the_image_of_another(caps: Capabilities, base: str, work: Path) -> None:
    image = build(caps, work, f"FROM {base}\nRUN echo twice\n", f"{NAME}:x", f"{NAME}:y")
    assert engine.remove(caps, f"{NAME}:x")
    assert engine.inspect(caps, f"{NAME}:y").image_id == image


def test_a_container_has_the_least_rights(caps: Capabilities, base: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("seen\n")
    tmp_path.chmod(0o755)
    container = engine.run_container(
        caps,
        base,
        ["sleep", "60"],
        env={"A": "b"},
        volumes=[(tmp_path, "/data")],
        options=["--network=none", "--user=1234:1234"],
    )
    try:

        def ask(script: str) -> str:
            return run(["podman", "exec", container, "sh", "-c", script], ok=range(256)).stdout.strip()

        assert ask("echo $A; cat /data/file; id -u").split() == ["b", "seen", "1234"]
        assert ask("touch /tmp/x && echo yes") == "yes"
        assert ask("touch /x /data/x || echo no") == "no"
        status = dict(line.split(":", 1) for line in ask("cat /proc/self/status").splitlines())
        assert int(status["CapBnd"], 16) == 0
        assert int(status["NoNewPrivs"]) == 1
    finally:
        run(["podman", "rm", "--force", "--time", "0", container])


# ---- pulling -------------------------------------------------------------------------------------


class Registry(BaseHTTPRequestHandler):
    """Serves the blobs of an OCI layout by digest: what pulling an image needs of a registry."""

    blobs: Path
    wrong: str = ""  # the digest whose answer is another manifest

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        digest = self.path.rpartition("/")[2]
        path = self.blobs / digest.removeprefix("sha256:")
        if self.path == "/v2/":
            self.answer(200, b"{}", "application/json")
        elif digest == self.wrong:
            self.answer(200, b"{}", "application/vnd.oci.image.manifest.v1+json")
        elif path.is_file():
            kind = "manifest.v1+json" if "/manifests/" in self.path else "config.v1+json"
            self.answer(200, path.read_bytes(), f"application/vnd.oci.image.{kind}")
        else:
            told = {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
            self.answer(404, json.dumps(told).encode(), "application/json")

    def answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def registry(
    caps: Capabilities, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """A registry on loopback with one image: its name there, and its digest."""
    run(["buildah", "push", "--quiet", base, f"oci:{tmp_path}/layout:base"])
    index = json.loads((tmp_path / "layout" / "index.json").read_text())
    Registry.blobs, Registry.wrong = tmp_path / "layout" / "blobs" / "sha256", ""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    host = f"localhost:{server.server_port}"
    conf = tmp_path / "registries.conf"
    conf.write_text(f'[[registry]]\nlocation = "{host}"\ninsecure = true\n')
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(conf))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"{host}/team/base", index["manifests"][0]["digest"]
    server.shutdown()
    server.server_close()


def test_an_image_is_pulled_by_digest(caps: Capabilities, registry: tuple[str, str]) -> None:
    name, digest = registry
    engine.pull(caps, f"{name}:1.0@{digest}", digest)
    assert engine.exists(caps, f"{name}@{digest}")
    engine.pull(caps, f"{name}@{digest}", digest)
    engine.remove(caps, f"{name}@{digest}")


def test_a_digest_that_the_registry_does_not_have(caps: Capabilities, registry: tuple[str, str]) -> None:
    other = "sha256:" + hashlib.sha256(b"other").hexdigest()
    with pytest.raises(BaseMismatch, match="has no image"):
        engine.pull(caps, registry[0], other)


def test_a_registry_that_answers_with_another_manifest(caps: Capabilities, registry: tuple[str, str]) -> None:
    Registry.wrong = other = "sha256:" + hashlib.sha256(b"other").hexdigest()
    with pytest.raises(BaseMismatch):
        engine.pull(caps, registry[0], other)


def test_a_registry_that_does_not_answer(caps: Capabilities) -> None:
    digest = "sha256:" + hashlib.sha256(b"any").hexdigest()
    with pytest.raises(Unreachable, match="localhost:1 ") as caught:
        engine.pull(caps, "localhost:1/team/base", digest)
    assert "proxy" in caught.value.hint
    assert "registries.conf" in caught.value.hint
