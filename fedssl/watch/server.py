"""The server of the live view: three resources below a secret key, which are read and never written.

The key in the address keeps out other users of the machine, and pages of other sites that reach this server under a
name of their own (DNS rebinding). All addresses in the page are relative, so that a proxy may add a prefix.
"""

import gzip
import hmac
import json
import secrets
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedssl.errors import InputError
from fedssl.pages import render
from fedssl.watch.watcher import Watcher

PORT = 8765  # by default; the next free one if another process uses it
_PORTS = 20
_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
_MIN_COMPRESSED = 1000  # bytes


class WatchServer(ThreadingHTTPServer):
    """The server of a `Watcher` at ``host`` and the given port, or at the first free one from `PORT` on."""

    daemon_threads = True

    def __init__(self, watcher: Watcher, *, host: str = "127.0.0.1", port: int | None = None) -> None:
        self.watcher, self.key = watcher, secrets.token_urlsafe(16)
        self.page = render("watch/page.html.j2", polls=True)
        ports = range(PORT, PORT + _PORTS) if port is None else (port,)
        for candidate in ports:
            try:
                super().__init__((host, candidate), _Handler)
                return
            except OSError as error:
                problem = error
        shown = f"port={port}" if port is not None else f"port={ports[0]} to {ports[-1]}"
        raise InputError(
            f"host={host} {shown} cannot be used ({problem.strerror}); choose another port, or port=0 for any free one"
        ) from problem

    @property
    def path(self) -> str:
        return f"/{self.key}/"

    def respond(self, path: str) -> tuple[HTTPStatus, str, str]:
        """Return status, type and content, or the new place, of a path with its query."""
        parts = urlsplit(path)
        *_, key, name = ["", *parts.path.split("/")]
        if hmac.compare_digest(name.encode(), self.key.encode()):
            return HTTPStatus.FOUND, _TEXT, f"{name}/"  # the slash is missing, which relative addresses need
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            return HTTPStatus.NOT_FOUND, _TEXT, "Open the address that fedssl-watch printed, with its key.\n"
        if name == "":
            return HTTPStatus.OK, _HTML, self.page
        if name == "runs.json":
            return HTTPStatus.OK, _JSON, json.dumps(self.watcher.overview(), allow_nan=False)
        if name == "run.json":
            (run_id,) = parse_qs(parts.query).get("id", [""])[:1]
            return HTTPStatus.OK, _JSON, json.dumps(self.watcher.details(run_id), allow_nan=False)
        return HTTPStatus.NOT_FOUND, _TEXT, "There is nothing here.\n"


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests; others are refused by the base class."""

    server: WatchServer
    timeout = 30  # seconds for a request
    server_version, sys_version = "fedssl-watch", ""

    def do_GET(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the browser has gone
            status, kind, text = self.server.respond(self.path)
            self._send(status, kind, text.encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        if len(content) > _MIN_COMPRESSED and "gzip" in self.headers.get("Accept-Encoding", ""):
            content = gzip.compress(content, compresslevel=5)
            self.send_header("Content-Encoding", "gzip")
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
        if status == HTTPStatus.FOUND:
            headers["Location"] = content.decode()
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses have the key."""
