"""Engine ``deployment``: the app is handed to a running SuperLink, whose nodes are devices, and followed to its end.

The ServerApp runs on the SuperLink's machine, and so all paths are that machine's; a relative one is below the
SuperLink's working folder. This does what ``flwr run``, ``flwr log``, ``flwr list`` and ``flwr stop`` do, with names
that Flower keeps to itself (flwr<1.42 keeps them as they are), because ``flwr run`` ends with 0 when a run failed.
"""

import hashlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest, StreamLogsRequest
from flwr.proto.run_pb2 import RunStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedssl.config.settings import EngineSettings
from fedssl.errors import InputError, RunError
from fedssl.waiting import RUN_FOLDER_MARKER, sanitize_line

APP = Path(__file__).resolve().parents[1]
RECONNECT_TIMEOUT = 120.0  # seconds in which a SuperLink that has gone may come back
POLL_SECONDS = 1.0  # seconds between two attempts
STOP_TIMEOUT = 30.0  # seconds
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
REFUSED = f"{InputError.__module__}.{InputError.__name__}: "  # what stands before the reason in the ServerApp's log


def run_deployment(overrides: Sequence[str], *, engine: EngineSettings) -> None:
    """Submit a run with these words, show its log, and say where its results are.

    Ctrl-C stops the run.

    Raises
    ------
    InputError
        There is no such SuperLink, it refuses the run, or the ServerApp has refused the settings.
    RunError
        The run has failed or was stopped, or the SuperLink has gone.
    """
    with control_api(engine) as control, _http_errors(engine.address):
        fab = build_fab_from_disk(APP)
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {})),
            override_config=user_config_to_proto({"overrides": shlex.join(overrides)}),
        )
        run_id = control.StartRun(request).run_id
        print(f"run {run_id} of the SuperLink {engine.address}", flush=True)
        run = _Run(control, run_id, engine=engine)
        try:
            status = run.follow()
        except KeyboardInterrupt:
            run.stop()
            raise
    if run.folder:
        print(_run_folder_message(run.folder, engine), flush=True)
    _raise_on_failure(status, run)


class _Run:
    """A run of a SuperLink.

    Attributes
    ----------
    folder : str
        Its folder on the SuperLink's machine; empty as long as it has none.
    rejection : str
        Why the ServerApp has refused the settings; empty if it has not.
    """

    def __init__(self, control: ControlHttpClient, id: int, *, engine: EngineSettings) -> None:
        self._control, self.id, self._engine = control, id, engine
        self.folder = self.rejection = self._line = ""
        self._shown = 0.0

    def follow(self) -> RunStatus:
        """Show the log until the run has ended; returns how it ended.

        A SuperLink that does not answer is tried again, for it may have been started anew.
        """
        answered = time.monotonic()
        while True:
            try:
                for part in self._control.StreamLogs(StreamLogsRequest(run_id=self.id, after_timestamp=self._shown)):
                    self._show(part.log_output)
                    self._shown = part.latest_timestamp
                status = self.status()
                answered = time.monotonic()
            except httpx.TransportError as error:
                if time.monotonic() - answered > RECONNECT_TIMEOUT:
                    raise RunError(
                        f"the SuperLink has not answered for {RECONNECT_TIMEOUT:.0f} s ({error}); once it runs again, "
                        f"look at `flwr list`, and go on with {self.resume_command}"
                    ) from error
            else:
                if status.status == "finished":
                    return status
            time.sleep(POLL_SECONDS)

    def status(self) -> RunStatus:
        """How it is."""
        status: RunStatus = self._control.ListRuns(ListRunsRequest(run_id=self.id)).run_dict[self.id].status
        return status

    def stop(self) -> None:
        """Stop it, and wait until it has stopped."""
        print(f"stopping run {self.id}", flush=True)
        with suppress(httpx.HTTPError):  # it has ended already, or the SuperLink has gone
            self._control.StopRun(StopRunRequest(run_id=self.id))
            last = time.monotonic() + STOP_TIMEOUT
            while self.status().status != "finished" and time.monotonic() < last:
                time.sleep(POLL_SECONDS)

    def _show(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if not self.folder and RUN_FOLDER_MARKER in line:
                self.folder = line.rpartition(RUN_FOLDER_MARKER)[2].strip()
            if line.startswith(REFUSED):
                self.rejection = line.removeprefix(REFUSED)

    @property
    def resume_command(self) -> str:
        """The command that goes on with it."""
        address, certificates = self._engine.address, self._engine.root_certificates
        trusted = f" engine.root_certificates={certificates}" if certificates else ""
        return f"fedssl engine=deployment engine.address={address}{trusted} resume={self.folder or 'FOLDER'}"


def _raise_on_failure(status: RunStatus, run: _Run) -> None:
    """Raise what the run ended with; nothing if it has finished."""
    if status.sub_status == "completed":
        return
    if run.rejection:
        raise InputError(run.rejection)
    reason = sanitize_line(status.details, max_chars=1000) or "no reason was given"
    how = "was stopped" if status.sub_status == "stopped" else f"has failed: {reason.rstrip('.')}"
    raise RunError(f"run {run.id} {how}; go on with {run.resume_command}")


def _run_folder_message(folder: str, engine: EngineSettings) -> str:
    """A line for people: where the run folder is."""
    with suppress(OSError):  # it belongs to another user
        if (Path(folder) / "config.yaml").is_file():
            return f"the run folder is {folder}"
    return f"the run folder is {folder} on the machine of the SuperLink {engine.address}; copy it from there"


@contextmanager
def control_api(engine: EngineSettings) -> Iterator[ControlHttpClient]:
    """The SuperLink's Control API."""
    address, certificates = str(engine.address), engine.root_certificates
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise InputError(f"engine.address={address} is no address of a SuperLink; set it to HOST:PORT")
    if certificates is None and host not in LOOPBACK:
        raise InputError(
            f"engine.address={address} is another machine, and without TLS anybody between could run code on all "
            "devices; name the certificate of its authority with engine.root_certificates=FILE"
        )
    if not (APP / "pyproject.toml").is_file():
        raise InputError(
            "engine=deployment submits the app from a clone of its repository, which this installation is not; install "
            "fedssl from a clone with pip install -e"
        )
    try:
        root = None if certificates is None else Path(certificates).read_bytes()
        control = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=certificates is None,
            root_certificates=root,
            interceptors=[CliClientHttpInterceptor(), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )
    except (OSError, ValueError) as error:  # of ssl: OSError
        raise InputError(
            f"engine.root_certificates={certificates} cannot be used ({error}); name the file ca.crt of deploy/keys.py"
        ) from error
    try:
        yield control
    finally:
        control.close()


@contextmanager
def _http_errors(address: str | None) -> Iterator[None]:
    """What goes wrong on the way to the SuperLink, as one sentence."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        known = FlowerError.from_json(error.response.text)
        said = known.message if known else f"status {error.response.status_code}"
        raise InputError(
            f"the SuperLink at engine.address={address} refuses the run ({said}); set engine.address to the "
            "SuperLink's own port, not to that of the devices"
        ) from error
    except httpx.TransportError as error:
        raise InputError(
            f"no SuperLink answers at engine.address={address} ({error}); start it, or set engine.address to where it "
            "is, and engine.root_certificates if it has TLS"
        ) from error
