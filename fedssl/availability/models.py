"""Models of availability: which clients are online at which virtual time, and which of them drop out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from fedssl.availability.online import ALWAYS_ONLINE, OnlineTimes, online_times
from fedssl.config.constraints import check_arguments
from fedssl.csv_file import client_in, number_in, read_rows
from fedssl.errors import InputError
from fedssl.seeding import numpy_generator

HEADER = "client,start,end"


class Availability(ABC):
    """Availability of the clients 0 to ``num_clients - 1``.

    ``dropout`` is the probability that the reply of a client is lost, independently in every round. 0 disables it.
    """

    def __init__(self, *, num_clients: int, seed: int, dropout: float = 0.0) -> None:
        self._seed, self._dropout = seed, dropout

    @abstractmethod
    def online_times(self, client: int) -> OnlineTimes | None:
        """Return when a client is online; None for never. All clients with a period have the same one."""

    def drops_out(self, client: int, round: int, attempt: int) -> bool:
        """Return whether a client trains in this attempt at a round, and its reply is lost."""
        return float(numpy_generator(self._seed, "dropout", client, round, attempt).uniform()) < self._dropout


class Always(Availability):
    """All clients are always online, and none drops out."""

    def online_times(self, client: int) -> OnlineTimes | None:
        return ALWAYS_ONLINE


class Diurnal(Availability):
    r"""Daily rhythm: each client is online for a fraction of every period. The start is drawn once per client.

    $$
    \text{online if} \quad (\tau - s_k) \bmod P < f P \qquad s_k \sim U(0, P)
    $$

    with $\tau$ the virtual time, P the period and f the fraction.
    """

    def __init__(self, *, num_clients: int, seed: int, fraction: float, period: float, dropout: float) -> None:
        check_arguments("availability", fraction=fraction, period=period, dropout=dropout)
        super().__init__(num_clients=num_clients, seed=seed, dropout=dropout)
        self._fraction, self._period = fraction, period

    def online_times(self, client: int) -> OnlineTimes | None:
        """Return the interval of a client, which starts at a uniform time of day."""
        if self._fraction == 1:
            return ALWAYS_ONLINE
        start = self._period * float(numpy_generator(self._seed, "availability", client).uniform())
        return OnlineTimes(((start, start + self._fraction * self._period),), period=self._period)


class Trace(Availability):
    """Intervals from a CSV file, [start, end) in any order. Overlapping ones are merged."""

    def __init__(
        self, *, num_clients: int, seed: int, file: str | Path | None, period: float | None, dropout: float
    ) -> None:
        check_arguments("availability", owner="Trace", period=period, dropout=dropout)
        super().__init__(num_clients=num_clients, seed=seed, dropout=dropout)
        if file is None:
            raise InputError(f"availability=trace needs availability.file, a CSV file of {HEADER}; set it")
        self._times = read_intervals(Path(file), num_clients=num_clients, period=period)

    def online_times(self, client: int) -> OnlineTimes | None:
        return self._times.get(client)


def read_intervals(file: Path, *, num_clients: int, period: float | None) -> Mapping[int, OnlineTimes]:
    """Return when each client of a file is online; raises `InputError`."""
    setting = f"availability.file={file}"
    intervals: dict[int, list[tuple[float, float]]] = {}
    for place, values in read_rows(file, HEADER, setting=setting, content=f"of {HEADER}"):
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
