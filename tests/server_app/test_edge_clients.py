"""Runs with devices: their images, their names and numbers, and what a server without images does without."""

import json
import shutil
from importlib.metadata import version

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from omegaconf import OmegaConf

from fedssl.config.load import compose, load_settings
from fedssl.errors import InputError
from fedssl.wire.identity import NodeInfo
from server_app import nodes
from server_app.build import build_run
from server_app.devices import adapt_to_edge_clients
from server_app.fleet_file import FleetFile
from server_app.nodes import ClientDirectory, discover_clients
from simulation.grid import LocalGrid
from simulation.run import run as simulate
from tests.devices import SMALL, Devices, context, run_server_app, write_images, write_places
from tests.methods import overrides_of
from tests.runs import model_bits, read_lines


class AskedGrid(LocalGrid):
    """Nodes that the server has to ask, as those of a federation."""

    partition_nodes = None


@pytest.fixture
def places(tmp_path):
    """Folders of images of three owners, of whom each has another number."""
    return write_places(tmp_path / "images")


def devices(places, tmp_path, **others):
    return [
        context(data_path=place, state_path=tmp_path / "states", client_name=place.name, **others) for place in places
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=l_dawa_fedu", "method=byol", "schedule=layer_wise", "rounds=4"],
        ["strategy=scaffold", "clients_per_round=2", "wire_dtype=fp16"],
        *(
            pytest.param(overrides, marks=pytest.mark.heavy)
            for overrides in (
                ["strategy=fedbn"],
                ["strategy=feddyn"],
                ["strategy=fednova", "local_epochs=2"],
                ["strategy=moon", "optimizer=sam"],
                ["method=ssd", "method.hidden_dim=8", "strategy=fedexp", "model_average=ema"],
                ["method=fedsc", "method.projector.hidden_dim=8", "strategy=fedavg", "wire_dtype=int8"],
                [*overrides_of("mar"), "strategy=fedavg", "server_optimizer=fedadagrad"],
            )
        ),
    ],
)
def test_a_run_on_devices_has_the_simulations_bits(overrides, places, tmp_path):
    compare_with_simulation([*SMALL, "rounds=2", "seed=3", *overrides], places, tmp_path)


LORA = ["tuning=lora", "tuning.rank=2", "tuning.alpha=2", "method.projector.hidden_dim=8", "strategy=fedavg"]


def test_a_device_refuses_larger_ranks_if_ranks_are_equal(places, tmp_path):
    for aggregation in ("factors", "freeze_a"):
        overrides = [*SMALL, *LORA, "rounds=1", f"tuning.aggregation={aggregation}", "aggregation.min_updates=1"]
        made = devices(places, tmp_path / aggregation)
        made[1].node_config["max-rank"] = 1
        run_server_app(Devices(*made), [*overrides, f"output_dir={tmp_path / aggregation / 'run'}"])
        (metrics,) = read_lines(tmp_path / aggregation / "run" / "metrics.jsonl")
        assert list(metrics["dropped"]) == ["1"]
        assert metrics["dropped"]["1"].endswith(
            "the plan has low-rank factors of rank 2 but this device allows 1 (max-rank); set tuning.rank=1, or "
            "tuning.aggregation=svd or stack, which aggregate different ranks"
        )


def compare_with_simulation(overrides, places, tmp_path):
    """Run in a simulation and on devices; the results are the same."""
    own = [f"dataset.path={tmp_path / 'images'}", "dataset.folders=owner", "partition=natural", "num_clients=3"]
    simulate([*overrides, *own, f"output_dir={tmp_path / 'simulation'}"])
    table = (tmp_path / "simulation" / "partition.csv").read_text().splitlines()[1:]
    sizes = [int(line.split(",")[1]) for line in table]  # by which the owner of a partition is known
    by_partition = sorted(range(3), key=lambda place: sizes.index(9 + place))
    made = [
        context(
            data_path=places[place],
            state_path=tmp_path / "states",
            client_name=f"d{place}",
            partition_id=number,
        )
        for number, place in enumerate(by_partition)
    ]
    run_server_app(Devices(*reversed(made)), [*overrides, f"output_dir={tmp_path / 'devices'}"])
    assert model_bits(tmp_path / "simulation") == model_bits(tmp_path / "devices")
    rows, others = (read_lines(tmp_path / name / "clients.jsonl") for name in ("simulation", "devices"))
    for row in (*rows, *others):
        del row["seconds"], row["bytes_down"]  # the message with a task is shorter
    assert rows == others
    assert json.loads((tmp_path / "devices" / "devices.json").read_text()) == {
        f"d{place}": number for number, place in enumerate(by_partition)
    }


