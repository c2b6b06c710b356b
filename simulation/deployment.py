"""Engine ``deployment``: submits the app to a running SuperLink, whose nodes are edge clients, and follows the run.

The ServerApp runs on the SuperLink's machine, so all paths are of that machine; relative paths start at the SuperLink's
working directory.
"""

import math
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx

from fedssl.config.literal import shell_command
from fedssl.config.overrides import by_key, quote_value
from fedssl.config.settings import EngineSettings, Settings
from fedssl.errors import InputError, RunError
from fedssl.fleet import control_internals
from fedssl.fleet.certificates import issuer_beyond, read_authority
from fedssl.fleet.control import control_api
from fedssl.logs import log
from fedssl.runs.run_report import parse_report
from fedssl.safe_io import MAX_TEXT_BYTES, read_bytes, sanitize_line
from fedssl.wire.device import unmet_requirements

APP = Path(__file__).resolve().parents[1]
RECONNECT_TIMEOUT = 120.0  # seconds in which a SuperLink may restart
POLL_SECONDS = 1.0
START_SECONDS = 60.0  # in which a run should start
STOP_TIMEOUT = 30.0  # seconds
FILES = ("root_certificates", "signing_key", "signing_certificate")  # settings of the engine


def validate(settings: Settings) -> None:
    """Build the run for devices that do not exist, which rejects invalid settings before it is submitted.

    Files of the SuperLink's machine are not read: its images, and a teacher or weights that are not on this machine.
    """
    from fedssl.pretrained.sources import file_of  # slow imports
    from server_app.build import build_components
    from server_app.round import Round
    from simulation.grid import simulated_clients
    from strategies.types import ServerState

    weights = None if settings.model.weights is None else file_of(settings.model.weights)
    if any(file is not None and not file.exists() for file in (settings.teacher, weights)):
        return
    client_ids = {f"device-{number}": number for number in range(settings.num_clients)}
    clients = replace(simulated_clients(settings.num_clients), client_ids=client_ids)
    here = replace(settings, machine=replace(settings.machine, device="cpu"))
    log.disabled = True  # warnings are logged by the run
    try:
        Round(build_components(here, clients, reads_images=False).federation, ServerState())
    finally:
        log.disabled = False


def run_deployment(overrides: Sequence[str], *, engine: EngineSettings) -> Path | None:
    """Submit a run, print its log, and return the run folder; None if it is on another machine. Ctrl-C stops the run.

    Where the results are is printed.
    """
    if not (APP / "pyproject.toml").is_file():
        raise InputError(
            "engine=deployment submits the app from a clone of its repository, which this installation is not; install "
            "fedssl from a clone: uv pip install --editable CLONE"
        )
    unmet = unmet_requirements(APP)
    if unmet:
        raise InputError(f"{unmet}; install them with uv pip install --editable {APP}, and restart the SuperLink")
    _warn_of_signer(engine)
    # Absolute, because the ServerApp has another working directory.
    files = [f"engine.{name}={quote_value(file)}" for name in FILES if (file := getattr(engine, name))]
    overrides = list(by_key([*overrides, *files]).values())
    with control_api(engine) as control:
        run_id = control_internals.start_run(control, APP, overrides=shlex.join(overrides))
        print(f"run {run_id} of the SuperLink {engine.address}", flush=True)
        run = _Run(control, run_id, engine=engine)
        try:
            status = run.follow()
        except KeyboardInterrupt:
            run.stop()
            raise KeyboardInterrupt(f"; continue with: {run.resume_command}" if run.folder else "") from None
    folder = None if run.folder is None else Path(run.folder)
    is_here = folder is not None and _is_run_folder(folder)
    if folder is not None:
        where = "" if is_here else f" on the machine of the SuperLink {engine.address}; copy it from there"
        print(f"the run folder is {folder}{where}", flush=True)
    _raise_on_failure(status, run)
    return folder if is_here else None


def _warn_of_signer(engine: EngineSettings) -> None:
    """Log that devices would refuse the encoder, by the files of the SuperLink's machine, if this is that machine."""
    certificate, authority = engine.signing_certificate, engine.root_certificates
    if certificate is None or authority is None:
        return
    with suppress(OSError, ValueError):  # they are on another machine, or damaged, which the run reports
        signers = read_authority("engine.root_certificates", Path(authority))
        issuer = issuer_beyond(read_bytes(certificate, max_bytes=MAX_TEXT_BYTES), signers)
        if issuer is not None:
            log.warning(
                "%s signed engine.signing_certificate=%s, and engine.root_certificates=%s lacks it: devices refuse the "
                "encoder, unless their kits were created with --certificates of a file that has it, after the root",
                *(sanitize_line(issuer), certificate, authority),
            )


