"""A fleet on this machine, started as ``deploy/`` says: SuperLink, proxy in front of it, SuperNodes with node keys.

Commands are those of the systemd units, with other folders and free ports, and what the proxy lets through is what
``deploy/nginx.conf`` says: nginx itself reads it where it is installed, else `tests.fleet_proxy` obeys its locations.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

from flwr.proto.control_pb2 import ListNodesRequest

from fedssl.config.settings import EngineSettings
from fedssl.fleet.control import control_api
from simulation.sandbox import ProcessSandbox, process_sandbox
from tests.fleet_proxy import handler
from tests.flower import ENVIRONMENT, free_port

REPOSITORY = Path(__file__).resolve().parents[1]
DEPLOY = REPOSITORY / "deploy"
INSTALLATION = Path(sys.executable).parents[1]
TORCH = 300 * 2**20  # bytes that a process with torch has at least
PATIENCE = 300.0  # seconds: a busy machine only takes longer


@dataclass
class Fleet:
    """What runs, and how to reach it."""

    sandbox: ProcessSandbox
    port: int
    public: int
    nodes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    superlink: subprocess.Popen[str] | None = None
    app: Path = REPOSITORY  # whose code `submit` sends

    @property
    def keys(self) -> Path:
        return self.sandbox.path / "keys"

    @property
    def engine(self) -> list[str]:
        """The words that name this fleet."""
        address = f"engine.address=127.0.0.1:{self.port}"
        return ["engine=deployment", address, f"engine.root_certificates={self.keys / 'ca.crt'}"]

    def start_superlink(self) -> None:
        port, self.ports["superlink"] = str(self.port), self.port
        command = [
            port if word == "8000" else word for word in self._unit("fedssl-superlink.service", self.sandbox.work)
        ]
        self.superlink = self._start(command, "superlink")
        until(lambda: listens(self.port), "the SuperLink listens", self.superlink)

    def start_node(
        self,
        name: str,
        *,
        port: int | None = None,
        key: str | None = None,
        environment: Mapping[str, str] | None = None,
        installation: Path = INSTALLATION,
        prefix: Sequence[str] = (),
        **config: object,
    ) -> None:
        """Start the SuperNode of a device, with the programs of an installation; its configuration has - for _.

        ``prefix`` is the start of a command that runs the rest of it, such as ``taskset -c 0``.
        """
        quoted = {key.replace("_", "-"): v if isinstance(v, int) else f'"{v}"' for key, v in config.items()}
        said = " ".join(f"{key}={value}" for key, value in quoted.items())
        own = self.sandbox.path / name
        own.mkdir(exist_ok=True)
        values = {"${SUPERLINK}": f"127.0.0.1:{port or self.public}", "${NODE_CONFIG}": said}
        values[str(self.keys / "node.key")] = str(self.keys / "nodes" / f"{key or name}.key")
        unit = self._unit("fedssl-supernode.service", own, installation=installation)
        command = [*(values.get(word, word) for word in unit), "--port", str(free_port())]
        self.ports[name] = int(command[-1])
        allocator = _environment("fedssl-supernode.service", "MALLOC_")
        self.nodes[name] = self._start(
            [*prefix, *command], name, {**allocator, **(environment or {})}, installation=installation
        )

    def register(self, *names: str) -> None:
        """Register the public keys of nodes under their names."""
        for name in names:
            self.operator("add", name, str(self.keys / "nodes" / f"{name}.pub"))

    def operator(self, *arguments: str) -> str:
        """Return the output of ``fedssl-fleet``, the operator's command."""
        code = "import sys; from fedssl.fleet.cli import main; sys.exit(main())"
        superlink = ["--address", f"127.0.0.1:{self.port}", "--certificates", str(self.keys / "ca.crt")]
        process = self._start([sys.executable, "-c", code, *arguments, *superlink], None)
        output = process.communicate()[0]
        assert process.returncode == 0, output
        return output

    def flwr(self, *overrides: str) -> str:
        """What Flower's command line says; its connection ``fleet`` is the SuperLink."""
        (self.sandbox.home / "config.toml").write_text(
            f'[superlink.fleet]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{self.keys / "ca.crt"}"\n'
        )
        process = self._start([program("flwr"), *overrides], None)
        said = process.communicate()[0]
        assert process.returncode == 0, said
        return said

    def submit(self, *overrides: str) -> subprocess.Popen[str]:
        """``fedssl engine=deployment WORDS``; its output is a pipe."""
        return self._start(
            [sys.executable, "-c", "from fedssl.command_line import fedssl; fedssl()", *self.engine, *overrides], None
        )

    def run(self, *overrides: str) -> tuple[int, str]:
        """The same to its end: exit status and all that it said."""
        process = self.submit(*overrides)
        said = process.communicate()[0]
        return process.returncode, said

    def online(self) -> int:
        """How many SuperNodes the SuperLink counts as there."""
        address, roots = f"127.0.0.1:{self.port}", str(self.keys / "ca.crt")
        port = EngineSettings(name="deployment", address=address, root_certificates=roots)
        with control_api(port) as control:
            return sum(node.status == "online" for node in control.ListNodes(ListNodesRequest()).nodes_info)

    def working(self, owner: str) -> list[int]:
        """Ids of processes that have imported torch: the ServerApp of a SuperLink, the resident process of a SuperNode.

        A ServerApp that stops earlier has no task yet, and Flower starts another.
        """
        found = []
        for pid in self._of(owner):
            with suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                if pages * os.sysconf("SC_PAGE_SIZE") > TORCH:
                    found.append(pid)
        return found

    def kill(self, owner: str) -> None:
        """SIGKILL a SuperLink or SuperNode and all that it has started, as systemd does with a unit that has died."""
        process = self.superlink if owner == "superlink" else self.nodes[owner]
        process.kill()
        process.wait()
        while left := self._of(owner):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _of(self, owner: str) -> list[int]:
        """Processes that work for a SuperLink or SuperNode: they know its address, and have sessions of their own.

        Resident processes of devices know the id of a process that does.
        """
        address = b"\0".join([b"--runtime-api-address", f"127.0.0.1:{self.ports[owner]}".encode(), b""])
        commands = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                commands[int(entry.name)] = (entry / "cmdline").read_bytes()
        found = {pid for pid, command in commands.items() if address in command}
        owned = tuple(f"/fedssl-{os.getuid()}/{pid}-".encode() for pid in found)
        residents = {pid: command for pid, command in commands.items() if b"client_app.resident_process" in command}
        resident = {pid for pid, command in residents.items() if any(folder in command for folder in owned)}
        return sorted(found | resident)

    def wait_for_nodes(self, number: int) -> None:
        until(lambda: self.online() == number, f"{number} SuperNodes are there", self.superlink)

    def log(self, name: str) -> str:
        return (self.sandbox.path / f"{name}.log").read_text()

    def _unit(self, name: str, folder: Path, *, installation: Path = INSTALLATION) -> list[str]:
        """The command of a systemd unit, with the folders of this fleet."""
        text = (DEPLOY / "systemd" / name).read_text().replace("\\\n", " ")
        [line] = re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)
        places = {"/opt/fedssl/.venv": str(installation), "/etc/fedssl": str(self.keys), "/var/lib/fedssl": str(folder)}
        words = shlex.split(line)
        for installed, used in places.items():
            words = [word.replace(installed, used) for word in words]
        return words

    def _start(
        self,
        command: list[str],
        log: str | None,
        more: Mapping[str, str] | None = None,
        *,
        installation: Path = INSTALLATION,
    ) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PATH": f"{installation / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.sandbox.home),
            "OMP_NUM_THREADS": "1",
            **(more or {}),
        }
        if log is None:
            environment["PYTHONPATH"] = str(self.app)
            return self.sandbox.start(command, environment=environment, stdout=subprocess.PIPE)
        if installation != INSTALLATION:
            environment.pop("PYTHONPATH", None)
        with (self.sandbox.path / f"{log}.log").open("a") as file:
            return self.sandbox.start(command, environment=environment, stdout=file)


