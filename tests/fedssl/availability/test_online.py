"""When clients are online: intervals, their repetitions, and the first time at which enough are online together."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fedssl.availability import ALWAYS_ONLINE, OnlineTimes, first_time_online, online_times


def test_intervals_that_do_not_repeat():
    times = online_times([(5, 7), (1, 3)], period=None)
    found = [(time, times.online_until(time), times.next_start(time)) for time in (0, 1, 2.9, 3, 5, 6.5, 7, 100)]
    assert found == [
        (0, None, 1),
        (1, 3, 5),  # an interval contains its start
        (2.9, 3, 5),
        (3, None, 5),  # but not its end
        (5, 7, math.inf),
        (6.5, 7, math.inf),
        (7, None, math.inf),
        (100, None, math.inf),
    ]


def test_intervals_that_repeat_and_pass_midnight():
    """Online from 20 to 4 o'clock: at 3 o'clock of day 2 (time 51) until 52, at 23 o'clock (71) until 76."""
    times = online_times([(0, 4), (20, 24)], period=24)
    assert times == OnlineTimes(((20, 28),), 24)
    assert (times.online_until(51), times.online_until(71), times.online_until(53)) == (52, 76, None)
    assert (times.online_until(0), times.next_start(0), times.next_start(53)) == (4, 20, 68)


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=12, unique=True),
    st.sampled_from([None, 41, 60.3]),
    st.floats(0, 500),
)
def test_they_equal_a_search_over_all_repetitions(bounds, period, time):
    bounds = sorted(bounds)
    intervals = list(zip(bounds[::2], bounds[1::2], strict=False))
    numbers = range(20) if period else [0]
    repeated = [(start + n * (period or 0), end + n * (period or 0)) for n in numbers for start, end in intervals]
    times = online_times(intervals, period=period)
    assert times.online_until(time) == next((end for start, end in repeated if start <= time < end), None)
    assert times.next_start(time) == next((start for start, _ in repeated if start > time), math.inf)


@given(st.floats(0, 1), st.floats(1, 1e6), st.floats(0, 1e9))
def test_a_client_is_online_when_its_interval_starts(start, period, time):
    times = OnlineTimes(((start * period, start * period + period / 2),), period)
    following = times.next_start(time)
    assert following > time
    assert times.online_until(following) > following


def test_the_first_time_at_which_enough_are_online():
    """Clients 0 to 2 are online from 0 to 2, 1 to 4 and 3 to 5 of every 10: two are from 1 to 2 and from 3 to 4."""
    times = [online_times([interval], period=10) for interval in ((0, 2), (1, 4), (3, 5))]
    found = {after: first_time_online(times, after, number=2) for after in (0, 1, 1.5, 2, 3.5, 4, 9)}
    assert found == {0: 1, 1: 1, 1.5: 1.5, 2: 3, 3.5: 3.5, 4: 11, 9: 11}
    assert first_time_online(times, 7, number=1) == 10
    assert first_time_online(times, 7, number=0) == 7
    assert first_time_online([*times, ALWAYS_ONLINE], 7, number=3) == 11
    for never in (3, 4):
        assert first_time_online(times, 0, number=never) is None
    assert first_time_online([online_times([(1, 2)], period=None)], 3, number=1) is None
    assert first_time_online([ALWAYS_ONLINE], 3, number=2) is None
    assert first_time_online([], 3, number=1) is None


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=3), max_size=5),
    st.sampled_from([None, 15]),
    st.integers(0, 40),
    st.integers(0, 4),
)
def test_the_first_time_equals_a_search_of_all_starts(clients, period, after, number):
    times = [online_times([(start, start + length) for start, length in one], period=period) for one in clients]
    starts = sorted({after, *(n * (period or 0) + start for one in clients for start, _ in one for n in range(5))})
    horizon = after + (period or math.inf)
    enough = (
        time
        for time in starts
        if after <= time <= horizon and sum(one.online_until(time) is not None for one in times) >= number
    )
    assert first_time_online(times, after, number=number) == next(enough, None)
