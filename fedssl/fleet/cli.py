"""The command ``fedssl-fleet``: the devices of a fleet, for its operator.

    fedssl-fleet invite NAME ... --server HOST:PORT [--with-key]   create startup kits, from which devices join
    fedssl-fleet add NAME KEY.pub                             register the key of a device under a name
    fedssl-fleet list [--run FOLDER] [--json]                 all devices: status, last contact, versions, rounds
    fedssl-fleet show NAME [--run FOLDER] [--json]            one device
    fedssl-fleet watch [--run FOLDER] [--port PORT]           show all devices and alerts until Ctrl-C
    fedssl-fleet remove NAME                                  reject all further requests of a device
    fedssl-fleet rotate NAME KEY.pub                          replace the key of a device

It runs on the server. ``--address`` and ``--certificates`` name the SuperLink; without them the connection ``fleet`` of
Flower's ``config.toml`` is used. ``--run`` adds what devices reported in a run. ``watch --port`` serves
metrics for Prometheus at 127.0.0.1; ``--min-devices``, ``--max-hours`` and ``--min-disk`` define alerts.
"""

import argparse
import datetime
import json
import os
import shlex
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedssl.command_line import run_command
from fedssl.config.literal import user_path
from fedssl.config.settings import EngineSettings
from fedssl.errors import InputError, sanitize
from fedssl.fleet import control_internals
from fedssl.fleet.address import check_address
from fedssl.fleet.control import control_api, registered_devices
from fedssl.fleet.kit import make_kit, new_private_key, public_key, read_public_key, write_kit
from fedssl.fleet.watch import FleetView, MetricsServer, Row, Thresholds, as_cell, as_table, as_text, make_view
from fedssl.runs.jsonl import read_jsonl
from fedssl.runs.run import FLEET_FILE, is_locked
from fedssl.safe_io import corrupt_file_error, read_text, read_yaml
from fedssl.text_table import align
from fedssl.wire.device import COMPARED_PACKAGES, check_device_name

DEFAULT_ADDRESS = "127.0.0.1:8000"  # of a SuperLink
WATCH_RANGES = {
    "interval": (0.1, 86400),
    "port": (1, 65535),
    "min_devices": (0, 10**6),
    "max_hours": (0, 10**6),
    "min_disk": (0, 10**9),
}


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    options = _parser().parse_args()
    command, _ = COMMANDS[options.command]
    return run_command("fedssl-fleet", lambda: print(sanitize(command(options), lines=True)))


def invite(options: argparse.Namespace) -> str:
    """Create a startup kit for each name."""
    for name in options.names:
        check_device_name(name)
    check_address("--server", options.server)
    if options.output and len(options.names) > 1:
        raise InputError(f"--output names one kit, but {len(options.names)} names are given; leave it out")
    files = {name: options.output or Path(f"{name}.kit") for name in options.names}
    for name, file in files.items():  # before any key is registered
        if os.path.lexists(file):
            more = f", or leave {name} out" if len(files) > 1 else ", or choose another --output"
            raise InputError(f"{file} exists; remove it{more}")
    if options.with_key:
        with _control(options) as control:
            devices = registered_devices(control)
        for name in files:
            _check_unused(name, devices)
    return "\n".join(_invite(name, file, options) for name, file in files.items())


def _invite(name: str, file: Path, options: argparse.Namespace) -> str:
    certificate = user_path(options.certificates or _engine(options).root_certificates or "ca.crt")
    if options.with_key:
        key = new_private_key()
        with _control(options) as control:
            write_kit(make_kit(name, options.server, certificate=certificate, private_key=key), file)
            try:
                control_internals.register_node(control, public_key(key), name=name)
            except BaseException:  # nobody can use the kit
                file.unlink(missing_ok=True)
                raise
        return f"{file} has the private key of {name}, which is registered; pass it on confidentially"
    write_kit(make_kit(name, options.server, certificate=certificate), file)
    return (
        f"{file} is for the device {name}, where `fedssl-device setup {shlex.quote(file.name)} images=FOLDER` creates "
        f"{name}.pub; register it with `fedssl-fleet add {name} {name}.pub`"
    )


def add(options: argparse.Namespace) -> str:
    """Register a key under a name."""
    check_device_name(options.name)
    key = read_public_key(options.key)
    with _control(options) as control:
        _check_unused(options.name, registered_devices(control))
        node = control_internals.register_node(control, key, name=options.name)
    return f"{options.name} is registered as node {node}"


def remove(options: argparse.Namespace) -> str:
    """Remove a device. The SuperLink rejects its further requests, also in a running round."""
    with _control(options) as control:
        device = _device(options.name, registered_devices(control))
        control_internals.unregister_node(control, device["node"])
    return f"{options.name} (node {device['node']}) is removed; its key cannot be registered again"