def _environment(unit: str, prefix: str) -> dict[str, str]:
    """The variables with a prefix that a systemd unit sets."""
    lines = re.findall(r"^Environment=(.*)$", (DEPLOY / "systemd" / unit).read_text(), flags=re.MULTILINE)
    found = dict(word.split("=", 1) for line in lines for word in shlex.split(line))
    return {name: value for name, value in found.items() if name.startswith(prefix)}


@contextmanager
def fleet(*names: str) -> Iterator[Fleet]:
    """A SuperLink and the proxy in front of it, and keys of nodes with these names, which are registered."""
    with process_sandbox() as sandbox:
        one = Fleet(sandbox, free_port(), free_port())
        subprocess.run(
            [sys.executable, DEPLOY / "keys.py", one.keys, "--server", "127.0.0.1", "--nodes", *names, "stranger"],
            check=True,
            capture_output=True,
        )
        one.start_superlink()
        with proxy(one):
            one.register(*names)
            yield one


@contextmanager
def proxy(one: Fleet) -> Iterator[None]:
    """nginx with ``deploy/nginx.conf``, or what stands for it, on the public port of the fleet."""
    text = (DEPLOY / "nginx.conf").read_text().replace("/etc/fedssl", str(one.keys))
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{one.port}")
    text = text.replace("listen 443", f"listen 127.0.0.1:{one.public}").replace("listen [::]:443", "# without IPv6:")
    if shutil.which("nginx"):
        with nginx(text, one):
            yield
        return
    server = ThreadingHTTPServer(("127.0.0.1", one.public), handler(text, one.keys / "ca.crt"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(one.keys / "server.crt", one.keys / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def nginx(site: str, one: Fleet) -> Iterator[None]:
    folder = one.sandbox.path / "nginx"
    folder.mkdir()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    kept = "".join(f"{kind}_temp_path {folder};" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {kept} {site} }}"
    )
    process = one._start(["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)], "nginx")
    until(lambda: listens(one.public), "nginx listens", process)
    yield


def slow_device(folder: Path) -> dict[str, str]:
    """Return the environment of a device that pauses before each message, so that endless runs leave cores to others.

    Python reads sitecustomize.py in ``folder`` at its start.
    """
    pause = "import sys, time\nif any(word.endswith('flwr-clientapp') for word in sys.orig_argv): time.sleep(3)\n"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(pause)
    return {"PYTHONPATH": str(folder)}


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(true: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None) -> None:
    """Wait until it is true; fails if the process has ended, or after `PATIENCE` seconds."""
    last = time.monotonic() + PATIENCE
    while not true():
        assert process is None or process.poll() is None, f"{what}: the process has ended"
        assert time.monotonic() < last, f"{what}: not within {PATIENCE:.0f} s"
        time.sleep(0.2)
