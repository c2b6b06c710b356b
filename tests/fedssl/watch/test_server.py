"""The server: its key, its resources, its methods, and the command until Ctrl-C."""

import gzip
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import HTTPServer
from pathlib import Path

import pytest

from fedssl.errors import InputError
from fedssl.watch.cli import WatchServer, parse_arguments
from fedssl.watch.watcher import Watcher
from tests.fedssl.report.test_html_page import HOSTILE, Elements, job


@contextmanager
def serving(folder: Path) -> Iterator[WatchServer]:
    """Serve the runs of a folder in a thread."""
    with WatchServer(Watcher([folder]), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    job(tmp_path / "runs" / HOSTILE.replace("/", ""), f"strategy={HOSTILE}")
    (tmp_path / "secret").write_text("secret")
    with serving(tmp_path / "runs") as server:
        yield server


def get(server: WatchServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    response = connection.getresponse()
    return response.status, dict(response.headers), response.read()


def test_page_and_values_are_served_below_key_and_prefix(server: WatchServer):
    for prefix in ("", "/user/me/proxy/absolute/8765"):
        status, headers, content = get(server, prefix + server.path)
        assert status == 200
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        elements = Elements(content.decode())
        links = [value for _, attributes in elements.found for key in ("src", "href") if (value := attributes.get(key))]
        assert links == []  # the script requests relative addresses
        assert b"connect-src 'self'" in content
        (run,) = json.loads(get(server, prefix + server.path + "runs.json")[2])["runs"]
        assert run["results"] == {"knn": 50}
        details = json.loads(get(server, f"{prefix}{server.path}run.json?id={run['id']}")[2])
        assert details["name"] == run["name"]


def test_an_address_without_its_last_slash_is_completed(server: WatchServer):
    status, headers, _ = get(server, f"/proxy/8765{server.path}".rstrip("/"))
    assert (status, headers["Location"]) == (302, f"{server.key}/")  # relative to /proxy/8765/


def test_nothing_else_is_served(server: WatchServer, tmp_path: Path):
    runs = f"{server.path}runs.json"
    assert get(server, f"{server.path}run.json?id=../secret")[2] == b"null"
    assert get(server, f"{server.path}run.json")[2] == b"null"
    cut = runs.replace(server.key, server.key[:-1])
    for path in ("/", "/runs.json", "//", "/x/runs.json", cut, f"{runs}x", f"{runs}/"):
        assert get(server, path)[0] == 404, path
    for path in ("../secret", "%2e%2e/secret", "..%2fsecret", f"../../../../..{tmp_path}/secret", "page.js", "%ff"):
        status, _, content = get(server, server.path + path)
        assert (status, b"secret" in content) == (404, False), path
    for method in ("POST", "PUT", "DELETE"):
        assert get(server, runs, method=method)[0] == 501


def test_values_are_compressed_for_browsers_that_accept_it(server: WatchServer):
    plain, packed = (get(server, server.path, Accept_Encoding=coding) for coding in ("identity", "gzip, br"))
    assert gzip.decompress(packed[2]) == plain[2]
    assert len(packed[2]) < len(plain[2]) / 2


def test_a_folder_without_write_access_is_watched(server: WatchServer, tmp_path: Path):
    (folder,) = (tmp_path / "runs").iterdir()
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert json.loads(get(server, f"{server.path}runs.json")[2])["runs"][0]["state"] == "finished"
    folder.chmod(stat.S_IRWXU)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_an_occupied_port_is_refused_or_followed_by_the_next(server: WatchServer, monkeypatch: pytest.MonkeyPatch):
    port = server.server_address[1]
    with pytest.raises(InputError, match=f"port={port} cannot be used .*; choose another port, or port=0"):
        WatchServer(server.watcher, port=port)
    monkeypatch.setattr("fedssl.watch.cli.PORT", port)
    with WatchServer(server.watcher) as other:
        assert port < other.server_address[1] < port + 20
        assert other.key != server.key


def test_an_address_of_another_machine_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried, bind = [], HTTPServer.server_bind
    monkeypatch.setattr(HTTPServer, "server_bind", lambda server: tried.append(server) or bind(server))
    with pytest.raises(InputError, match="host=192.0.2.1 port=.* or an IPv4 address of this machine as host"):
        WatchServer(Watcher([tmp_path]), host="192.0.2.1")
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prot=1"], "prot= is no setting of fedssl-watch; did you mean port"),
        (["port=x"], "port=x must be a number from 0 to 65535"),
        (["port=70000"], "port=70000 must be"),
        (["host="], "host= is empty; give an address of this machine"),
        (["--port", "1"], "--port is no option of fedssl-watch; use port=NUMBER"),
        ([__file__], "is no folder; give folders of runs"),
    ],
)
def test_bad_arguments_are_refused(words: list[str], message: str):
    with pytest.raises(InputError, match=message):
        parse_arguments(words)


def test_arguments_are_folders_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("port=1").mkdir()
    assert parse_arguments([]) == ([Path("runs"), Path("multirun")], "127.0.0.1", None)
    assert parse_arguments(["port=1", "later", "port=0"]) == ([Path("port=1"), Path("later")], "127.0.0.1", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(tmp_path: Path, number: int):
    code = "from fedssl.command_line import fedssl_watch as main; main()"
    command = [sys.executable, "-c", code, str(tmp_path / "later"), "port=0"]
    environment = {**os.environ, "SSH_CONNECTION": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        shown = [process.stdout.readline() for _ in range(4)]
        process.send_signal(number)
        rest, errors = process.communicate(timeout=20)
    assert f"watching {tmp_path / 'later'}: http://127.0.0.1:" in shown[0]
    assert "which does not exist yet" in shown[1]
    assert "ssh -N -L " in shown[2]
    assert (process.returncode, errors) == (0, "")
    assert "has ended; runs go on" in rest
