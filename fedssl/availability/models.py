"""Models of availability: which clients are online at which virtual time, and which of them drop out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from fedssl.availability.online import ALWAYS_ONLINE, OnlineTimes, online_times
from fedssl.availability.trace_file import number_in, read_rows
from fedssl.config.constraints import check_arguments
from fedssl.errors import InputError
from fedssl.seeding import numpy_generator

HEADER = ("client", "start", "end")


class Availability(Protocol):
    """Availability of the clients 0 to ``num_clients - 1``."""

    def online_times(self, client: int) -> OnlineTimes | None:
        """Return when a client is online; None for never. All clients with a period have the same one."""
        ...

    def drops_out(self, client: int, round: int, attempt: int) -> bool:
        """Return whether a client trains in this attempt at a round, and its reply is lost."""
        ...


class Always(Availability):
    """All clients are always online, and none drops out."""

    def __init__(self, *, num_clients: int, seed: int) -> None:
        pass

    def online_times(self, client: int) -> OnlineTimes | None:
        return ALWAYS_ONLINE

    def drops_out(self, client: int, round: int, attempt: int) -> bool:
        return False


class Diurnal(Availability):
    r"""Daily rhythm: each client is online for a fraction of every period. The start is drawn once per client.

    $$
    \text{online if} \quad (\tau - s_k) \bmod P < f P \qquad s_k \sim U(0, P)
    $$

    with $\tau$ the virtual time, P the period and f the fraction.

    Parameters
    ----------
    fraction : float
        Of the period, above 0 and at most 1 (always online).
    period : float
        In seconds.
    dropout : float
        Probability that the reply of a client is lost, independently in every round. 0 disables it.
    """

    def __init__(self, *, num_clients: int, seed: int, fraction: float, period: float, dropout: float) -> None:
        check_arguments("availability", fraction=fraction, period=period, dropout=dropout)
        self._seed, self._fraction, self._period, self._dropout = seed, fraction, period, dropout

    def online_times(self, client: int) -> OnlineTimes | None:
        """Return the interval of a client, which starts at a uniform time of day."""
        if self._fraction == 1:
            return ALWAYS_ONLINE
        start = self._period * float(numpy_generator(self._seed, "availability", client).uniform())
        return OnlineTimes(((start, start + self._fraction * self._period),), period=self._period)

    def drops_out(self, client: int, round: int, attempt: int) -> bool:
        return draw_dropout(self._seed, client, round, attempt) < self._dropout


class Trace(Availability):
    """Intervals from a CSV file.

    Parameters
    ----------
    file : str or Path
        A CSV file with the columns ``client``, ``start`` and ``end``, in seconds: one line per interval [start, end),
        in any order. Overlapping intervals are merged. A client without a line is never online.
    period : float or None
        Seconds after which all intervals repeat; None: they do not.
    dropout : float
        As in `Diurnal`.
    """

    def __init__(
        self, *, num_clients: int, seed: int, file: str | Path | None, period: float | None, dropout: float
    ) -> None:
        check_arguments("availability", owner="Trace", period=period, dropout=dropout)
        self._seed, self._dropout = seed, dropout
        if file is None:
            raise InputError(f"availability=trace needs availability.file, a CSV file of {','.join(HEADER)}; set it")
        self._times = read_intervals(Path(file), num_clients=num_clients, period=period)

    def online_times(self, client: int) -> OnlineTimes | None:
        return self._times.get(client)

    def drops_out(self, client: int, round: int, attempt: int) -> bool:
        return draw_dropout(self._seed, client, round, attempt) < self._dropout


def draw_dropout(seed: int, client: int, round: int, attempt: int) -> float:
    """Return a uniform number in [0, 1) of a client in an attempt at a round."""
    return float(numpy_generator(seed, "dropout", client, round, attempt).uniform())


def read_intervals(file: Path, *, num_clients: int, period: float | None) -> Mapping[int, OnlineTimes]:
    """Return when each client of a file is online; raises `InputError`."""
    setting = f"availability.file={file}"
    intervals: dict[int, list[tuple[float, float]]] = {}
    for place, client, (start, end) in read_rows(file, setting=setting, header=HEADER, num_clients=num_clients):
        begin, finish = (
            number_in(text, name, place, minimum=0) for name, text in zip(HEADER[1:], (start, end), strict=True)
        )
        if finish <= begin:
            raise InputError(f"{place}: end={finish:g} is not after start={begin:g}; write a later end")
        if period is not None and finish > period:
            raise InputError(
                f"{place}: end={finish:g} is after availability.period={period:g}, when the intervals repeat; set a "
                "longer period, or null"
            )
        intervals.setdefault(client, []).append((begin, finish))
    if not intervals:
        raise InputError(f"{setting} has no intervals, so that no client is ever online; add a line for each")
    return {client: online_times(listed, period=period) for client, listed in intervals.items()}
