"""The command ``fedssl-device``: join a fleet with a device, for its owner.

    fedssl-device setup KIT images=FOLDER [folder=FOLDER] [states=FOLDER]   check this device, and write its files
                        [--start]                                           then become its SuperNode
    fedssl-device status [folder=FOLDER]                                    check it again, and show what it shared
    fedssl-device encoder [folder=FOLDER] [output=FILE]                     list delivered encoders, copy the newest
    fedssl-device quality [folder=FOLDER]                                   their label-free quality on the local images

``folder`` has the key, the certificate, the limits and the SuperNode's configuration; the default is
``~/.local/share/fedssl/device``. The private key does not leave it. ``states`` is for what the device keeps between
rounds, by default a folder in ``folder``. ``output=NAME.onnx`` converts the encoder to ONNX.
"""

import argparse
import datetime
import os
import shlex
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedssl.atomic_files import atomic_write
from fedssl.command_line import run_command
from fedssl.config.commands import parse_arguments
from fedssl.config.literal import user_path
from fedssl.config.targets import searchpath_override
from fedssl.errors import InputError, RequestRefused, sanitize
from fedssl.fleet.availability import read_usage
from fedssl.fleet.checks import Check, run_checks
from fedssl.fleet.device_files import (
    KEY,
    command,
    device_key,
    installed_kit,
    read_config,
    read_device,
    read_environment,
    read_owner_config,
    toml_value,
    write_files,
)
from fedssl.fleet.encoders import METRICS, NUM_IMAGES, encoder_quality, stored_encoders
from fedssl.fleet.history import FILE, read_history
from fedssl.fleet.kit import read_kit
from fedssl.fleet.limits import read_limits
from fedssl.fleet.proxy import VARIABLES as PROXY_VARIABLES
from fedssl.text_table import align

SHOWN_EVENTS = 10
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

SHARED = """This device shares updates of model weights, its name, its position if it has one, the number of its images,
its free disk space, its versions of Python, fedssl, flwr, torch and torchvision, its max-rank, digests of the base
layers that it holds, why it cannot train, and metrics that a run requests (loss, duration){quality}.
Some runs also request what is computed from images: sums and histograms of its pixel values (dataset.mean=federated),
normalized projections of single images (fedca), mean latents, with one batch of single images (mar), cluster centers
(orchestra), the mean product of projections (fedsc) or mean gradients (scaffold).
It shares no images, labels, file names or paths."""


def main() -> int:
    """Run the command, and return its exit status, see `run_command`."""
    options = _options()
    command = {"setup": setup, "status": status, "encoder": encoder, "quality": quality}[options.command]
    return run_command("fedssl-device", lambda: command(options))


def setup(options: argparse.Namespace) -> int:
    """Check this device and write its files; returns 1 if a check failed."""
    values = _values(options.values, allowed=("images", "folder", "states"))
    if "images" not in values:
        raise InputError("images=FOLDER is missing; name the folder of this device's images")
    kit, folder = read_kit(options.kit), _folder(values)
    images, kept = user_path(values["images"]).absolute(), read_owner_config(folder)
    if "states" in values:
        kept.pop("state-path", None)
    states = user_path(str(values.get("states") or kept.get("state-path", folder / "states"))).absolute()
    for name, path in {"images": images, "folder": folder, "states": states}.items():
        _check_text(name, path)
    key = device_key(kit, folder)
    checks = list(run_checks(kit, images, states))
    print(_checks(checks))
    if not all(check.passed for check in checks):
        print("correct what failed, and repeat the command", file=sys.stderr)
        return 1
    write_files(kit, folder, key=key, images=images, states=states, owner_config=kept)
    if kept:
        entries = " ".join(f"{name}={toml_value(value)}" for name, value in kept.items())
        print(sanitize(f"\nkept from {folder / 'node.env'}: {entries}"))
    _warn_of_readers(folder / KEY)
    if kit.private_key is not None:
        _warn_of_readers(options.kit)
    print(f"\n{_shared(_limits_file(folder))}\n\n{folder} has the key and the configuration.")
    if kit.private_key is None:
        print(f"Send {folder / f'{kit.name}.pub'} to the operator, who registers it.")
    if options.start:
        sys.stdout.flush()
        start(folder)
    print(f"Start the SuperNode:\n\n  {command(folder)}\n")
    return 0


def status(options: argparse.Namespace) -> int:
    """Check this device again; returns 1 if a check failed."""
    folder = _folder(_values(options.values, allowed=("folder",)))
    device = read_device(folder)
    environment = read_environment(folder)
    os.environ.update({name: value for name, value in environment.items() if name.lower() in PROXY_VARIABLES})
    states, limits = _states(folder, device), _limits_file(folder)
    device["server"] = environment.get("SUPERLINK", device["server"])  # which the SuperNode uses
    checks = list(run_checks(installed_kit(folder, device), _images(folder, device), states))
    _warn_of_readers(folder / KEY)
    print(f"{_checks(checks)}\n\n{_shared(limits)}\n\n{_budgets(limits, states)}\n\n{_history(states)}")
    return 0 if all(check.passed for check in checks) else 1


def _images(folder: Path, device: Mapping[str, Any]) -> Path:
    """Return the folder of the images, which the owner may have changed."""
    return user_path(str(read_config(folder).get("data-path", device["images"]))).absolute()


def _states(folder: Path, device: Mapping[str, Any]) -> Path:
    """Return the folder of the client state, which the owner may have set."""
    return user_path(str(read_owner_config(folder).get("state-path", device["states"]))).absolute()


def _limits_file(folder: Path) -> Path:
    """Return the file of the limits, which the owner may have set."""
    return Path(read_owner_config(folder).get("limits", folder / "limits.yaml"))