def rotate(options: argparse.Namespace) -> str:
    """Replace the key of a device. The name stays, also if its node ID is given: runs give it the same client id."""
    key = read_public_key(options.key)
    with _control(options) as control:
        old = _device(options.name, registered_devices(control))
        node = control_internals.register_node(control, key, name=old["name"])
        control_internals.unregister_node(control, old["node"])
    return f"{old['name'] or 'the device'} is node {node} now; node {old['node']} is removed"


def list_devices(options: argparse.Namespace) -> str:
    """Return the table of all devices."""
    rows = _rows(options, options.run)
    if options.json:
        return json.dumps(rows, indent=2)
    if not rows:
        return "no device is registered; create a kit with fedssl-fleet invite, or register a key with fedssl-fleet add"
    return as_table(rows, _columns(options))


def _columns(options: argparse.Namespace) -> list[str]:
    of_run = ("images", "free MB", "rounds", "fedssl", "flwr", "torch", "last error") if options.run else ()
    return ["name", "node", "status", "last contact", *of_run]


def show(options: argparse.Namespace) -> str:
    """Return everything that is recorded of one device."""
    row = _device(options.name, _rows(options, options.run))
    return json.dumps(row, indent=2) if options.json else align([(key, as_cell(row[key])) for key in row], left=2)


def watch(options: argparse.Namespace) -> str:
    """Show the devices on the terminal until Ctrl-C."""
    for name, (low, high) in WATCH_RANGES.items():
        value = vars(options)[name]
        if value is not None and not low <= value <= high:
            raise InputError(f"--{name.replace('_', '-')}={value} is out of range; give a number from {low} to {high}")
    thresholds = Thresholds(
        min_devices=options.min_devices, max_hours=options.max_hours, min_megabytes=options.min_disk
    )
    server = None if options.port is None else MetricsServer(options.port)
    is_terminal = sys.stdout.isatty()
    while True:
        view = _view(options, thresholds)
        if server is not None:
            server.view = view
        print(("\x1b[H\x1b[2J" if is_terminal else "") + as_text(view, _columns(options)), flush=True)
        time.sleep(options.interval)


def _view(options: argparse.Namespace, thresholds: Thresholds) -> FleetView:
    """Return the current view. A SuperLink that does not answer is an alert, since it may restart.

    What the run folder has stays in the view: a counter that fell to 0 would count again.
    """
    now = datetime.datetime.now().astimezone()
    run = options.run if options.run and (options.run / FLEET_FILE).exists() else None  # it may start later
    rows, alerts, has_answered = list[dict[str, Any]](), list[str](), True
    try:
        rows = _registered(options)
    except InputError as error:
        has_answered, thresholds = False, Thresholds(min_megabytes=thresholds.min_megabytes)
        alerts.append(str(error))
    try:
        view = make_view(_with_reports(rows, run), run, thresholds, now)
    except InputError as error:
        view = FleetView(time=now, devices=rows, alerts=[str(error)], round=None)
    return replace(view, alerts=[*alerts, *view.alerts], has_answered=has_answered)


def _rows(options: argparse.Namespace, run: Path | None) -> list[dict[str, Any]]:
    return _with_reports(_registered(options), run)


def _registered(options: argparse.Namespace) -> list[dict[str, Any]]:
    with _control(options) as control:
        return registered_devices(control)


def _with_reports(rows: list[dict[str, Any]], run: Path | None) -> list[dict[str, Any]]:
    """Return the rows with what the run recorded of each device."""
    if run:
        reports, activities, rejected = read_reports(run)
        for row in rows:
            row |= reports.get(row["name"]) or _report({})
            reason = rejected.get(row["node"], "")
            row["last error"] = reason or row["last error"]
            if row["status"] == "online":
                row["status"] = activities.get(row["node"], "online")
    return rows


def read_reports(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[int, str], dict[int, str]]:
    """Return what a run recorded of its devices by name, what nodes do in it now, and why nodes did not take part.

    Raise an `InputError` for a folder of another run.
    """
    file = folder / FLEET_FILE
    text, numbers = read_text(file), read_yaml(folder / "devices.json", dict)
    if text is None or numbers is None:
        raise InputError(f"{folder} is not the run folder of a fleet; it has no {FLEET_FILE} and devices.json")
    rounds = Counter(row["client"] for row in read_jsonl(folder / "clients.jsonl", required=["client"]))
    errors: dict[str, tuple[int, str]] = {}
    for line in read_jsonl(folder / "metrics.jsonl", required=["dropped"]):
        errors |= {client: (line["round"], reason) for client, reason in line["dropped"].items()}
    activities: dict[int, str] = {}
    reports = {}
    try:
        content = json.loads(text)
        for client, failure in content.get("failed", {}).items():
            errors[client] = max(errors.get(client, (0, "")), (failure["round"], failure["reason"]))
        for name, device in content["devices"].items():
            number = numbers.get(name)
            round, reason = errors.get(str(number), (0, ""))
            reports[name] = _report(
                device, rounds=rounds[number], last_error=f"round {round}: {reason}" if reason else ""
            )
        rejected = {int(node): reason for node, reason in content.get("rejected", {}).items()}
        if is_locked(folder):  # else nodes may have been repaired since
            for activity in ("late", "training", "rejected"):
                activities |= dict.fromkeys(map(int, content.get(activity, [])), activity)
        return reports, activities, rejected
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise corrupt_file_error(file, "it is not JSON that a run writes") from error


