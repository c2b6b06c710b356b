"""Checks of a device: images, memory, disk, versions, connection and clock."""

import os
import shutil
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import chain
from pathlib import Path

import httpx

from fedssl.errors import InputError
from fedssl.fleet.certificates import verification_problem
from fedssl.fleet.kit import Kit
from fedssl.fleet.proxy import check_proxies, exception_command, proxy_of, proxy_problem
from fedssl.machine.memory import available_memory, gigabytes
from fedssl.wire.device import incompatibility, installed_versions

TIMEOUT = 10.0  # seconds
MAX_CLOCK_ERROR = 120.0  # seconds; Flower rejects signatures that are more than 300 s old
MIN_DISK, MIN_MEMORY = 2 * 10**9, 8 * 10**8  # bytes; a device with 1 GB has some in use


@dataclass(frozen=True)
class Check:
    """A check of this device."""

    name: str
    result: str
    passed: bool = True


def run_checks(kit: Kit, images: Path, states: Path) -> Iterator[Check]:
    """Yield the checks of images, memory, disk, versions, connection and clock."""
    yield _check_images(images)
    memory = available_memory()
    if memory is None:
        yield Check("memory", "unknown on this system")
    else:
        yield Check("memory", f"{gigabytes(memory)} available", memory >= MIN_MEMORY)
    free = free_space(states)
    yield Check("disk", f"{gigabytes(free)} free in {states}", free >= MIN_DISK)
    versions = installed_versions()
    problem = incompatibility(kit.versions)
    listed = ", ".join(f"{package} {version}" for package, version in versions.items())
    if problem:
        listed = f"the server {problem}, or repeat fedssl-device setup with a new kit if the server was upgraded"
    yield Check("versions", listed, not problem)
    yield from _check_connection(kit)


def free_space(folder: Path) -> int:
    """Return the free bytes of the file system of a folder that may not exist yet."""
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if os.access(parent, os.F_OK))).free


def _check_images(images: Path) -> Check:
    import numpy as np  # slow imports

    from fedssl.datasets.path_index import index_all
    from fedssl.datasets.sources import find

    unreadable = []  # of a sample; a round reports the others
    try:
        index = index_all(images)
        sample = index.at(np.arange(0, index.count, max(index.count // 20, 1)))
        for number, source in enumerate(chain.from_iterable(sample.batches(0))):
            try:
                index.decoding(source)
            except Exception as error:  # a damaged file can raise anything
                unreadable.append(f"{Path(sample.image_name(number)).name} ({type(error).__name__})")
    except InputError as error:
        return Check("images", str(error), False)
    checked = "" if sample.count == index.count else f", of which {sample.count} were checked"
    result = f"{index.count} in {images}{checked}" + (f"; unreadable: {', '.join(unreadable)}" if unreadable else "")
    ignored = find(str(images)).listing.ignored_kinds()
    result = "; ".join([result, *([f"ignored {ignored}"] if ignored else []), *index.warnings])
    return Check("images", result, index.count >= 2 and len(unreadable) < sample.count)


def _check_connection(kit: Kit) -> Iterator[Check]:
    """Connect as the SuperNode does: with its HTTP client, and the proxies of the environment."""
    url = f"https://{kit.server}/v1/fleet/"
    try:
        check_proxies()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=kit.certificate.decode("ascii"))
        with httpx.Client(verify=context, timeout=TIMEOUT) as client:
            response = client.post(url)
    except InputError as error:
        yield Check("connection", str(error), False)
        return
    except (httpx.TransportError, OSError) as error:
        yield Check("connection", _failure(kit.server, url, error), False)
        return
    proxy, status = proxy_of(url), response.status_code
    answer = f"{kit.server} answers{f' through {proxy}' if proxy else ''}"
    if status < 500:
        yield Check("connection", f"{answer}, and its certificate is valid")
    else:
        sentence = f"{answer} with status {status}: its SuperLink does not run; ask the operator to start it"
        yield Check("connection", sentence, False)
    own = proxy_of("http://127.0.0.1")
    if own:
        remedy = f"run {exception_command('127.0.0.1')}"
        yield Check("proxy", f"{own} would receive the connections within this device (127.0.0.1); {remedy}", False)
    if "Date" in response.headers:
        difference = time.time() - parsedate_to_datetime(response.headers["Date"]).timestamp()
        result = f"{abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} the server's"
        yield Check("clock", result, abs(difference) <= MAX_CLOCK_ERROR)


def _failure(server: str, url: str, error: Exception) -> str:
    reason = verification_problem(error)
    if reason:
        return f"the certificate of {server} is not valid here ({reason})"
    return f"{server} cannot be reached {proxy_problem(url, error) or f'({error})'}"
