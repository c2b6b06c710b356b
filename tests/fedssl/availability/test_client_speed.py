"""The time of a client's round, and the speeds that it follows from."""

import re

import numpy as np
import pytest

from fedssl.availability import LogNormalSpeed, Speed, TraceSpeed, Workload, client_seconds
from fedssl.errors import InputError

HEADER = "client,flops_per_second,upload_bytes_per_second,download_bytes_per_second\n"


def test_the_time_of_a_round_by_hand():
    """4 MB at 2 MB/s take 2 s, 3 GFLOP at 1.5 GFLOP/s take 2 s, and 1 MB at 0.25 MB/s takes 4 s: 8 s."""
    work = Workload(client=0, round=1, flops=3e9, bytes_down=4_000_000, bytes_up=1_000_000)
    speed = Speed(flops_per_second=1.5e9, upload_bytes_per_second=0.25e6, download_bytes_per_second=2e6)
    assert client_seconds(work, speed) == 8.0


def lognormal(**settings):
    medians = {"flops_per_second": 1e9, "upload_bytes_per_second": 2e6, "download_bytes_per_second": 8e6}
    return LogNormalSpeed(num_clients=5, seed=3, **{**medians, "sigma_clients": 0.6, "sigma_rounds": 0.3, **settings})


def test_speeds_are_log_normal_with_a_part_per_client():
    """ln(speed / median) = sigma_clients u + sigma_rounds v: variance 0.36 + 0.09, covariance between rounds 0.36."""
    model = lognormal()
    speeds = [[model.speed(client, round) for round in (1, 2)] for client in range(3000)]
    computation = np.log([[speed.flops_per_second / 1e9 for speed in pair] for pair in speeds])
    bandwidth = np.log([[speed.upload_bytes_per_second / 2e6 for speed in pair] for pair in speeds])
    for logs in (computation, bandwidth):
        assert logs.mean() == pytest.approx(0, abs=0.05)
        np.testing.assert_allclose(np.cov(logs.T), [[0.45, 0.36], [0.36, 0.45]], atol=0.04)
    assert np.corrcoef(computation[:, 0], bandwidth[:, 0])[0, 1] == pytest.approx(0, abs=0.06)
    for pair in speeds[:10]:  # both directions of a link
        assert pair[0].download_bytes_per_second == pytest.approx(4 * pair[0].upload_bytes_per_second)


def test_a_trace_has_the_speeds_of_its_lines(tmp_path):
    file = tmp_path / "speed.csv"
    file.write_text(f"{HEADER}1,2e9,3000,4000\n0,1e9,1000.5,2000\n")
    model = TraceSpeed(num_clients=2, seed=0, file=file)
    assert model.speed(0, 5) == Speed(1e9, 1000.5, 2000)
    assert model.speed(1, 1) == Speed(2e9, 3000, 4000)


BAD = {
    "another header": (
        "client,flops\n0,1\n",
        "begins with 'client,flops'; its first line must be client,flops_per_second",
    ),
    "a client twice": (f"{HEADER}0,1,1,1\n0,2,2,2\n", "line 3: client 0 has a line already; remove one of them"),
    "a client is missing": (
        f"{HEADER}0,1,1,1\n",
        "has no line for client 1; add one for each of the num_clients=2 clients",
    ),
    "too slow": (
        f"{HEADER}0,1e9,0,1\n",
        "line 2: upload_bytes_per_second=0 must be a number from 1 to 1e+15; correct it",
    ),
    "an unknown client": (f"{HEADER}2,1,1,1\n", "line 2: there is no client 2; the num_clients=2 clients are 0 to 1"),
    "no number": (f"{HEADER}0,fast,1,1\n", "line 2: flops_per_second=fast must be a number"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_trace_is_rejected_with_one_sentence(case, tmp_path):
    text, message = BAD[case]
    file = tmp_path / "speed.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=f"^client_speed.file=.*speed.csv.*{re.escape(message)}") as found:
        TraceSpeed(num_clients=2, seed=0, file=file)
    assert "\n" not in str(found.value)


def test_a_missing_trace_and_impossible_speeds_are_rejected(tmp_path):
    with pytest.raises(InputError, match="client_speed=trace needs client_speed.file, a CSV file of client,flops"):
        TraceSpeed(num_clients=2, seed=0, file=None)
    with pytest.raises(InputError, match="no.csv does not exist; choose a CSV file of client,flops_per_second"):
        TraceSpeed(num_clients=2, seed=0, file=tmp_path / "no.csv")
    with pytest.raises(InputError, match="client_speed.flops_per_second=0 must be a number of at least 1"):
        lognormal(flops_per_second=0)