def _shared(limits: Path) -> str:
    shares = read_limits(limits).share_quality
    return SHARED.format(quality=", and the quality of encoders (share_quality)" if shares else "")


def _budgets(file: Path, states: Path) -> str:
    """Return whether the limits of a file allow a round now, and the usage of the last 24 hours."""
    limits, usage = read_limits(file), read_usage(states, datetime.datetime.now().astimezone())
    try:
        limits.check_now(states)
        start = "A round may start now."
    except RequestRefused as reason:
        start = f"No round starts now: {reason}."
    rounds, megabytes = (
        "" if limit is None else f" of {limit:g}" for limit in (limits.max_rounds_per_day, limits.max_megabytes_per_day)
    )
    sent = f"{usage.bytes / 1e6:.1f}{megabytes} MB sent"
    return f"{start} In the last 24 hours: {usage.rounds}{rounds} rounds, {sent}."


def _history(states: Path) -> str:
    events = read_history(states)
    if not events:
        return "No server has sent a message yet."
    rows = [
        (event["time"], event["event"], ", ".join(f"{k}={v}" for k, v in event.items() if k not in ("time", "event")))
        for event in events[-SHOWN_EVENTS:]
    ]
    return f"The last events ({FILE}):\n{_table(rows, left=3)}"


def encoder(options: argparse.Namespace) -> int:
    """List the encoders that the server delivered, or copy or convert the newest."""
    values = _values(options.values, allowed=("folder", "output"))
    folder = _folder(values)
    found = _delivered(_states(folder, read_device(folder)))
    rows = [
        (fields["run_id"], str(fields["round"]), fields["model"], "yes" if fields["signed"] else "no", str(file))
        for file, fields in found
    ]
    print(_table([("run", "round", "model", "signed", "file"), *rows], left=5))
    if "output" in values:
        print(_copy_encoder(found[-1][0], user_path(values["output"]), searchpath_override(_config_dirs(folder))))
    return 0


def _delivered(states: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the delivered encoders as `stored_encoders`, at least one; raises `InputError`."""
    found = stored_encoders(states)
    if not found:
        raise InputError(f"no encoder was delivered to {states}; the server sends it at the end of a run")
    return found


def _config_dirs(folder: Path) -> list[Path]:
    """Return the owner's folder with own encoders, if it is set."""
    own = read_owner_config(folder).get("config-dir")
    return [user_path(str(own)).absolute()] if own else []


def _copy_encoder(file: Path, target: Path, searchpath: str) -> str:
    """Copy an encoder, or convert it to ONNX if the target has that suffix."""
    if target.exists():
        raise InputError(f"{target} exists; choose another output=")
    if target.suffix == ".onnx":
        from fedssl.export.cli import run  # slow import

        return run([f"encoder={file}", "format=onnx", f"output={target}", searchpath])
    try:
        atomic_write(target, lambda stream: stream.write(file.read_bytes()))
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror}); choose another output=") from error
    export = f"fedssl-export {shlex.quote(f'encoder={target}')}"
    return f"\nthe newest is copied to {target}; `{export}` converts it to other formats"


def quality(options: argparse.Namespace) -> int:
    """Show the label-free quality of delivered encoders on the local images."""
    folder = _folder(_values(options.values, allowed=("folder",)))
    device = read_device(folder)
    rows = [("run", "round", *METRICS)]
    for file, fields in _delivered(_states(folder, device)):
        values = encoder_quality(file, _images(folder, device), folders=_config_dirs(folder))
        rows.append((fields["run_id"], str(fields["round"]), *(f"{values[metric]:.3g}" for metric in METRICS)))
    print(_table(rows, left=1))
    print(
        f"of at most {NUM_IMAGES} local images; a collapsed encoder has ranks near 1, spread near 0, uniformity near 0"
    )
    return 0


def start(folder: Path) -> None:
    """Replace this process by the SuperNode of a device, with a free port for its own processes.

    As in the unit of ``deploy/systemd``, it has the variables of ``node.env``, and freed memory returns to the system
    at once.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # Flower's programs
    program, *arguments = shlex.split(command(folder))
    environment = {**ALLOCATOR, **os.environ, **read_environment(folder), "PATH": path}
    os.execvpe(program, [program, *arguments, "--port", str(port)], environment)


def _checks(checks: Sequence[Check]) -> str:
    return _table([(check.name, "ok" if check.passed else "FAILED", check.result) for check in checks], left=3)


def _table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    return sanitize(align(rows, left=left), lines=True)


def _values(arguments: Sequence[str], *, allowed: Sequence[str]) -> dict[str, str]:
    values = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in allowed or not value:
            raise InputError(f"{argument} is not known; give {' or '.join(f'{name}=FOLDER' for name in allowed)}")
        values[key] = value
    return values


def _check_text(name: str, path: Path) -> None:
    """Raise `InputError` for a path that Flower's configuration cannot contain."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name}={str(path)!a} is not UTF-8 text; rename the folder, or choose another") from error


def _warn_of_readers(file: Path) -> None:
    if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
        remedy = f"run chmod 600 {shlex.quote(str(file))}"
        print(f"warning: other users can read {file}, which has the private key; {remedy}", file=sys.stderr)


def _folder(values: dict[str, str]) -> Path:
    data = Path(os.environ.get("XDG_DATA_HOME") or user_path("~/.local/share"))
    return user_path(values.get("folder") or data / "fedssl" / "device").absolute()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fedssl-device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("setup")
    create.add_argument("kit", metavar="KIT", type=Path)
    create.add_argument("--start", action="store_true", help="start the SuperNode in place of this process")
    for each in (create, *(commands.add_parser(name) for name in ("status", "encoder", "quality"))):
        each.add_argument("values", metavar="KEY=VALUE", nargs="*")
    return parse_arguments(commands.choices, parser)
