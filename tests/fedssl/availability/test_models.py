"""Models of availability, and their traces."""

import re

import numpy as np
import pytest

from fedssl.availability import Diurnal, Trace
from fedssl.errors import InputError

DAY = 86400.0


def diurnal(*, num_clients=1000, seed=0, fraction=0.25, period=DAY, dropout=0.0):
    return Diurnal(num_clients=num_clients, seed=seed, fraction=fraction, period=period, dropout=dropout)


def trace(folder, text, *, period=None):
    file = folder / "online.csv"
    file.write_text(text)
    return Trace(num_clients=4, seed=0, file=file, period=period, dropout=0.0)


def test_each_client_is_online_for_its_fraction_of_a_day():
    model = diurnal()
    times = [model.online_times(client) for client in range(1000)]
    hours = np.linspace(0, DAY, 240, endpoint=False)
    online = np.array([[one.online_until(hour) is not None for hour in hours] for one in times])
    np.testing.assert_allclose(online.mean(axis=1), 0.25, atol=1 / 240)  # of each client's day
    np.testing.assert_allclose(online.mean(axis=0), 0.25, atol=0.06)  # of all clients, at any hour: 4 sigma = 0.055
    for one in times[:20]:
        assert (
            one.online_until(5.5 * DAY) == one.online_until(0.5 * DAY)
            or one.online_until(0.5 * DAY) is None
            or (one.online_until(5.5 * DAY) == pytest.approx(one.online_until(0.5 * DAY) + 5 * DAY))
        )


def test_drop_outs_have_their_probability_and_differ_between_attempts():
    model = diurnal(dropout=0.3)
    lost = np.array([[model.drops_out(client, 1, attempt) for attempt in (0, 1)] for client in range(2000)])
    np.testing.assert_allclose(lost.mean(axis=0), 0.3, atol=0.05)  # 4 sigma = 0.041
    assert np.mean(lost[:, 0] & lost[:, 1]) == pytest.approx(0.09, abs=0.03)
    assert not any(diurnal().drops_out(client, 1, 0) for client in range(100))
    assert all(diurnal(dropout=1).drops_out(client, 1, 0) for client in range(100))


def test_a_trace_has_the_intervals_of_its_lines(tmp_path):
    model = trace(tmp_path, "client,start,end\n2,10,20\n0,0,5.5\n2,0,4\n2,15,25\n")
    assert model.online_times(0).intervals == ((0, 5.5),)
    assert model.online_times(2).intervals == ((0, 4), (10, 25))
    assert model.online_times(1) is model.online_times(3) is None
    again = trace(tmp_path, "client,start,end\n1,2,4\n", period=10)
    assert again.online_times(1).online_until(33) == 34


BAD = {
    "is no CSV": (
        'client,start,end\n0,"1,2\n',
        "is not a CSV file (unexpected end of data); choose a CSV file of client,",
    ),
    "empty": ("", "begins with ''; its first line must be client,start,end"),
    "another header": (
        "client,begin,end\n0,1\n",
        "begins with 'client,begin,end'; its first line must be client,start,end",
    ),
    "a short line": ("client,start,end\n0,1\n", "line 2, has 2 values for the 3 columns client,start,end"),
    "no client": ("client,start,end\n-1,1,2\n", "line 2: '-1' is no client; write a whole number from 0"),
    "an unknown client": (
        "client,start,end\n0,1,2\n4,1,2\n",
        "line 3: there is no client 4; the num_clients=4 clients are 0 to 3",
    ),
    "no number": ("client,start,end\n0,noon,2\n", "line 2: start=noon must be a number from 0 to 1e+15; correct it"),
    "nan": ("client,start,end\n0,1,nan\n", "line 2: end=nan must be a number from 0"),
    "infinity": ("client,start,end\n0,1,inf\n", "line 2: end=inf must be a number from 0"),
    "below zero": ("client,start,end\n0,-1,2\n", "line 2: start=-1 must be a number from 0"),
    "an end before the start": ("client,start,end\n0,3,2\n", "line 2: end=2 is not after start=3; write a later end"),
    "no interval": ("client,start,end\n", "has no intervals, so that no client is ever online"),
    "after the period": ("client,start,end\n0,3,11\n", "line 2: end=11 is after availability.period=10"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_trace_is_rejected_with_one_sentence(case, tmp_path):
    text, message = BAD[case]
    with pytest.raises(InputError, match=f"^availability.file=.*online.csv.*{re.escape(message)}") as found:
        trace(tmp_path, text, period=10)
    assert "\n" not in str(found.value)


def test_a_missing_trace_is_rejected(tmp_path):
    for file, message in (
        (None, "needs availability.file, a CSV file of client,start,end; set it"),
        (tmp_path / "no.csv", "no.csv does not exist; choose a CSV file of client,start,end"),
    ):
        with pytest.raises(InputError, match=message):
            Trace(num_clients=2, seed=0, file=file, period=None, dropout=0.0)


def test_settings_out_of_range_are_rejected():
    for settings, message in (
        ({"fraction": 0.0}, "availability.fraction=0.0 must be a number above 0 and at most 1"),
        ({"dropout": 1.5}, "availability.dropout=1.5 must be at most 1"),
        ({"period": 0}, "availability.period=0 must be a number of at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            diurnal(**settings)
