"""Hosts of a Ray cluster: each must run the same code and see the run folder, in which clients keep their state."""

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedssl.errors import InputError
from fedssl.fingerprint import code_fingerprint
from fedssl.waiting import log_while_waiting

COMPARED_VERSIONS = ("python", "torch", "flwr")  # that must be the same


@dataclass(frozen=True)
class HostInfo:
    """What must be the same on all hosts of a run.

    Attributes
    ----------
    code : str
        Fingerprint of fedssl's source files.
    python, torch, flwr : str
        Versions.
    folder : bool
        Whether the run folder can be seen.
    """

    code: str
    python: str
    torch: str
    flwr: str
    folder: bool


def host_info(probe_file: Path) -> HostInfo:
    """Those of the host on which this is called; ``probe_file`` is a file that only the run's file system has."""
    versions = {package: version(package) for package in ("torch", "flwr")}
    return HostInfo(code=code_fingerprint(), python=platform.python_version(), folder=probe_file.exists(), **versions)


def check_hosts(folder: Path) -> None:
    """Ask every host of the cluster that this process has joined.

    A client may train on another host in each round. What it keeps from round to round, such as a target network or
    frozen layers, lies in the run folder, so all hosts must see the same one.

    Parameters
    ----------
    folder : Path
        Of the run; need not exist yet.

    Raises
    ------
    InputError
        A host runs other code or other versions, or does not see the folder; it is named.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    probe_file = folder.with_name(f".{folder.name}-{uuid4().hex}")
    probe_file.touch()
    try:
        expected = host_info(probe_file)
        ask = ray.remote(num_cpus=0, max_retries=0)(host_info)
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        replies = {
            host: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(probe_file)
            for node, host in hosts.items()
        }
        with log_while_waiting("hosts of the cluster do not answer yet"):
            for host, reply in replies.items():
                check_host(host, _get_reply(host, reply), expected, folder)
    finally:
        probe_file.unlink()


def _get_reply(host: str, reply: "ray.ObjectRef[HostInfo]") -> HostInfo:
    try:
        return ray.get(reply)
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise InputError(
            f"host {host} cannot run fedssl ({reason}); install the same environment on all hosts"
        ) from error


def check_host(host: str, info: HostInfo, expected: HostInfo, folder: Path) -> None:
    """Refuse a host that differs from this one in what a run needs to be the same; raises `InputError`."""
    theirs, ours = asdict(info), asdict(expected)
    for name, what in (("code", "code of fedssl"), *((name, f"version of {name}") for name in COMPARED_VERSIONS)):
        if theirs[name] != ours[name]:
            raise InputError(
                f"host {host} has another {what} ({theirs[name]}) than this one ({ours[name]}); install the same on "
                "all hosts"
            )
    if not info.folder:
        raise InputError(
            f"host {host} does not see {folder.parent}, where the run folder is to be: what clients keep from round to "
            "round lies there; set output_dir to a folder that all hosts share"
        )