class _Run:
    """A run of a SuperLink, with what its ServerApp has reported."""

    folder: str | None
    error: str | None

    def __init__(self, control: control_internals.ControlHttpClient, id: int, *, engine: EngineSettings) -> None:
        self._control, self.id, self._engine = control, id, engine
        self.folder, self.error, self._line = None, None, ""
        self._shown = 0.0
        self._warn_at = time.monotonic() + START_SECONDS

    def follow(self) -> control_internals.RunStatus:
        """Print the log until the run has ended, and return its status. Reconnect if the SuperLink restarts."""
        lost: float | None = None  # time at which the connection was lost
        while True:
            try:
                status = control_internals.run_status(self._control, self.id)
                if status.status == "pending":
                    self._explain_wait()
                    lost = None
                else:
                    for part in control_internals.stream_logs(self._control, self.id, after=self._shown):
                        self._show(part.log_output)
                        self._shown, lost = part.latest_timestamp, None
                    status, lost = control_internals.run_status(self._control, self.id), None
            except httpx.HTTPError as error:
                if isinstance(error, httpx.HTTPStatusError) and not error.response.is_server_error:
                    raise
                lost = time.monotonic() if lost is None else lost
                if time.monotonic() - lost > RECONNECT_TIMEOUT:
                    raise RunError(
                        f"the SuperLink has not answered for {RECONNECT_TIMEOUT:.0f} s ({error}); once it runs again, "
                        f"check `flwr list`, and continue with {self.resume_command}"
                    ) from error
            else:
                if status.status == "finished":
                    self._show("\n" if self._line else "")
                    return status
            time.sleep(POLL_SECONDS)

    def _explain_wait(self) -> None:
        """Print once, after `START_SECONDS`, why the SuperLink may not start the run."""
        if time.monotonic() > self._warn_at:
            self._warn_at = math.inf
            print(
                f"the SuperLink has not started run {self.id} for {START_SECONDS:.0f} s: its process flower-superexec "
                "may have ended, e.g. because its database was locked; see its log, and restart flower-superlink with "
                "the same options, which starts the run",
                flush=True,
            )

    def stop(self) -> None:
        """Stop the run, and wait for its end."""
        print(f"stopping run {self.id}", flush=True)
        with suppress(httpx.HTTPError):  # the run has ended, or the SuperLink is not available
            control_internals.stop_run(self._control, self.id)
            deadline = time.monotonic() + STOP_TIMEOUT
            while (
                control_internals.run_status(self._control, self.id).status != "finished"
                and time.monotonic() < deadline
            ):
                time.sleep(POLL_SECONDS)

    def _show(self, text: str) -> None:
        """Print a part of the log, except for reports, which are parsed."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            report = parse_report(line)
            if report is None:
                print(line, flush=True)
            else:
                self.folder, self.error = report["run_folder"] or self.folder, report["error"]

    @property
    def resume_command(self) -> str:
        # engine=deployment replaces all that the run folder has of the engine.
        values = {name: getattr(self._engine, name) for name in ("address", *FILES)}
        own = [f"engine.{name}={quote_value(str(value))}" for name, value in values.items() if value]
        if (every := self._engine.deliver_every) != 0:
            own.append(f"engine.deliver_every={'null' if every is None else every}")
        return shell_command(["engine=deployment", *own, f"resume={quote_value(self.folder or 'FOLDER')}"])


def _raise_on_failure(status: control_internals.RunStatus, run: _Run) -> None:
    if status.sub_status == "completed":
        return
    if run.error:
        raise InputError(run.error)
    reason = sanitize_line(status.details.partition("; continue with ")[0], max_chars=1000) or "no reason was given"
    outcome = "was stopped" if status.sub_status == "stopped" else f"failed: {reason.rstrip('.')}"
    raise RunError(f"run {run.id} {outcome}; continue with {run.resume_command}")


def _is_run_folder(folder: Path) -> bool:
    with suppress(OSError):  # no permission
        return (folder / "config.yaml").is_file()
    return False
