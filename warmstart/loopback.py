"""A package index on this machine's loopback address, with the vendors' paths and their answers for what they lack."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from warmstart.offers import Address
from warmstart.standins import Made

HOST = "127.0.0.1"


class Served(msgspec.Struct, frozen=True):
    """Indexes that answer on this machine."""

    hosts: dict[str, str]  # scheme and host of the real one → the same here
    refused: list[str]  # addresses, in the vendors' words, that were asked for and are not there

    def address(self, real: str) -> str:
        """An index's address with scheme, host and port replaced, its path kept; empty where no such host is known."""
        here = self.hosts.get(_origin(real), "")
        return here + real.removeprefix(_origin(real)) if here else ""


@contextlib.contextmanager
def serve(indexes: Sequence[Address], made: Sequence[Made]) -> Iterator[Served]:
    """Serve stand-ins in the indexes that they belong to, each host of them on a port of its own, while in use.

    Their form: PEP 503, with PEP 658 for metadata.
    """
    refused: list[str] = []
    hosts: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for origin in sorted({_origin(index.address) for index in indexes}):
            mine = [index for index in indexes if _origin(index.address) == origin]
            pages: dict[str, str | Path] = {}
            for index in mine:
                offered = [m for m in made if m.index == index.address]
                pages |= _pages(urlsplit(index.address).path.rstrip("/"), offered)
            handler = partial(_Handler, pages, mine[0].absent, origin, refused)
            server = _Server((HOST, 0), handler)
            stack.callback(server.server_close)
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            stack.callback(server.shutdown)
            hosts[origin] = f"http://{HOST}:{server.server_port}"
        yield Served(hosts, refused)


def _pages(base: str, made: Sequence[Made]) -> dict[str, str | Path]:
    """What an index answers: path → a page's text, or the file."""
    found: dict[str, str | Path] = {}
    for name in sorted({m.name for m in made}):
        links = []
        for one in (m for m in made if m.name == name):
            file = Path(one.path).name
            # Files that aren't wheels have no metadata of their own.
            core = ' data-core-metadata="true" data-dist-info-metadata="true"' if file.endswith(".whl") else ""
            links.append(f'<a href="{quote(file)}#sha256={one.sha256}"{core}>{escape(file)}</a><br>\n')
            found[f"{base}/{name}/{file}"] = Path(one.path)
            found[f"{base}/{name}/{file}.metadata"] = one.metadata
        found[f"{base}/{name}/"] = f"<!DOCTYPE html>\n<title>{escape(name)}</title>\n{''.join(links)}"
    return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no failure of ours."""


class _Handler(BaseHTTPRequestHandler):
    def __init__(
        self, pages: Mapping[str, str | Path], absent: int, origin: str, refused: list[str], *args: Any, **more: Any
    ) -> None:
        self.pages, self.absent, self.origin, self.refused = pages, absent, origin, refused
        super().__init__(*args, **more)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path not in self.pages and f"{path}/" in self.pages:
            self.send_response(301)
            self.send_header("Location", quote(f"{path}/"))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = self.pages.get(path)
        if content is None:
            if not path.endswith(".metadata"):
                self.refused.append(f"{self.origin}{path}")
            self.send_error(self.absent)
            return
        body = content.encode() if isinstance(content, str) else b""
        size = len(body) if isinstance(content, str) else content.stat().st_size
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if path.endswith("/") else "application/octet-stream")
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(content, Path):
            with content.open("rb") as file:
                shutil.copyfileobj(file, self.wfile, 1 << 20)
        else:
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def _origin(address: str) -> str:
    """Scheme and host of an address."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}"
