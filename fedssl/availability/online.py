"""Intervals of virtual time in which a client is online, once or repeated."""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property


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
    time = after
    while time <= horizon and time < math.inf:
        if sum(client.online_until(time) is not None for client in times) >= number:
            return time
        time = min((client.next_start(time) for client in times), default=math.inf)
    return None
