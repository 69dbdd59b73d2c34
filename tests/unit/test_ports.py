"""Who listens on a port, from a made /proc/net/tcp and the sockets of made processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit import proctree
from warmstart import ports, preflight
from warmstart.errors import PortTaken
from warmstart.presets import Preset

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def listen(
    root: Path,
    port: int,
    *,
    address: str = "0100007F",
    state: str = "0A",
    uid: int = 0,
    inode: int = 777,
    table: str = "tcp",
) -> None:
    folder = root / "proc/net"
    folder.mkdir(parents=True, exist_ok=True)
    row = (
        f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {uid:5} 0 {inode} 1\n"
    )
    file = folder / table
    file.write_text((file.read_text() if file.exists() else HEAD) + row)


def own(root: Path, pid: int, inode: int = 777, **facts: str) -> None:
    folder = proctree.add(root, pid, **facts)  # type: ignore[arg-type]
    (folder / "fd").mkdir()
    (folder / "fd" / "3").symlink_to(f"socket:[{inode}]")


def test_free(tmp_path: Path) -> None:
    assert ports.listener(8000, tmp_path) == ""
    listen(tmp_path, 8001)
    listen(tmp_path, 8000, state="01")  # a connection, not a server
    listen(tmp_path, 8000, address="0501A8C0")  # on another address of this machine
    assert ports.listener(8000, tmp_path) == ""


@pytest.mark.parametrize(
    ("table", "address"),
    [("tcp", "0100007F"), ("tcp", "00000000"), ("tcp6", "0" * 32), ("tcp6", "0" * 24 + "01000000")],
)
def test_on_whatever_address(tmp_path: Path, table: str, address: str) -> None:
    listen(tmp_path, 8000, table=table, address=address)
    own(tmp_path, 42, name="llama-server")
    assert ports.listener(8000, tmp_path) == "llama-server (pid 42)"


def test_by_service_and_by_container(tmp_path: Path) -> None:
    listen(tmp_path, 8000)
    own(tmp_path, 42, name="ollama", group="/system.slice/ollama.service")
    assert ports.listener(8000, tmp_path) == "the service ollama.service (ollama, pid 42)"
    listen(tmp_path, 8001, inode=778)
    own(tmp_path, 43, 778, name="vllm", group=f"/machine.slice/libpod-{'ab' * 32}.scope/container")
    assert ports.listener(8001, tmp_path) == "vllm in the container abababababab (pid 43)"
    listen(tmp_path, 8002, inode=779)
    own(tmp_path, 44, 779, name="conmon", command="/usr/bin/conmon -c 12 -n open-webui -r /usr/bin/crun")
    assert ports.listener(8002, tmp_path) == "the container open-webui"


def test_another_user_s(tmp_path: Path) -> None:
    listen(tmp_path, 8000, uid=0)
    assert ports.listener(8000, tmp_path) == "a process of the user root"
    listen(tmp_path, 8001, uid=987654)
    assert ports.listener(8001, tmp_path) == "a process of the user 987654"


def test_up_refuses_and_names_it(tmp_path: Path) -> None:
    listen(tmp_path, 8000)
    own(tmp_path, 42, name="llama-server")
    with pytest.raises(PortTaken, match=r"port 8000 is taken by llama-server \(pid 42\)") as taken:
        preflight.port_free(Preset("p", port=8000), (), tmp_path)
    assert "--set port=8001" in taken.value.hint
    preflight.port_free(Preset("p", port=8002), (), tmp_path)
