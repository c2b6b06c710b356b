"""Files of a device: its key, the certificate of its authority, its limits, and the configuration of its SuperNode."""

import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fedssl.atomic_files import atomic_write, write_text
from fedssl.errors import InputError
from fedssl.fleet.certificates import root_certificates
from fedssl.fleet.kit import (
    Kit,
    load_private_key,
    new_private_key,
    public_key_line,
    read_private_key,
    replace_key,
    write_private,
)
from fedssl.fleet.proxy import VARIABLES
from fedssl.machine.memory import available_memory
from fedssl.machine.process import available_cores
from fedssl.safe_io import MAX_TEXT_BYTES, read_bytes, read_text

KEY = "node.key"
LIMITS = """# What a server may request of this device. docs/devices.md explains the limits.
memory: {memory:.1f} # GB, of a message, of the images, and of a training step by estimate
epochs: 20 # local epochs of a round
batch: 256 # images of a step
size: 256 # height and width of an image, in pixels
threads: {threads}
minutes: 30 # of training, per round
# active_hours: 22:00-06:00 # of local time, in which a round may start
# max_rounds_per_day: 10
# max_megabytes_per_day: 200 # of messages that leave the device
# only_on_power: true # no round on battery (Linux)
# share_quality: true # label-free quality of delivered encoders on the local images
# security_bits: 40 # of secure aggregation at least, if these fractions of a round's clients
# corrupted_fraction: 0.2 # collude with the server
# dropout_fraction: 0.2 # drop out
"""
_FROM_SETUP = ("data-path", "client-name", "authority")  # entries that are always set anew
_ENTRY = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")  # as Flower finds entries


def device_key(kit: Kit, folder: Path) -> bytes:
    """Return the private key in the folder, else that of the kit, else a new one; raises `InputError` if two differ."""
    others = [file for file in folder.glob("*.pub") if file.name != f"{kit.name}.pub"]
    if others:
        raise InputError(
            f"{folder} is of the device {others[0].stem}; give another folder= for {kit.name}, or, if that is its new "
            f"name, remove {others[0]}"
        )
    own = read_private_key(folder / KEY)
    if own is None:
        return kit.private_key or new_private_key()
    if kit.private_key and load_private_key(own).public_key() != load_private_key(kit.private_key).public_key():
        raise InputError(f"{folder / KEY} is another key than that of the kit; {replace_key(folder / KEY)}")
    return own


def read_config(folder: Path) -> dict[str, Any]:
    """Return the entries of ``NODE_CONFIG`` in ``node.env``, which the SuperNode uses; raises `InputError`."""
    file, line = folder / "node.env", read_environment(folder).get("NODE_CONFIG", "")
    try:
        config = tomllib.loads(_ENTRY.sub(r"\1 = \2\n", line))
        if not all(isinstance(value, str | int | float) for value in config.values()):
            raise ValueError("a value is neither text nor a number, true or false")
    except ValueError as error:
        raise InputError(f"{file} has a NODE_CONFIG that is not valid ({error}); {_repair(file)}") from error
    return config


def read_owner_config(folder: Path) -> dict[str, Any]:
    """Return the entries of `read_config` that `write_files` would not set."""
    config = read_config(folder)
    defaults = {"state-path": str(folder / "states"), "limits": str(folder / "limits.yaml")}
    return {name: value for name, value in config.items() if name not in _FROM_SETUP and value != defaults.get(name)}


def toml_value(value: Any) -> str:
    """Return a string, number or truth value as Flower reads it in ``--node-config``."""
    return _quote(value) if isinstance(value, str) else str(value).lower()


