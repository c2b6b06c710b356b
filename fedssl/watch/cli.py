"""The command ``fedssl-watch``: a live view of runs and sweeps in the browser.

    fedssl-watch [DIR...] [port=8765] [host=127.0.0.1]

It reads the folders and writes nothing. It may start before the runs do. Only this machine can open the page, unless
``host=`` is another address. Ctrl-C ends it, and no run.

The server has three resources below a secret key, which are read and never written. The key in the address keeps out
other users of the machine, and pages of other sites that reach this server under a name of their own (DNS rebinding).
All addresses in the page are relative, so that a proxy may add a prefix.
"""

import errno
import gzip
import hmac
import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fedssl.command_line import run_command
from fedssl.config.literal import user_path
from fedssl.config.overrides import did_you_mean
from fedssl.errors import InputError, sanitize
from fedssl.pages import render
from fedssl.runs.catalog import DEFAULT_FOLDERS
from fedssl.watch.watcher import Watcher

USAGE = (
    "usage: fedssl-watch [DIR...] [port=8765] [host=127.0.0.1]\n"
    "       shows runs and sweeps in the browser while they run; DIR is a run folder or contains some\n"
    "       (default: runs and multirun); port=0 takes any free port"
)
PORT = 8765  # by default; the next free one if another process uses it
_PORTS = 20
_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
_MIN_COMPRESSED = 1000  # bytes


class WatchServer(ThreadingHTTPServer):
    """The server of a `Watcher` at ``host`` and the given port, or at the first free one from `PORT` on."""

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
                if error.errno != errno.EADDRINUSE:
                    break
        shown = f"port={port}" if port is not None else f"port={ports[0]} to {ports[-1]}"
        raise InputError(
            f"host={host} {shown} cannot be used ({problem.strerror}); choose another port, or port=0 for any free "
            "one, or an IPv4 address of this machine as host"
        ) from problem

    @property
    def path(self) -> str:
        return f"/{self.key}/"

    def respond(self, path: str) -> tuple[HTTPStatus, str, str]:
        """Return status, type and content, or the new place, of a path with its query."""
        path, _, query = path.partition("?")
        *_, key, name = ["", *path.split("/")]
        if hmac.compare_digest(name.encode(), self.key.encode()):
            return HTTPStatus.FOUND, _TEXT, f"{name}/"  # the slash is missing, which relative addresses need
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            return HTTPStatus.NOT_FOUND, _TEXT, "Open the address that fedssl-watch printed, with its key.\n"
        if name == "":
            return HTTPStatus.OK, _HTML, self.page
        if name == "runs.json":
            return HTTPStatus.OK, _JSON, json.dumps(self.watcher.overview(), allow_nan=False)
        if name == "run.json":
            (run_id,) = parse_qs(query).get("id", [""])[:1]
            return HTTPStatus.OK, _JSON, json.dumps(self.watcher.details(run_id), allow_nan=False)
        return HTTPStatus.NOT_FOUND, _TEXT, "There is nothing here.\n"


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE)
        return 0
    return run_command("fedssl-watch", lambda: watch(sys.argv[1:]))


def watch(arguments: Sequence[str]) -> None:
    """Serve the live view until Ctrl-C."""
    folders, host, port = parse_arguments(arguments)
    with WatchServer(Watcher(folders), host=host, port=port) as server:
        try:
            for line in introduction(server, folders):
                print(sanitize(line), flush=True)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nfedssl-watch has ended; runs go on")


def parse_arguments(arguments: Sequence[str]) -> tuple[list[Path], str, int | None]:
    """Return the folders, the host and the port, None if it is not given; an argument that exists is a folder."""
    settings = [word for word in arguments if "=" in word and not user_path(word).exists()]
    folders = [user_path(word) for word in arguments if word not in settings] or list(DEFAULT_FOLDERS)
    values = dict(word.partition("=")[::2] for word in settings)
    known = ("port", "host")
    for key in values.keys() - set(known):
        raise InputError(f"{key}= is no setting of fedssl-watch{did_you_mean(key, known)}; use port= or host=")
    for folder in folders:
        if str(folder).startswith("-"):
            raise InputError(
                f"{folder} is no option of fedssl-watch; use port=NUMBER, host=ADDRESS, and folders of runs"
            )
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is no folder; give folders of runs or of sweeps, e.g. runs multirun")
    port = values.get("port")
    if port is not None and not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise InputError(f"port={port} must be a number from 0 to 65535, e.g. port=8765")
    host = values.get("host", "127.0.0.1")
    if not host:  # which a socket takes for all addresses
        raise InputError("host= is empty; give an address of this machine, or host=0.0.0.0 for all")
    return folders, host, None if port is None else int(port)


def introduction(server: WatchServer, folders: Sequence[Path]) -> list[str]:
    """Return the lines that state where the page is."""
    host, port = server.server_address[:2]
    name = "127.0.0.1" if host in ("0.0.0.0", "127.0.0.1") else str(host)
    lines = [f"watching {', '.join(map(str, folders))}: http://{name}:{port}{server.path}"]
    lines += [f"waiting for a run in {folder}, which does not exist yet" for folder in folders if not folder.exists()]
    if "SSH_CONNECTION" in os.environ:
        lines.append(
            f"on your own machine: ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}, then this address"
        )
    if "JUPYTERHUB_SERVICE_PREFIX" in os.environ:
        prefix = os.environ["JUPYTERHUB_SERVICE_PREFIX"].rstrip("/")
        lines.append(f"behind Jupyter's proxy: {prefix}/proxy/{port}{server.path}")
    return [*lines, "Ctrl-C ends the view, and no run"]


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
