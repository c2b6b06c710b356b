"""The command ``fedssl-device``: join a fleet with a device, for its owner.

    fedssl-device setup KIT images=FOLDER [folder=FOLDER] [states=FOLDER]   check this device, and write its files
    fedssl-device status [folder=FOLDER]                                    check it again, and show what it shares
    fedssl-device encoder [folder=FOLDER] [output=FILE]                     list delivered encoders, copy the newest

``folder`` has the key, the certificate, the limits and the SuperNode's configuration; the default is
``~/.local/share/fedssl/device``. The private key does not leave it. ``states`` is for what the device keeps between
rounds, by default a folder in ``folder``.
"""

import argparse
import datetime
import json
import os
import shlex
import shutil
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

from fedssl.atomic_files import write_text
from fedssl.command_line import run_command
from fedssl.errors import InputError
from fedssl.fleet.encoders import stored_encoders
from fedssl.fleet.history import FILE, read_history
from fedssl.fleet.keys import new_private_key, public_key_line, write_private
from fedssl.fleet.kit import Kit, check_server, read_kit
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.text_table import align
from fedssl.untrusted import read_text, sanitize
from fedssl.wire.device import incompatibility, installed_versions

SHOWN_EVENTS = 10
TIMEOUT = 10.0  # seconds
MAX_CLOCK_ERROR = 120.0  # seconds; Flower rejects signatures that are more than 300 s old
MIN_DISK, MIN_MEMORY = 2 * 10**9, 10**9  # bytes

LIMITS = """# What a server may request of this device. docs/devices.md explains the limits.
memory: {memory:.1f} # GB, of a message, of the images, and of a training step by estimate
epochs: 20 # local epochs of a round
batch: 256 # images of a step
size: 256 # height and width of an image, in pixels
threads: {threads}
minutes: 30 # of training, per round
# active_hours: 22:00-06:00 # of local time, in which a round may start
# max_rounds_per_day: 10
# only_on_power: true # no round on battery (Linux)
"""
SHARED = """This device shares updates of model weights, the number of its images, its versions of Python, flwr, torch
and torchvision, and metrics that a run requests (loss, duration). It shares no images, labels, file names or paths."""


def main() -> int:
    """Entry point; returns the exit status, see `run_command`."""
    options = _parser().parse_args()
    command = {"setup": setup, "status": status, "encoder": encoder}[options.command]
    return run_command("fedssl-device", lambda: command(options))


@dataclass(frozen=True)
class Check:
    """A check of this device."""

    name: str
    result: str
    passed: bool = True


def setup(options: argparse.Namespace) -> int:
    """Check this device and write its files; returns 1 if a check failed."""
    values = _values(options.values, allowed=("images", "folder", "states"))
    if "images" not in values:
        raise InputError("images=FOLDER is missing; name the folder of this device's images")
    kit, images = read_kit(options.kit), Path(values["images"]).expanduser().absolute()
    folder = _folder(values)
    checks = list(run_checks(kit, images, folder))
    print(_table(checks))
    if not all(check.passed for check in checks):
        print("correct what failed, and repeat the command", file=sys.stderr)
        return 1
    states = Path(values.get("states", folder / "states")).expanduser().absolute()
    write_files(kit, folder, images=images, states=states)
    print(f"\n{SHARED}\n\n{folder} has the key and the configuration.")
    if kit.private_key is None:
        print(f"Send {folder / f'{kit.name}.pub'} to the operator, who registers it.")
    print(f"Start the SuperNode:\n\n  {command(folder)}\n")
    return 0


def status(options: argparse.Namespace) -> int:
    """Check this device again; returns 1 if a check failed."""
    folder = _folder(_values(options.values, allowed=("folder",)))
    device = read_device(folder)
    kit = Kit(
        name=device["name"],
        server=device["server"],
        versions=device["versions"],
        certificate=(folder / "ca.crt").read_bytes(),
    )
    checks = list(run_checks(kit, Path(device["images"]), folder))
    print(f"{_table(checks)}\n\n{SHARED}\n\n{_history(Path(device['states']))}")
    return 0 if all(check.passed for check in checks) else 1