def test_a_device_that_cannot_take_part_is_left_out(places, tmp_path, caplog):
    good, bad = devices(places[:2], tmp_path)
    del bad.node_config["data-path"]
    found = discover_clients(Devices(good, bad), 2, timeout=60)
    assert (found.nodes, found.client_ids) == ({0: 2}, {"a": 0})
    assert "node 3 does not take part: it failed: this SuperNode has no folder of images" in caplog.text
    with pytest.raises(InputError, match="a client cannot start: this SuperNode has no folder of images"):
        discover_clients(Devices(bad), 1, timeout=60)


def test_devices_that_are_not_available_yet_are_counted(caplog):
    clients = ClientDirectory(nodes={0: 5, 1: 6}, client_ids={"a": 0, "b": 1})
    assert adapt_to_edge_clients(load_settings([]), clients).num_clients == 2
    assert not caplog.text  # nobody set a number
    assert adapt_to_edge_clients(load_settings(["num_clients=3"]), clients).num_clients == 2
    assert "2 of num_clients=3 devices are available; others take part from the round after" in caplog.text


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ([{"client_name": "b"}, {"client_name": "b"}], "has client-name=b like another node; set a different one"),
        (
            [{"client_name": "b", "partition_id": 1}, {"client_name": "c", "partition_id": 1}],
            "has partition-id=1 like another node; set a different one",
        ),
    ],
)
def test_devices_that_cannot_be_told_apart_are_left_out(others, sentence, places):
    grid = Devices(*(context(data_path=places[0], **one) for one in ({"client_name": "a"}, *others)))
    found = discover_clients(grid, 3, timeout=60)
    assert found.client_ids == {"a": 0}
    assert found.nodes == {0: 2}
    assert found.rejected.keys() == {3, 4}
    assert all(sentence in reason for reason in found.rejected.values())


def test_a_registered_name_belongs_to_its_key(places, tmp_path, caplog):
    """Node 3 calls itself garden, under which the key of node 2 is registered; node 4 has a key without a name."""
    names = ("anything", "garden", "shed")
    grid = Devices(*(context(data_path=place, client_name=name) for place, name in zip(places, names, strict=True)))
    found = discover_clients(grid, 3, timeout=60, node_names=lambda: {2: "garden"})
    assert found.client_ids == {"garden": 0, "shed": 1}
    assert found.nodes == {0: 2, 1: 4}
    assert found.rejected == {3: "has the name garden, under which the key of node 2 is registered"}
    assert "node 3 garden does not take part: it has the name garden, under which" in caplog.text
    FleetFile(tmp_path).register(found)
    listed = json.loads((tmp_path / "fleet.json").read_text())
    assert {name: each["node"] for name, each in listed["devices"].items()} == {"garden": 2, "shed": 4}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: None, "has no images: its data-path does not exist"),
        (lambda folder: folder.mkdir(), "has no images in its data-path (allowed are .arrow .parquet "),
        (
            lambda folder: write_file(folder / "a.parquet"),
            "cannot use the images in its data-path; its log has the reason",
        ),
    ],
)
def test_a_device_without_images_is_left_out_meanwhile(make, reason, places, monkeypatch):
    folder = places[0].parent / "other"
    make(folder)
    grid = Devices(context(data_path=places[0], client_name="a"), context(data_path=folder, client_name="b"))
    found = discover_clients(grid, 2, timeout=60)
    assert found.nodes == {0: 2}
    assert found.rejected[3].startswith(reason)
    manager = nodes.ClientManager(grid, found, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)
    write_images(folder, 3)
    assert manager.wait_for(1).nodes == {0: 2}  # it is not asked in every round
    monkeypatch.setattr(manager, "_retry_at", 0.0)
    assert manager.wait_for(1).nodes == {0: 2, 1: 3}
    assert manager.clients.info[3].num_images == 3