def write_files(
    kit: Kit, folder: Path, *, key: bytes, images: Path, states: Path, owner_config: Mapping[str, Any]
) -> None:
    """Write key, certificate, limits and configuration; existing keys, limits and variables of ``node.env`` are kept.

    ``owner_config`` are further entries of the configuration, as of `read_owner_config`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / KEY).exists():
            write_private(folder / KEY, key)
        (folder / f"{kit.name}.pub").write_bytes(public_key_line(key, kit.name))
        (folder / "ca.crt").write_bytes(kit.certificate)
        if not (folder / "limits.yaml").exists():
            memory = 0.75 * (available_memory() or 2**31) / 1e9
            write_text(folder / "limits.yaml", LIMITS.format(memory=memory, threads=available_cores()))
        device = {"name": kit.name, "server": kit.server, "versions": dict(kit.versions)}
        device |= {"images": str(images), "states": str(states)}
        write_text(folder / "device.json", json.dumps(device, indent=2) + "\n")
        config = {
            "data-path": str(images),
            "client-name": kit.name,
            "state-path": str(states),
            "limits": str(folder / "limits.yaml"),
            "authority": str(folder / "ca.crt"),
        }
        line = " ".join(f"{name}={toml_value(value)}" for name, value in {**config, **owner_config}.items())
        proxies = {name: value for name, value in sorted(os.environ.items()) if name.lower() in VARIABLES and value}
        kept = {name: value for name, value in read_environment(folder).items() if name.lower() not in VARIABLES}
        _write_environment(folder / "node.env", {**kept, "SUPERLINK": kit.server, "NODE_CONFIG": line, **proxies})
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); choose another folder=") from error


def command(folder: Path) -> str:
    """Return the command that starts the SuperNode of a device."""
    env = read_environment(folder)
    return (
        f"flower-supernode --superlink {shlex.quote(env['SUPERLINK'])} "
        f"--root-certificates {shlex.quote(str(folder / 'ca.crt'))} "
        f"--auth-supernode-private-key {shlex.quote(str(folder / KEY))} --node-config {shlex.quote(env['NODE_CONFIG'])}"
    )


def read_environment(folder: Path) -> dict[str, str]:
    """Return the variables in ``node.env``; raises `InputError`."""
    file = folder / "node.env"
    try:
        lines = (read_text(file) or "").splitlines(keepends=True)
        words = shlex.split("".join(line for line in lines if not line.lstrip().startswith(("#", ";"))))
    except ValueError as error:  # an open quote
        raise InputError(f"{file} is damaged ({error}); {_repair(file)}") from error
    return dict(word.split("=", 1) for word in words if "=" in word)


def read_device(folder: Path) -> dict[str, Any]:
    """Return ``device.json`` of a folder that `write_files` wrote; raises `InputError`."""
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


def installed_kit(folder: Path, device: Mapping[str, Any]) -> Kit:
    """Return the kit with which a device was set up, without the key; raises `InputError`."""
    try:
        return Kit(
            name=device["name"],
            server=device["server"],
            versions={str(package): str(version) for package, version in device["versions"].items()},
            certificate=root_certificates(read_bytes(folder / "ca.crt", max_bytes=MAX_TEXT_BYTES)),
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} has a damaged device.json or ca.crt ({error}); run fedssl-device setup again"
        ) from error


def _repair(file: Path) -> str:
    """Return how a damaged file becomes valid."""
    move = f"mv {shlex.quote(str(file))} {shlex.quote(f'{file}.old')}"
    return f"correct it, or run {move}, then run fedssl-device setup again"


def _write_environment(file: Path, variables: Mapping[str, str]) -> None:
    """Write variables for systemd and shells; only the owner may read them, since a proxy may have a password."""

    def write(stream: BinaryIO) -> None:
        os.fchmod(stream.fileno(), 0o600)
        stream.write("".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items()).encode())

    atomic_write(file, write)


def _quote(text: str) -> str:
    r"""Return a string as Flower reads it in ``--node-config``: TOML's, but without quotes, which it has as \u0022."""
    plain = [char if char.isprintable() and char not in "\"'\\" else _escape(ord(char)) for char in text]
    return f'"{"".join(plain)}"'


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"