def _history(states: Path) -> str:
    """Return the last events of a device, and how often it trained within a day."""
    events = read_history(states)
    if not events:
        return "No server has sent a message yet."
    day_ago = (datetime.datetime.now().astimezone() - datetime.timedelta(days=1)).isoformat(timespec="seconds")
    rounds = sum(event["event"] == "trained" and event["time"] > day_ago for event in events)
    rows = [
        (event["time"], event["event"], ", ".join(f"{k}={v}" for k, v in event.items() if k not in ("time", "event")))
        for event in events[-SHOWN_EVENTS:]
    ]
    return f"{rounds} rounds in the last 24 hours. The last events ({FILE}):\n" + sanitize(
        align(rows, left=3), lines=True
    )


def encoder(options: argparse.Namespace) -> int:
    """List the encoders that the server delivered, or copy the newest."""
    values = _values(options.values, allowed=("folder", "output"))
    folder = _folder(values)
    states = Path(read_device(folder)["states"])
    found = stored_encoders(states)
    if not found:
        raise InputError(f"no encoder was delivered to {states}; the server sends it at the end of a run")
    rows = [
        (fields["run_id"], str(fields["round"]), fields["model"], "yes" if fields["signed"] else "no", str(file))
        for file, fields in found
    ]
    print(sanitize(align([("run", "round", "model", "signed", "file"), *rows], left=5), lines=True))
    if "output" in values:
        target = Path(values["output"]).expanduser()
        if target.exists():
            raise InputError(f"{target} exists; choose another output=")
        try:
            target.write_bytes(found[-1][0].read_bytes())
        except OSError as error:
            raise InputError(f"{target} cannot be written ({error.strerror}); choose another output=") from error
        print(f"\nthe newest is copied to {target}; `fedssl-export encoder={target} format=onnx` converts it")
    return 0


def run_checks(kit: Kit, images: Path, folder: Path) -> Iterator[Check]:
    """Yield the checks of images, memory, disk, versions, connection and clock."""
    yield _check_images(images)
    memory = available_memory()
    if memory is None:
        yield Check("memory", "unknown on this system")
    else:
        yield Check("memory", f"{gigabytes(memory)} available", memory >= MIN_MEMORY)
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    yield Check("disk", f"{gigabytes(free)} free in {folder}", free >= MIN_DISK)
    versions = installed_versions()
    problem = incompatibility(kit.versions)
    listed = ", ".join(f"{package} {version}" for package, version in versions.items())
    yield Check("versions", f"the server {problem}" if problem else listed, not problem)
    yield from _check_connection(kit)


