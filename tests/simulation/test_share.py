"""What of the hosts a client gets."""

import pytest

from fedssl.config.settings import EngineSettings, MachineSettings
from fedssl.errors import InputError
from simulation.share import ClientResources, Host, fit_clients, plan_client_resources


@pytest.mark.parametrize(
    ("hosts", "wishes", "expected"),
    [
        # Without GPUs: as many CPUs as threads; no more clients than take part in a round.
        ([Host(16, 0)], {"threads": 4}, (ClientResources(4, 0), 4)),
        ([Host(16, 0)], {"threads": 1, "max_clients": 10}, (ClientResources(1, 0), 10)),
        ([Host(2, 0)], {"threads": 4}, (ClientResources(2, 0), 1)),
        ([Host(16, 0)], {"threads": 1, "client_cpus": 5}, (ClientResources(5, 0), 3)),
        # With GPUs: every GPU gets as many clients as another. Ray fills one GPU before it takes the next, so that
        # shares must be as large as they can be.
        ([Host(16, 1)], {"threads": 4}, (ClientResources(1, 0.25), 4)),
        ([Host(4, 4)], {"threads": 4}, (ClientResources(1, 1.0), 4)),
        ([Host(4, 2)], {"threads": 1}, (ClientResources(1, 0.5), 4)),
        ([Host(64, 8)], {"threads": 4}, (ClientResources(1, 0.25), 32)),
        ([Host(64, 8)], {"threads": 4, "max_clients": 5}, (ClientResources(1, 1.0), 5)),
        ([Host(6, 2)], {"threads": 4}, (ClientResources(1, 0.3333), 6)),
        ([Host(5, 2)], {"threads": 4}, (ClientResources(1, 0.5), 4)),
        # As the user says.
        ([Host(16, 2)], {"threads": 4, "client_gpus": 0.5}, (ClientResources(1, 0.5), 4)),
        ([Host(16, 4)], {"threads": 4, "client_gpus": 2}, (ClientResources(1, 2), 2)),
        ([Host(16, 2)], {"threads": 4, "client_gpus": 0.75}, (ClientResources(1, 0.75), 2)),
        ([Host(16, 2)], {"threads": 4, "client_gpus": 0}, (ClientResources(4, 0), 4)),
        ([Host(16, 2)], {"threads": 4, "client_cpus": 8}, (ClientResources(8, 1.0), 2)),
        # Several hosts: a client is on one of them, and what it gets is alike on all.
        ([Host(3, 0), Host(5, 0)], {"threads": 2}, (ClientResources(2, 0), 3)),
        ([Host(2, 0), Host(8, 0)], {"threads": 4}, (ClientResources(4, 0), 2)),
        ([Host(2, 2), Host(2, 2)], {"threads": 4}, (ClientResources(1, 1.0), 4)),
        ([Host(8, 2), Host(8, 2)], {"threads": 4}, (ClientResources(1, 0.25), 16)),
        ([Host(8, 0), Host(8, 2)], {"threads": 4}, (ClientResources(1, 0.25), 8)),
        ([Host(8, 2), Host(8, 2)], {"threads": 4, "client_gpus": 0.5}, (ClientResources(1, 0.5), 8)),
        ([Host(8, 1), Host(8, 3)], {"threads": 4, "client_gpus": 2}, (ClientResources(1, 2), 1)),
    ],
)
def test_what_a_client_gets(hosts, wishes, expected):
    assert fit_clients(hosts, **{"client_cpus": None, "client_gpus": None, "max_clients": 100, **wishes}) == expected


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"client_cpus": 5}, "engine.client_cpus=5 .* from 1 to the 4 CPUs"),
        ({"client_cpus": 0}, "engine.client_cpus=0 .* from 1"),
        ({"client_cpus": 1.5}, "engine.client_cpus=1.5 .* whole number"),
        ({"client_gpus": -0.5}, "engine.client_gpus=-0.5"),
        ({"client_gpus": 1.5}, "engine.client_gpus=1.5 .* whole number"),
        ({"client_gpus": 3}, "engine.client_gpus=3 but clients can have 2 GPUs; set engine.client_gpus=0"),
    ],
)
def test_what_a_machine_has_not_is_refused(wishes, sentence):
    with pytest.raises(InputError, match=sentence):
        fit_clients(
            [Host(4, 2)], **{"client_cpus": None, "client_gpus": None, "threads": 1, "max_clients": 100, **wishes}
        )


def settings(*, device="auto", threads=1, client_gpus=None):
    return {
        "engine": EngineSettings(name="ray", address=None, client_cpus=None, client_gpus=client_gpus),
        "machine": MachineSettings(device=device, threads=threads, allocator=True, compile_encoder=False),
        "max_clients": 100,
    }


@pytest.mark.parametrize(
    ("wishes", "said", "warned"),
    [
        ({}, "4 clients at a time, each on 1 of 4 CPUs and 0.5 of 2 GPUs", False),
        ({"client_gpus": 0}, "4 clients at a time, each on 1 of 4 CPUs", True),
        ({"device": "cpu", "threads": 2}, "2 clients at a time, each on 2 of 4 CPUs", False),
    ],
)
def test_gpus_that_clients_do_not_get_are_said(wishes, said, warned, capsys, caplog):
    plan_client_resources([Host(4, 2)], **settings(**wishes))
    assert capsys.readouterr().out == said + "\n"
    assert ("though there are GPUs" in caplog.text) == warned
