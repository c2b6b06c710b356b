"""Compute speed and bandwidth of clients, and the time that a round takes them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedssl.config.constraints import check_arguments
from fedssl.csv_file import client_in, number_in, read_rows
from fedssl.errors import InputError
from fedssl.seeding import numpy_generator


@dataclass(frozen=True)
class Speed:
    """Speed of a client: FLOPs, and bytes in each direction, per second."""

    flops_per_second: float
    upload_bytes_per_second: float
    download_bytes_per_second: float


HEADER = "client,flops_per_second,upload_bytes_per_second,download_bytes_per_second"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Work of a client in a round: the FLOPs of its local training, and the bytes of the layers of both messages."""

    client: int
    round: int
    flops: float
    bytes_down: int
    bytes_up: int


def client_seconds(work: Workload, speed: Speed) -> float:
    r"""Return the seconds of a client's round: download, computation and upload, one after another.

    $$
    t_{kr} = \frac{B_\downarrow}{b^\downarrow_{kr}} + \frac{F_k}{c_{kr}} + \frac{B_\uparrow}{b^\uparrow_{kr}}
    $$

    with $B_\downarrow$ and $B_\uparrow$ the bytes of the layers, b the bandwidths, $F_k$ the FLOPs of the local
    training and c the compute speed.
    """
    download = work.bytes_down / speed.download_bytes_per_second
    computation = work.flops / speed.flops_per_second
    upload = work.bytes_up / speed.upload_bytes_per_second
    return download + computation + upload  # Eq. 1


class ClientSpeed(Protocol):
    """Speeds of the clients 0 to ``num_clients - 1``."""

    def speed(self, client: int, round: int) -> Speed:
        """Return the speed of a client in a round."""
        ...


def no_client_speed(*, num_clients: int, seed: int) -> None:
    """Return None: there is no virtual time."""


class LogNormalSpeed(ClientSpeed):
    r"""Log-normal speeds around a median.

    Compute speed is median * exp(sigma_clients * u + sigma_rounds * v), with u of the client and v of client and round
    from a standard normal distribution. Upload and download share another such factor, because they share a link.

    $$
    c_{kr} = c \, e^{\sigma_c u_k + \sigma_r v_{kr}} \qquad b_{kr} = b \, e^{\sigma_c u'_k + \sigma_r v'_{kr}}
    $$

    with c and b the median compute speed and bandwidth, and u, v independent, from a standard normal distribution.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        seed: int,
        flops_per_second: float,
        upload_bytes_per_second: float,
        download_bytes_per_second: float,
        sigma_clients: float,
        sigma_rounds: float,
    ) -> None:
        check_arguments(
            "client_speed",
            flops_per_second=flops_per_second,
            upload_bytes_per_second=upload_bytes_per_second,
            download_bytes_per_second=download_bytes_per_second,
            sigma_clients=sigma_clients,
            sigma_rounds=sigma_rounds,
        )
        self._median = Speed(flops_per_second, upload_bytes_per_second, download_bytes_per_second)
        self._seed, self._sigma_clients, self._sigma_rounds = seed, sigma_clients, sigma_rounds

    def speed(self, client: int, round: int) -> Speed:
        of_client = numpy_generator(self._seed, "client-speed", client).standard_normal(2)
        of_round = numpy_generator(self._seed, "client-speed", client, round).standard_normal(2)
        exponents = self._sigma_clients * of_client + self._sigma_rounds * of_round
        median, computation, bandwidth = self._median, math.exp(exponents[0]), math.exp(exponents[1])
        return Speed(
            median.flops_per_second * computation,
            median.upload_bytes_per_second * bandwidth,
            median.download_bytes_per_second * bandwidth,
        )


class TraceSpeed(ClientSpeed):
    """Speeds from a CSV file with the columns of `HEADER` and one line per client, the same in all rounds."""

    def __init__(self, *, num_clients: int, seed: int, file: str | Path | None) -> None:
        if file is None:
            raise InputError(f"client_speed=trace needs client_speed.file, a CSV file of {HEADER}; set it")
        self._speeds = read_speeds(Path(file), num_clients=num_clients)

    def speed(self, client: int, round: int) -> Speed:
        return self._speeds[client]


def read_speeds(file: Path, *, num_clients: int) -> dict[int, Speed]:
    """Return the speed of every client; raises `InputError`."""
    setting = f"client_speed.file={file}"
    speeds: dict[int, Speed] = {}
    for place, values in read_rows(file, HEADER, setting=setting, content=f"of {HEADER}"):
        client = client_in(values.pop("client"), place, num_clients=num_clients)
        if client in speeds:
            raise InputError(f"{place}: client {client} has a line already; remove one of them")
        numbers = {name: number_in(text, name, place, minimum=1) for name, text in values.items()}
        speeds[client] = Speed(**numbers)
    missing = next((client for client in range(num_clients) if client not in speeds), None)
    if missing is not None:
        raise InputError(
            f"{setting} has no line for client {missing}; add one for each of the num_clients={num_clients} clients"
        )
    return speeds