def _check_images(images: Path) -> Check:
    if not images.is_dir():
        return Check("images", f"{images} is not a folder", False)
    from PIL import Image

    from fedssl.datasets.image_folder import SUFFIXES  # slow import

    files = [file for file in images.rglob("*") if file.suffix.lower() in SUFFIXES]
    unreadable = []
    for file in files[:: max(len(files) // 20, 1)]:  # a sample: a round reports the others
        try:
            with Image.open(file) as image:
                image.verify()
        except Exception as error:  # a damaged file can raise anything
            unreadable.append(f"{file.name} ({type(error).__name__})")
    result = f"{len(files)} in {images}" + (f"; unreadable: {', '.join(unreadable)}" if unreadable else "")
    return Check("images", result, len(files) >= 2 and len(unreadable) < len(files))


def _check_connection(kit: Kit) -> Iterator[Check]:
    host, port = check_server(kit.server)
    try:
        context = ssl.create_default_context(cadata=kit.certificate.decode("ascii"))
        connection = HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
        connection.request("POST", "/v1/fleet/")
        date = connection.getresponse().headers["Date"]
        connection.close()
    except ssl.SSLCertVerificationError as error:
        yield Check("connection", f"the certificate of {kit.server} is not valid here ({error.verify_message})", False)
        return
    except (OSError, ValueError) as error:  # ValueError: no PEM certificate
        yield Check("connection", f"{kit.server} cannot be reached ({error})", False)
        return
    yield Check("connection", f"{kit.server} answers, and its certificate is valid")
    if date is not None:
        difference = time.time() - parsedate_to_datetime(date).timestamp()
        result = f"{abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} the server's"
        yield Check("clock", result, abs(difference) <= MAX_CLOCK_ERROR)


def write_files(kit: Kit, folder: Path, *, images: Path, states: Path) -> None:
    """Write key, certificate, limits and configuration; existing keys and limits are kept."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = folder / "node.key"
        if not key.exists():
            write_private(key, kit.private_key or new_private_key())
        (folder / f"{kit.name}.pub").write_bytes(public_key_line(key.read_bytes(), kit.name))
        (folder / "ca.crt").write_bytes(kit.certificate)
        if not (folder / "limits.yaml").exists():
            memory = 0.75 * (available_memory() or 2**31) / 1e9
            write_text(folder / "limits.yaml", LIMITS.format(memory=memory, threads=os.cpu_count() or 1))
        device = {"name": kit.name, "server": kit.server, "versions": dict(kit.versions)}
        device |= {"images": str(images), "states": str(states)}
        write_text(folder / "device.json", json.dumps(device, indent=2) + "\n")
        config = {
            "data-path": images,
            "client-name": kit.name,
            "state-path": states,
            "limits": folder / "limits.yaml",
            "authority": folder / "ca.crt",
        }
        line = " ".join(f'{name}="{value}"' for name, value in config.items())
        write_text(folder / "node.env", f"SUPERLINK={kit.server}\nNODE_CONFIG={shlex.quote(line)}\n")
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); choose another folder=") from error


def command(folder: Path) -> str:
    """Return the command that starts the SuperNode of a device."""
    env = dict(line.split("=", 1) for line in (read_text(folder / "node.env") or "").splitlines())
    return (
        f"flower-supernode --superlink {env['SUPERLINK']} --root-certificates {shlex.quote(str(folder / 'ca.crt'))} "
        f"--auth-supernode-private-key {shlex.quote(str(folder / 'node.key'))} --node-config {env['NODE_CONFIG']}"
    )


def read_device(folder: Path) -> dict[str, Any]:
    """Return ``device.json`` of a folder that `setup` wrote; raises `InputError`."""
    text = read_text(folder / "device.json")
    if text is None:
        raise InputError(f"{folder} has no device.json; run fedssl-device setup, or give its folder=")
    try:
        device: dict[str, Any] = json.loads(text)
        kinds = {"name": str, "server": str, "images": str, "states": str, "versions": dict}
        if not all(isinstance(device[key], kind) for key, kind in kinds.items()):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'device.json'} is damaged; run fedssl-device setup again") from error
    return device


def _table(checks: Sequence[Check]) -> str:
    rows = [(check.name, "ok" if check.passed else "FAILED", check.result) for check in checks]
    return sanitize(align(rows, left=3), lines=True)


def _values(arguments: Sequence[str], *, allowed: Sequence[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` arguments; raises `InputError` for others."""
    values = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in allowed or not value:
            raise InputError(f"{argument} is not known; give {' or '.join(f'{name}=FOLDER' for name in allowed)}")
        values[key] = value
    return values


def _folder(values: dict[str, str]) -> Path:
    data = Path(os.environ.get("XDG_DATA_HOME") or Path("~/.local/share").expanduser())
    return Path(values.get("folder") or data / "fedssl" / "device").expanduser().absolute()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedssl-device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("setup")
    create.add_argument("kit", metavar="KIT", type=Path)
    for each in (create, commands.add_parser("status"), commands.add_parser("encoder")):
        each.add_argument("values", metavar="KEY=VALUE", nargs="*")
    return parser
