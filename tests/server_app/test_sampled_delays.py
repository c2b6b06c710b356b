"""Simulations that use the first replies, of buffered (FedBuff) or over-selected clients: virtual delays decide."""

from pathlib import Path

import numpy as np
import pytest

from fedssl.availability import Workload
from fedssl.errors import InputError
from fedssl.seeding import numpy_generator
from server_app.exchanges.virtual_time import sample_delay
from simulation.run import run
from tests.federation import Federation
from tests.runs import read_lines

OVERRIDES = ["num_clients=6", "clients_per_round=4", "rounds=6", "local_epochs=1", "dataset.limit=90"]
OVERRIDES += ["encoder.width=2"]
OVERRIDES += ["threads=1", "evaluation=none", "final_evaluation=none", "measure_resources=false", "partition=iid"]
OVERRIDES += ["strategy=fedavg", "batch_size=8", "seed=3"]
BUFFERED = [*OVERRIDES, "aggregation.buffered=true", "aggregation.min_updates=2"]


def delay(client: int, round: int, *, sigma: float, seed: int) -> float:
    work = Workload(client=client, round=round, flops=0.0, bytes_down=0, bytes_up=0)
    return sample_delay(work, sigma=sigma, seed=seed)


def participations(folder: Path) -> list[tuple[int, int, int]]:
    return [(line["round"], line["client"], line["staleness"]) for line in read_lines(folder / "clients.jsonl")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buffered") / "run"
    run([*BUFFERED, "engine=local", "keep_checkpoints=9", f"output_dir={folder}"])
    return folder


def test_rounds_use_the_replies_that_arrive_first(folder: Path) -> None:
    """The schedule by hand: a queue of arrival times, of which each round takes the two smallest."""
    queue: dict[int, tuple[float, int]] = {}  # arrival time and round of the message by client
    clock, expected = 0.0, []
    for round in range(1, 7):
        free = [client for client in range(6) if client not in queue]
        sampled = numpy_generator(3, "clients", round).choice(len(free), size=4 - len(queue), replace=False)
        for index in sampled:
            client = free[index]
            queue[client] = (clock + delay(client, round, sigma=1.0, seed=3), round)
        for client in sorted(queue, key=queue.__getitem__)[:2]:
            clock, sent = queue.pop(client)
            expected.append((round, client, round - sent))
    assert sorted(participations(folder)) == sorted(expected)
    assert any(staleness > 0 for _, _, staleness in expected)
    assert [(line["clients"], line["dropped"]) for line in read_lines(folder / "metrics.jsonl")] == [(2, {})] * 6


def test_delays_are_log_normal_with_a_part_per_client() -> None:
    # ln(delay) = sigma (u_k + v_kr) / sqrt(2): variance sigma^2, and covariance sigma^2 / 2 between rounds of a client.
    delays = [[delay(client, round, sigma=0.8, seed=0) for round in (1, 2)] for client in range(2000)]
    logs = np.log(delays)
    assert logs.mean() == pytest.approx(0, abs=0.05)
    assert logs.var() == pytest.approx(0.64, abs=0.05)
    assert np.cov(logs.T)[0, 1] == pytest.approx(0.32, abs=0.05)
    assert delay(5, 1, sigma=0.0, seed=0) == 1


def test_over_selection_uses_the_clients_with_the_shortest_delays(tmp_path: Path) -> None:
    """The clients 4 and 5 are among them, although simulated clients run in the order of their ids."""
    folder, expected = tmp_path / "run", []
    overrides = ["clients_per_round=2", "aggregation.over_selection=2", "rounds=12", "engine=local"]
    run([*OVERRIDES, *overrides, f"output_dir={folder}"])
    for round in range(1, 13):
        sampled = numpy_generator(3, "clients", round).choice(6, size=4, replace=False)
        arrivals = sorted((delay(int(client), round, sigma=1.0, seed=3), int(client)) for client in sampled)
        expected += [(round, client, 0) for _, client in arrivals[:2]]
    assert sorted(participations(folder)) == sorted(expected)
    assert {client for _, client, _ in expected} == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["aggregation.buffered=true"], "aggregation.buffered=true"),
        (["clients_per_round=3", "aggregation.over_selection=1"], "aggregation.over_selection=1"),
    ],
)
def test_a_deadline_is_rejected(tmp_path: Path, overrides: list[str], setting: str) -> None:
    message = f"round_deadline=5 is in seconds of devices, but with {setting} .* set aggregation.round_deadline=null"
    with pytest.raises(InputError, match=message):
        run([*OVERRIDES, *overrides, "aggregation.round_deadline=5", f"output_dir={tmp_path / 'run'}"])


def test_a_wall_clock_deadline_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deadline = ["aggregation.round_deadline=500", "measure_resources=true"]
    Federation(tmp_path, *deadline)
    message = "aggregation.round_deadline=500 is in wall-clock seconds, and simulated clients run in the order of"
    assert caplog.text.count(message) == 1
    caplog.clear()
    Federation(tmp_path, *deadline, "client_speed=lognormal")
    Federation(tmp_path)
    assert not caplog.text
