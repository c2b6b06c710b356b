"""Virtual time of simulated clients: when they are online, how fast they are, and how long a round takes them.

The names are those of FedScale (Lai et al., ICML 2022, arXiv 2105.11367): availability, compute speed, bandwidth. All
models are pure functions of the run's seed, the client and the round, so that no engine changes a number.
"""

import heapq
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from fedssl.config.constraints import check_arguments
from fedssl.csv_file import client_in, number_in, read_rows
from fedssl.errors import InputError
from fedssl.seeding import numpy_generator

INTERVAL_HEADER = "client,start,end"


@dataclass(frozen=True)
class OnlineTimes:
    """Intervals [start, end) in seconds, ascending, with gaps between them; repeated after ``period``; None: once.

    The k-th repetition starts at ``start + k * period`` in every method, so that a client is online at the time that
    `next_start` returns, whatever is rounded.
    """

    intervals: tuple[tuple[float, float], ...]
    period: float | None = None

    def online_until(self, time: float) -> float | None:
        """Return when the client goes offline, infinity for never; None if it is offline at ``time``."""
        start, end = self._interval(self._index(time))
        return end if start <= time < end else None

    def next_start(self, time: float) -> float:
        """Return when an interval starts for the first time after ``time``; infinity for never."""
        return self._interval(self._index(time) + 1)[0]

    @cached_property
    def _starts(self) -> list[float]:
        return [start for start, _ in self.intervals]

    def _interval(self, index: int) -> tuple[float, float]:
        """Return an interval of all repetitions, in order; before the first one and after the last one an empty one."""
        repetition, position = divmod(index, len(self.intervals))
        if self.period is None:
            if repetition:
                return (math.copysign(math.inf, repetition),) * 2
            return self.intervals[position]
        start, end = self.intervals[position]
        return start + repetition * self.period, end + repetition * self.period

    def _index(self, time: float) -> int:
        """Return the index of the last interval that starts at ``time`` or earlier."""
        repetition = 0 if self.period is None else math.floor((time - self._starts[0]) / self.period)
        offset = time - repetition * (self.period or 0.0)
        index = repetition * len(self.intervals) + bisect_right(self._starts, offset) - 1
        while self._interval(index)[0] > time:  # rounding
            index -= 1
        while self._interval(index + 1)[0] <= time:
            index += 1
        return index


ALWAYS_ONLINE = OnlineTimes(((-math.inf, math.inf),))


