"""Keys of a fleet, a server with its certificate, a proxy in front of it, and calls of the commands."""

import os
import select
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedssl.fleet import cli, device_cli
from tests.devices import write_images
from tests.fleet import DEPLOY


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    """The folder of ``deploy/keys.py`` for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("fleet") / "keys"
    command = [sys.executable, DEPLOY / "keys.py", folder, "--server", "127.0.0.1", "--nodes", "garden"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("device") / "images", 3)


@pytest.fixture(scope="session")
def server(keys):
    """The address of a server that answers each request with 404, as nginx and the SuperLink do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")
    http = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    http.socket = context.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
    with serving(http):
        yield f"127.0.0.1:{http.server_address[1]}"


@contextmanager
def serving(http):
    """Run a server in a thread."""
    threading.Thread(target=http.serve_forever, args=[0.05], daemon=True).start()
    try:
        yield
    finally:
        http.shutdown()
        http.server_close()


class Answer(BaseHTTPRequestHandler):
    status = 404

    def do_POST(self):
        self.send_error(self.status)

    def log_message(self, *arguments):
        """Nothing is logged."""


class Proxy(ThreadingHTTPServer):
    """A proxy for CONNECT, which rejects other requests with 502 and, with a ``status``, all of them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Connect)
        self.connected, self.status = [], None
        self.address = f"127.0.0.1:{self.server_address[1]}"


class _Connect(BaseHTTPRequestHandler):
    def do_CONNECT(self):
        self.server.connected.append(self.path)
        if self.server.status is not None:
            self.send_error(self.server.status)
            return
        host, _, port = self.path.rpartition(":")
        with closing(socket.create_connection((host, int(port)))) as target:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: target, target: self.connection}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    content = end.recv(2**16)
                    if not content:
                        return
                    ends[end].sendall(content)

    def do_POST(self):
        self.server.connected.append(self.path)
        self.send_error(502)

    def log_message(self, *arguments):
        """Nothing is logged."""


@pytest.fixture
def environment(monkeypatch):
    """An environment without proxies."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def proxy(environment):
    one = Proxy()
    with serving(one):
        yield one


@pytest.fixture
def device(monkeypatch, capsys):
    """Return a function that calls ``fedssl-device``; it returns status and output."""
    return _caller("fedssl-device", device_cli.main, monkeypatch, capsys)


@pytest.fixture
def operator(monkeypatch, capsys):
    """The same for ``fedssl-fleet``."""
    return _caller("fedssl-fleet", cli.main, monkeypatch, capsys)


def _caller(program, main, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", [program, *map(str, arguments)])
        status = main()
        return status, "".join(capsys.readouterr())

    return call
