"""The command ``fedssl-watch``: a live view of runs and sweeps in the browser.

    fedssl-watch [DIR...] [port=8765] [host=127.0.0.1]

It reads the folders and writes nothing. It may start before the runs do. Only this machine can open the page, unless
``host=`` is another address. Ctrl-C ends it, and no run.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from fedssl.command_line import run_command
from fedssl.config.literal import user_path
from fedssl.config.overrides import did_you_mean
from fedssl.errors import InputError
from fedssl.runs.catalog import DEFAULT_FOLDERS
from fedssl.safe_io import sanitize
from fedssl.watch.server import WatchServer
from fedssl.watch.watcher import Watcher

USAGE = (
    "usage: fedssl-watch [DIR...] [port=8765] [host=127.0.0.1]\n"
    "       shows runs and sweeps in the browser while they run; DIR is a run folder or contains some\n"
    "       (default: runs and multirun); port=0 takes any free port"
)


def main() -> int:
    """Entry point; returns the exit status, see `run_command`."""
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
    return folders, values.get("host", "127.0.0.1"), None if port is None else int(port)


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