def write_file(file):
    file.parent.mkdir()
    file.write_bytes(b"PAR1")


MINOR = version("flwr").rpartition(".")[0]


@pytest.mark.parametrize(("flwr", "reason"), [("1.40.9", f"has flwr 1.40.9 and flwr {MINOR}."), (f"{MINOR}.77", "")])
def test_versions_of_flower_are_compared(flwr, reason):
    versions = {"a": version("flwr"), "b": flwr}
    records = [{"node-info": ConfigRecord({"name": name, "version-flwr": of})} for name, of in versions.items()]
    found = discover_clients(answering(*records), 2, timeout=60)
    assert found.rejected.get(3, "").startswith(reason)
    assert (3 in found.nodes.values()) == (not reason)


@pytest.mark.parametrize("rejected", [False, True])
def test_a_device_that_returns_is_asked_again(rejected, caplog, monkeypatch):
    """Node 3 is upgraded while it is offline; node 2 is asked once."""
    caplog.set_level("INFO", "fedssl")
    old = {"version-flwr": "1.40.9"} if rejected else {"version-torch": "2.0.0"}
    grid = answering(
        {"node-info": ConfigRecord({"name": "a", "version-flwr": version("flwr")})},
        {"node-info": ConfigRecord({"name": "b", **old})},
        {"node-info": ConfigRecord({"name": "b", "version-torch": version("torch")})},
    )
    monkeypatch.setattr(grid, "get_node_ids", lambda: [2, 3])
    manager = nodes.ClientManager(grid, discover_clients(grid, 2, timeout=60), timeout=60)
    assert (3 in manager.clients.rejected) == rejected
    assert ("device b has other versions than the server: torch 2.0.0 (here " in caplog.text) == (not rejected)
    monkeypatch.setattr(grid, "get_node_ids", lambda: [2])
    assert manager.wait_for(1).nodes == {0: 2}
    monkeypatch.setattr(grid, "get_node_ids", lambda: [2, 3])
    assert manager.wait_for(2).nodes == {0: 2, 1: 3}
    assert manager.clients.info[3].versions == {"torch": version("torch")}
    assert not manager.clients.rejected


def test_a_device_without_a_key_returns_after_its_session(monkeypatch):
    """Node 3 is the new session of node 2, which is online until its heartbeats are missed."""
    grid = answering(*({"node-info": ConfigRecord({"name": name})} for name in "aaa"))
    monkeypatch.setattr(grid, "get_node_ids", lambda: [2])
    manager = nodes.ClientManager(grid, discover_clients(grid, 1, timeout=60), timeout=60)
    monkeypatch.setattr(grid, "get_node_ids", lambda: [2, 3])
    assert manager.wait_for(1).nodes == {0: 2}
    assert "or, if it was restarted, wait a minute until its old session ends" in manager.clients.rejected[3]
    monkeypatch.setattr(grid, "get_node_ids", lambda: [3])
    assert manager.wait_for(1).nodes == {0: 3}


def answering(*records):
    """A grid whose nodes answer the query who they are with these records."""
    app, waiting = ClientApp(), list(records)

    @app.query("node_info")
    def who(message, context):
        return Message(RecordDict(waiting.pop(0)), reply_to=message)

    return AskedGrid(app, num_clients=len(records))