def _report(device: Mapping[str, Any], *, rounds: int = 0, last_error: str = "") -> dict[str, Any]:
    """Return what a device of `FLEET_FILE` reported, and the rounds in which its update was used."""
    versions = device.get("versions", {})
    return {
        "images": device.get("images"),
        "free MB": device.get("free disk"),  # when it joined
        "rounds": rounds,
        "last error": last_error,
        **{package: versions.get(package, "") for package in (*COMPARED_PACKAGES, "python")},
    }


def _check_unused(name: str, devices: Sequence[Row]) -> None:
    if any(device["name"] == name for device in devices):
        raise InputError(
            f"a device {name} is registered already; choose another name, or replace its key with fedssl-fleet rotate"
        )


def _device(name: str, devices: Sequence[Row]) -> Row:
    named = [device for device in devices if name in (device["name"], str(device["node"]))]
    if len(named) != 1:
        found = f"{len(named)} devices" if named else "no device"
        raise InputError(f"{found} {name} registered; give a name or node ID of `fedssl-fleet list`")
    return named[0]


def _control(options: argparse.Namespace) -> AbstractContextManager[control_internals.ControlHttpClient]:
    return control_api(_engine(options), names=("--address", "--certificates"))


def _engine(options: argparse.Namespace) -> EngineSettings:
    if options.address is None and options.certificates is None:
        return _connection()
    return EngineSettings(
        name="deployment", address=options.address or DEFAULT_ADDRESS, root_certificates=options.certificates
    )


def _connection() -> EngineSettings:
    """Return the connection ``fleet`` of Flower's ``config.toml``; the SuperLink of this machine without one."""
    file = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        value: Any = tomllib.loads(read_text(file) or "")
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file} is not valid TOML ({error}); correct it, or give --address") from error
    for name in ("superlink", "superlink.fleet"):
        value = _entry(file, value, name, {})
    return EngineSettings(
        name="deployment",
        address=_entry(file, value, "superlink.fleet.address", DEFAULT_ADDRESS),
        root_certificates=_entry(file, value, "superlink.fleet.root-certificates", "") or None,
    )


def _entry(file: Path, table: Mapping[str, Any], name: str, default: str | dict[str, Any]) -> Any:
    """Return an entry of a table of ``config.toml`` or its default; raises `InputError` for another type."""
    value = table.get(name.rpartition(".")[2], default)
    if not isinstance(value, type(default)):
        kind = "a text in quotes" if isinstance(default, str) else f"a section [{name}]"
        raise InputError(f"{file} has {name} = {value!r} but it is {kind}; correct it, or give --address")
    return value


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], str], Sequence[str]]] = {  # with their arguments
    "invite": (invite, ("names", "--server", "--with-key", "--output")),
    "add": (add, ("name", "key")),
    "list": (list_devices, ("--run", "--json")),
    "show": (show, ("name", "--run", "--json")),
    "watch": (watch, ("--run", "--interval", "--port", "--min-devices", "--max-hours", "--min-disk")),
    "remove": (remove, ("name",)),
    "rotate": (rotate, ("name", "key")),
}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "--address": {"metavar": "HOST:PORT", "help": "Control API of the SuperLink"},
    "--certificates": {"metavar": "FILE", "help": "ca.crt of the fleet"},
    "names": {"metavar": "NAME", "nargs": "+"},
    "name": {"metavar": "NAME"},
    "key": {"metavar": "KEY.pub", "type": user_path},
    "--run": {"metavar": "FOLDER", "type": user_path, "help": "run folder with reports of the devices"},
    "--json": {"action": "store_true"},
    "--interval": {"metavar": "SECONDS", "type": float, "default": 5.0},
    "--port": {"metavar": "PORT", "type": int, "help": "of metrics for Prometheus, at 127.0.0.1"},
    "--min-devices": {"metavar": "K", "type": int, "help": "alert if fewer are online"},
    "--max-hours": {"metavar": "N", "type": float, "help": "alert for a device without contact"},
    "--min-disk": {"metavar": "MB", "type": int, "help": "alert if a device or --run has less"},
    "--server": {"metavar": "HOST:PORT", "required": True, "help": "address for devices"},
    "--with-key": {"action": "store_true", "help": "create the private key here and register it"},
    "--output": {"metavar": "FILE", "type": user_path, "help": "default: NAME.kit"},
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedssl-fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, arguments) in COMMANDS.items():
        command = commands.add_parser(name)
        for argument in ("--address", "--certificates", *arguments):
            command.add_argument(argument, **_ARGUMENTS[argument])
    return parser