def online_times(intervals: Iterable[tuple[float, float]], *, period: float | None) -> OnlineTimes:
    """Return the union of intervals, which lie in [0, ``period``]. One that ends there continues one that starts at 0.

    Without these seams a client does not go offline by rounding.
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    if period is not None and merged[0][0] == 0 and merged[-1][1] == period:
        if len(merged) == 1:
            return ALWAYS_ONLINE
        merged[-1] = merged[-1][0], period + merged.pop(0)[1]
    return OnlineTimes(tuple(merged), period)


def first_time_online(times: Collection[OnlineTimes], after: float, *, number: int) -> float | None:
    """Return the first time from ``after`` on at which ``number`` clients are online together; None if there is none.

    The number online grows only when a client comes online. Clients with a period have the same one.
    """
    periods = [client.period for client in times if client.period is not None]
    horizon = after + max(periods) if periods else math.inf
    ends = [end for client in times if (end := client.online_until(after)) is not None]
    if len(ends) >= number:
        return after
    clients = list(times)
    starts = [(client.next_start(after), place) for place, client in enumerate(clients)]
    heapq.heapify(ends)
    heapq.heapify(starts)
    while starts and starts[0][0] <= horizon and starts[0][0] < math.inf:
        start, place = starts[0]
        heapq.heapreplace(starts, (clients[place].next_start(start), place))
        while ends and ends[0] <= start:
            heapq.heappop(ends)
        end = clients[place].online_until(start)
        assert end is not None
        heapq.heappush(ends, end)
        if len(ends) >= number:
            return start
    return None


@dataclass(kw_only=True, eq=False)
class Availability(ABC):
    """Availability of the clients 0 to ``num_clients - 1``."""

    num_clients: int
    seed: int
    dropout: float = 0.0  # probability that the reply of a client is lost, independently in every round; 0 disables it

    @abstractmethod
    def online_times(self, client: int) -> OnlineTimes | None:
        """Return when a client is online; None for never. All clients with a period have the same one."""

    def drops_out(self, client: int, round: int, attempt: int) -> bool:
        """Return whether a client trains in this attempt at a round, and its reply is lost."""
        return float(numpy_generator(self.seed, "dropout", client, round, attempt).uniform()) < self.dropout


class Always(Availability):
    """All clients are always online, and none drops out."""

    def online_times(self, client: int) -> OnlineTimes | None:
        return ALWAYS_ONLINE


@dataclass(kw_only=True, eq=False)
class Diurnal(Availability):
    r"""Daily rhythm: each client is online for a fraction of every period. The start is drawn once per client.

    $$
    \text{online if} \quad (\tau - s_k) \bmod P < f P \qquad s_k \sim U(0, P)
    $$

    with $\tau$ the virtual time, P the period and f the fraction.
    """

    fraction: float
    period: float  # seconds

    def __post_init__(self) -> None:
        check_arguments("availability", fraction=self.fraction, period=self.period, dropout=self.dropout)

    def online_times(self, client: int) -> OnlineTimes | None:
        """Return the interval of a client, which starts at a uniform time of day."""
        if self.fraction == 1:
            return ALWAYS_ONLINE
        start = self.period * float(numpy_generator(self.seed, "availability", client).uniform())
        return OnlineTimes(((start, start + self.fraction * self.period),), period=self.period)


@dataclass(kw_only=True, eq=False)
class Trace(Availability):
    """Intervals from a CSV file, [start, end) in any order. Overlapping ones are merged."""

    file: str | Path | None
    period: float | None  # seconds; None: the intervals are not repeated

    def __post_init__(self) -> None:
        check_arguments("availability", owner="Trace", period=self.period, dropout=self.dropout)
        if self.file is None:
            raise InputError(f"availability=trace needs availability.file, a CSV file of {INTERVAL_HEADER}; set it")
        self._times = read_intervals(Path(self.file), num_clients=self.num_clients, period=self.period)

    def online_times(self, client: int) -> OnlineTimes | None:
        return self._times.get(client)


def read_intervals(file: Path, *, num_clients: int, period: float | None) -> Mapping[int, OnlineTimes]:
    """Return when each client of a file is online; raises `InputError`."""
    setting = f"availability.file={file}"
    intervals: dict[int, list[tuple[float, float]]] = {}
    for place, values in read_rows(file, INTERVAL_HEADER, setting=setting, content=f"of {INTERVAL_HEADER}"):
        client = client_in(values["client"], place, num_clients=num_clients)
        start, end = (number_in(values[name], name, place, minimum=0) for name in ("start", "end"))
        if end <= start:
            raise InputError(f"{place}: {end=:g} is not after {start=:g}; write a later end")
        if period is not None and end > period:
            raise InputError(
                f"{place}: {end=:g} is after availability.period={period:g}, when the intervals repeat; set a "
                "longer period, or null"
            )
        intervals.setdefault(client, []).append((start, end))
    if not intervals:
        raise InputError(f"{setting} has no intervals, so that no client is ever online; add a line for each")
    return {client: online_times(listed, period=period) for client, listed in intervals.items()}


@dataclass(frozen=True)
class Speed:
    """Speed of a client: FLOPs, and bytes in each direction, per second."""

    flops_per_second: float
    upload_bytes_per_second: float
    download_bytes_per_second: float


SPEED_HEADER = "client,flops_per_second,upload_bytes_per_second,download_bytes_per_second"


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


@dataclass(kw_only=True, eq=False)
class LogNormalSpeed(ClientSpeed):
    r"""Log-normal speeds around a median.

    Compute speed is median * exp(sigma_clients * u + sigma_rounds * v), with u of the client and v of client and round
    from a standard normal distribution. Upload and download share another such factor, because they share a link.

    $$
    c_{kr} = c \, e^{\sigma_c u_k + \sigma_r v_{kr}} \qquad b_{kr} = b \, e^{\sigma_c u'_k + \sigma_r v'_{kr}}
    $$

    with c and b the median compute speed and bandwidth, and u, v independent, from a standard normal distribution.
    """

    num_clients: int
    seed: int
    flops_per_second: float
    upload_bytes_per_second: float
    download_bytes_per_second: float
    sigma_clients: float
    sigma_rounds: float

    def __post_init__(self) -> None:
        unlimited = ("num_clients", "seed")
        check_arguments("client_speed", **{key: value for key, value in vars(self).items() if key not in unlimited})

    def speed(self, client: int, round: int) -> Speed:
        of_client = numpy_generator(self.seed, "client-speed", client).standard_normal(2)
        of_round = numpy_generator(self.seed, "client-speed", client, round).standard_normal(2)
        exponents = self.sigma_clients * of_client + self.sigma_rounds * of_round
        computation, bandwidth = math.exp(exponents[0]), math.exp(exponents[1])
        return Speed(
            self.flops_per_second * computation,
            self.upload_bytes_per_second * bandwidth,
            self.download_bytes_per_second * bandwidth,
        )


class TraceSpeed(ClientSpeed):
    """Speeds from a CSV file with the columns of `SPEED_HEADER` and one line per client, the same in all rounds."""

    def __init__(self, *, num_clients: int, seed: int, file: str | Path | None) -> None:
        if file is None:
            raise InputError(f"client_speed=trace needs client_speed.file, a CSV file of {SPEED_HEADER}; set it")
        self._speeds = read_speeds(Path(file), num_clients=num_clients)

    def speed(self, client: int, round: int) -> Speed:
        return self._speeds[client]


def read_speeds(file: Path, *, num_clients: int) -> dict[int, Speed]:
    """Return the speed of every client; raises `InputError`."""
    setting = f"client_speed.file={file}"
    speeds: dict[int, Speed] = {}
    for place, values in read_rows(file, SPEED_HEADER, setting=setting, content=f"of {SPEED_HEADER}"):
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