DEVICE = {"node-info": ConfigRecord({"name": "a"})}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"node-info": ConfigRecord({})},
        {"node-info": ConfigRecord({"name": "\x1b[2J"})},
        {"node-info": ConfigRecord({"name": "x" * 10**6})},
        {"node-info": ConfigRecord({"name": 3})},
        {"node-info": ConfigRecord({"name": "a", "partition-id": -1})},
        {"node-info": ConfigRecord({"name": "a", "partition-id": float("nan")})},
        {"node-info": ConfigRecord({"name": "a", "max-rank": 0})},
        {"metrics": MetricRecord({"partition-id": [1, 2], "num-partitions": 1})},
        {"metrics": MetricRecord({"partition-id": float("inf"), "num-partitions": 1})},
    ],
)
def test_a_node_that_answers_nonsense_takes_no_part(answer, caplog):
    assert discover_clients(answering(answer, DEVICE), 2, timeout=60).nodes == {0: 3}
    [record] = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 350


def test_numbers_are_given_in_the_order_of_places_and_names():
    names = {"name": "b"}, {"name": "a"}, {"name": "z", "partition-id": 0}
    grid = answering(*({"node-info": ConfigRecord(one)} for one in names))
    found = discover_clients(grid, 3, timeout=60)
    assert found.client_ids == {"z": 0, "a": 1, "b": 2}
    assert found.nodes == {0: 4, 1: 3, 2: 2}
    assert NodeInfo(partition=None, name="b").partitions is None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["method=supervised", "method.num_classes=2"], "Supervised needs labels, and edge clients share no list"),
        (["local_epochs=0"], "no device would train; set local_epochs=1 or more"),
        (["calibration=auxiliary"], "uses a share of the clients' images, which stay on the devices"),
        (["optimizer._target_=torch.optim.RMSprop"], "a _target_ was changed or a node deleted"),
    ],
)
def test_what_devices_cannot_do_is_refused_before_any_round(overrides, sentence, places, tmp_path):
    with pytest.raises(InputError, match=sentence):
        build_run(Devices(*devices(places, tmp_path)), compose([*SMALL, *overrides, f"output_dir={tmp_path}"]))


class Growing(Devices):
    """Devices of which the last one joins after the first round has begun."""

    begun = True

    def __init__(self, *contexts):
        super().__init__(*contexts)
        self.begun = False

    def get_node_ids(self):
        ids = super().get_node_ids()
        return ids if self.begun else ids[:-1]

    def push_messages(self, messages):
        self.begun |= any(message.metadata.message_type == "train" for message in messages)
        return super().push_messages(messages)


@pytest.mark.heavy
def test_a_device_that_joins_later_trains_from_then_on(places, tmp_path):
    folder = tmp_path / "run"
    run_server_app(Growing(*devices(places, tmp_path)), [*SMALL, "rounds=3", "num_clients=2", f"output_dir={folder}"])
    trained = [(row["round"], row["client"]) for row in read_lines(folder / "clients.jsonl")]
    assert trained == [(1, 0), (1, 1), *((round, client) for round in (2, 3) for client in (0, 1, 2))]
    fleet = json.loads((folder / "fleet.json").read_text())
    found = {name: (device["node"], device["images"]) for name, device in fleet["devices"].items()}
    assert found == {"a": (2, 9), "b": (3, 10), "c": (4, 11)}
    assert (fleet["training"], fleet["late"]) == ([], [])
    free = shutil.disk_usage(tmp_path).free // 10**6
    assert 0.5 * free < fleet["devices"]["a"]["free disk"] < 2 * free
    assert fleet["devices"]["c"]["versions"].keys() == {"python", "fedssl", "flwr", "torch", "torchvision"}
    assert OmegaConf.load(folder / "choices.yaml").partition == "natural"  # devices have their own images
    run_server_app(
        Devices(*devices(places, tmp_path)), [f"resume={folder}", "rounds=4", "aggregation.round_deadline=77"]
    )
    assert [row["client"] for row in read_lines(folder / "clients.jsonl") if row["round"] == 4] == [0, 1, 2]
