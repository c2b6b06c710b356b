"""The engine of ``engine=auto``, and the resources of a client."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fedssl.config.load import compose
from fedssl.config.settings import EngineSettings, MachineSettings
from fedssl.errors import InputError
from simulation import resources
from simulation.resources import (
    ClientMemory,
    ClientResources,
    EngineChoice,
    Host,
    auto_engine,
    check_local_cuda,
    clients_of_gpus,
    fit_clients,
    number_of_steps,
    plan_client_resources,
)
from simulation.run import run

WORDS = ["num_clients=4", "clients_per_round=3", "rounds=5", "local_epochs=2", "dataset.limit=400", "batch_size=50"]


def test_steps_by_hand():
    """Each of 4 clients has 100 images, i.e. 2 batches; 5 rounds of 3 clients with 2 epochs make 30 epochs."""
    assert number_of_steps(compose(WORDS)) == 60


@pytest.mark.parametrize(
    ("cores", "threads", "step", "expected"),
    [
        # 60 steps of 1 s; n concurrent clients save 60 (1 - 1/n) s.
        (2, 1, 1.0, EngineChoice("ray", 2, "about 60 s of training, clients at once: 2")),
        (2, 1, 0.3, EngineChoice("local", 2, "about 18 s of training, clients at once: 2")),  # saves 9 s
        (16, 1, 0.3, EngineChoice("ray", 3, "about 18 s of training, clients at once: 3")),  # saves 12 s
        (2, 2, 100.0, EngineChoice("local", 1, "fewer than two clients fit on this machine at once")),
        (1, 1, 100.0, EngineChoice("local", 1, "fewer than two clients fit on this machine at once")),
    ],
)
def test_ray_is_selected_if_it_saves_more_than_its_start(monkeypatch, cores, threads, step, expected):
    monkeypatch.setattr(resources, "available_cores", lambda: cores)
    monkeypatch.setattr(resources, "seconds_per_step", lambda settings: step)
    assert auto_engine(compose([*WORDS, f"threads={threads}", "device=cpu"])) == expected


def test_ray_of_the_users_program_is_left_alone(monkeypatch):
    monkeypatch.setattr(resources, "available_cores", lambda: 2)
    monkeypatch.setattr(resources, "seconds_per_step", lambda settings: 100.0)
    for initialized, engine in ((False, "ray"), (True, "local")):
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda known=initialized: known))
        assert auto_engine(compose([*WORDS, "threads=1", "device=cpu"])).engine == engine


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (
            2_500_000_000,
            EngineChoice("ray", 2, "about 60 s of training, clients at once: 2, because each needs 1.0 GB of memory"),
        ),
        (
            500_000_000,
            EngineChoice("local", 1, "about 60 s of training, clients at once: 1, because each needs 1.0 GB of memory"),
        ),
        (None, EngineChoice("ray", 3, "about 60 s of training, clients at once: 3")),
    ],
)
def test_memory_limits_the_concurrency(monkeypatch, free, expected):
    for name, value in {"available_cores": 16, "available_memory": free, "peak_memory": 1_000_000_000}.items():
        monkeypatch.setattr(resources, name, lambda value=value: value)
    monkeypatch.setattr(resources, "seconds_per_step", lambda settings: 1.0)
    assert auto_engine(compose([*WORDS, "threads=1", "device=cpu"])) == expected


def test_a_strategy_rejects_settings_before_the_measurement(monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "available_cores", lambda: 2)
    monkeypatch.setattr(resources, "seconds_per_step", lambda settings: pytest.fail("it was measured"))
    contradiction = ["strategy=l_dawa", "strategy.normalize=true", "strategy.scale_at=client"]
    with pytest.raises(InputError, match="strategy.normalize=true needs the cosines on the server"):
        run([*WORDS, "threads=1", "device=cpu", *contradiction, f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("hosts", "wishes", "expected"),
    [
        # Without GPUs: one CPU per thread; at most the clients of a round.
        ([Host(16, 0)], {"threads": 4}, (ClientResources(4, 0), 4)),
        ([Host(16, 0)], {"threads": 1, "max_clients": 10}, (ClientResources(1, 0), 10)),
        ([Host(2, 0)], {"threads": 4}, (ClientResources(2, 0), 1)),
        ([Host(16, 0)], {"threads": 1, "client_cpus": 5}, (ClientResources(5, 0), 3)),
        # With GPUs: every GPU has the same number of clients.
        ([Host(16, 1)], {"threads": 4}, (ClientResources(1, 0.25), 4)),
        ([Host(4, 4)], {"threads": 4}, (ClientResources(1, 1.0), 4)),
        ([Host(4, 2)], {"threads": 1}, (ClientResources(1, 0.5), 4)),
        ([Host(64, 8)], {"threads": 4}, (ClientResources(1, 0.25), 32)),
        ([Host(64, 8)], {"threads": 4, "max_clients": 5}, (ClientResources(1, 1.0), 5)),
        ([Host(6, 2)], {"threads": 4}, (ClientResources(1, 0.3333), 6)),
        ([Host(5, 2)], {"threads": 4}, (ClientResources(1, 0.5), 4)),
        ([Host(16, 1)], {"threads": 4, "max_per_gpu": 2}, (ClientResources(1, 0.5), 2)),
        ([Host(64, 8)], {"threads": 4, "max_per_gpu": 1}, (ClientResources(1, 1.0), 8)),
        ([Host(16, 1)], {"threads": 4, "client_gpus": 0.25, "max_per_gpu": 2}, (ClientResources(1, 0.25), 4)),
        # Settings of the user. Ray would round 0.1428571 to 0.1429, of which a GPU has six.
        ([Host(16, 1)], {"threads": 4, "client_gpus": 0.1428571}, (ClientResources(1, 0.1428), 7)),
        ([Host(16, 1)], {"threads": 4, "client_gpus": 0.3}, (ClientResources(1, 0.3), 3)),
        ([Host(16, 1)], {"threads": 4, "client_gpus": 0.29}, (ClientResources(1, 0.29), 3)),
        ([Host(16, 2)], {"threads": 4, "client_gpus": 0.5}, (ClientResources(1, 0.5), 4)),
        ([Host(16, 4)], {"threads": 4, "client_gpus": 2}, (ClientResources(1, 2), 2)),
        ([Host(16, 2)], {"threads": 4, "client_gpus": 0.75}, (ClientResources(1, 0.75), 2)),
        ([Host(16, 2)], {"threads": 4, "client_gpus": 0}, (ClientResources(4, 0), 4)),
        ([Host(16, 2)], {"threads": 4, "client_cpus": 8}, (ClientResources(8, 1.0), 2)),
        # Several hosts: a client is on one of them, with the same resources on all hosts.
        ([Host(3, 0), Host(5, 0)], {"threads": 2}, (ClientResources(2, 0), 3)),
        ([Host(2, 0), Host(8, 0)], {"threads": 4}, (ClientResources(4, 0), 2)),
        ([Host(2, 2), Host(2, 2)], {"threads": 4}, (ClientResources(1, 1.0), 4)),
        ([Host(8, 2), Host(8, 2)], {"threads": 4}, (ClientResources(1, 0.25), 16)),
        ([Host(8, 0), Host(8, 2)], {"threads": 4}, (ClientResources(1, 0.25), 8)),
        ([Host(8, 2), Host(8, 2)], {"threads": 4, "client_gpus": 0.5}, (ClientResources(1, 0.5), 8)),
        ([Host(8, 1), Host(8, 3)], {"threads": 4, "client_gpus": 2}, (ClientResources(1, 2), 1)),
    ],
)
def test_resources_of_a_client(hosts, wishes, expected):
    assert fit_clients(hosts, **{"client_cpus": None, "client_gpus": None, "max_clients": 100, **wishes}) == expected


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"client_cpus": 5}, "engine.client_cpus=5 .* from 1 to 4, the number of CPUs"),
        ({"client_cpus": 0}, "engine.client_cpus=0 .* from 1"),
        ({"client_cpus": 1.5}, "engine.client_cpus=1.5 .* whole number"),
        ({"client_gpus": -0.5}, "engine.client_gpus=-0.5"),
        ({"client_gpus": 0.00005}, "engine.client_gpus=5e-05 must be 0, a share from 0.0001 to 1, or a whole number"),
        ({"client_gpus": 1.5}, "engine.client_gpus=1.5 .* whole number"),
        ({"client_gpus": 3}, "engine.client_gpus=3 but clients can use 2 GPUs; set engine.client_gpus=0"),
    ],
)
def test_missing_resources_are_rejected(wishes, sentence):
    with pytest.raises(InputError, match=sentence):
        fit_clients(
            [Host(4, 2)], **{"client_cpus": None, "client_gpus": None, "threads": 1, "max_clients": 100, **wishes}
        )


@pytest.mark.parametrize(
    ("hosts", "wishes", "found"),
    [
        ([Host(8, 0), Host(0, 4)], {}, "1 CPUs and 1 GPUs"),
        ([Host(8, 0), Host(2, 4)], {"client_cpus": 4, "client_gpus": 0.5}, "4 CPUs and 0.5 GPUs"),
        ([Host(8, 1), Host(2, 4)], {"client_cpus": 4, "client_gpus": 2}, "4 CPUs and 2 GPUs"),
    ],
)
def test_a_host_needs_cpus_and_gpus_for_a_client(hosts, wishes, found):
    wishes = {"client_cpus": None, "client_gpus": None, "threads": 1, "max_clients": 100, **wishes}
    with pytest.raises(InputError, match=f"no host has {found} for a client; set engine.client_cpus or engine.client_"):
        fit_clients(hosts, **wishes)


@pytest.mark.parametrize(
    ("hosts", "client", "clients", "expected"),
    [
        ([Host(8, 4)], ClientResources(1, 0.25), 3, [[1, 1, 1, 0]]),
        ([Host(8, 4)], ClientResources(1, 0.25), 6, [[2, 2, 1, 1]]),
        ([Host(8, 4)], ClientResources(1, 0.5), 8, [[2, 2, 2, 2]]),
        ([Host(8, 2)], ClientResources(1, 0.3333), 6, [[3, 3]]),
        ([Host(8, 2)], ClientResources(1, 0.75), 2, [[1, 1]]),
        # Two hosts with different numbers of GPUs, of which the second has few CPUs.
        ([Host(8, 1), Host(4, 3)], ClientResources(1, 0.25), 5, [[2], [1, 1, 1]]),
        ([Host(8, 1), Host(2, 3)], ClientResources(1, 0.25), 6, [[4], [1, 1, 0]]),
        ([Host(8, 0), Host(5, 2)], ClientResources(2, 0.5), 2, [[], [1, 1]]),
    ],
)
def test_every_gpu_has_a_client_before_any_has_two(hosts, client, clients, expected):
    assert clients_of_gpus(hosts, client=client, clients=clients) == expected


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, "4 clients at once, each on 1 of 16 CPUs and 0.25 of 1 GPUs"),
        (ClientMemory(80 * 10**9, 10**9), "4 clients at once, each on 1 of 16 CPUs and 0.25 of 1 GPUs"),
        (
            ClientMemory(8 * 10**9, 3 * 10**9),
            "2 clients at once, each on 1 of 16 CPUs and 0.5 of 1 GPUs, because each needs 3.0 GB of GPU memory",
        ),
        (
            ClientMemory(8 * 10**9, 5 * 10**9),
            "1 clients at once, each on 1 of 16 CPUs and 1 of 1 GPUs, because each needs 5.0 GB of GPU memory",
        ),
    ],
)
def test_measured_memory_limits_the_clients_of_a_gpu(memory, expected, capsys):
    plan_client_resources([Host(16, 1)], **settings(), measure=lambda: memory)
    assert capsys.readouterr().out == expected + "\n"


def test_a_client_with_a_whole_gpu_is_not_measured():
    client, clients = plan_client_resources([Host(1, 1)], **settings(), measure=lambda: pytest.fail("measured"))
    assert (client.gpus, clients) == (1, 1)


def settings(*, device="auto", threads=1, client_gpus=None):
    return {
        "engine": EngineSettings(name="ray", address=None, client_cpus=None, client_gpus=client_gpus),
        "machine": MachineSettings(device=device, threads=threads, keep_freed_memory=True, compile_encoder=False),
        "max_clients": 100,
    }


@pytest.mark.parametrize(
    ("free", "each", "expected"), [(10, 3, 3), (10, 2, 5), (10, 10, 1), (10, 11, 1), (10**9, 10, 10**8)]
)
def test_clients_that_fit_into_the_memory_of_a_gpu(free, each, expected):
    assert ClientMemory(free, each).clients == expected


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (1, [], "local"),
        (2, [], "ray"),
        (4, ["clients_per_round=1"], "local"),
        (2, ["device=cpu", "threads=99"], "local"),
        (2, ["device=cuda:1"], "local"),
    ],
)
def test_several_gpus_are_used(monkeypatch, gpus, overrides, expected):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    assert auto_engine(compose([*WORDS, *overrides])).engine == expected


def test_clients_that_ray_trains_on_cpus_have_no_cuda(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    words = [*WORDS, "gpu_augmentation=triton"]
    check_local_cuda(compose(words))
    with pytest.raises(InputError, match="gpu_augmentation=triton needs device=cuda but the device is cpu"):
        check_local_cuda(compose([*words, "engine.client_gpus=0"]))


def test_clients_on_ray_are_not_all_on_one_gpu():
    with pytest.raises(InputError, match="device=cuda:1 is one device but engine=ray .* set device=cuda, or engine=l"):
        plan_client_resources([Host(4, 2)], **settings(device="cuda:1"))
