"""The counts of a run are those of its rounds."""

import re
from dataclasses import replace

import pytest

from client_app.worker import ClientWorker
from fedssl.errors import InputError
from fedssl.wire.messages import ClientUpdate
from simulation.round_counts import count_batches, count_notes, count_rounds
from simulation.run import run
from tests.planning import QUICK, build
from tests.runs import read_lines

UPDATE = ClientUpdate(layers={}, partition_id=0, train_loss=1.0, seconds=1.0)
BUFFERED = ["strategy=fedavg", "aggregation.buffered=true", "aggregation.min_updates=2", "rounds=8", "batch_size=4"]
EXTRA = ["aggregation.over_selection=2", "batch_size=4"]
VIRTUAL, ADAPTER = ["client_speed=lognormal"], ["tuning=lora", "tuning.rank=4"]
LOSSES = [*VIRTUAL, "availability=diurnal", "availability.period=20", "availability.dropout=0.3", "batch_size=4"]
LOSSES += ["aggregation.max_retries=20"]


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Return the counts of a run, and the lines of its rounds. The steps are compared."""
    trained, train = [], ClientWorker.train

    def recorded(self, plan, client, *args, **options):
        trained.append(client)
        return train(self, plan, client, *args, **options)

    monkeypatch.setattr(ClientWorker, "train", recorded)

    def both(*overrides):
        folder = tmp_path / "run"
        components = build([*QUICK, *overrides], folder)
        run([*QUICK, *overrides, f"output_dir={folder}"])
        saves_state = any(file.parent.parent.parent.name == "clients" for file in folder.rglob("round-*"))
        parts = components.context.gathered.layers
        counts = count_rounds(components, replace(UPDATE, uploaded_parts=parts, state_rounds=(0, int(saves_state))))
        client = components.federation.strategy.client
        passes = components.settings.training.epochs * client.trainings_per_round
        steps = [count_batches(components, len(components.client_data.parts[client])) for client in trained]
        assert sum(one.steps for one in counts) == passes * sum(steps)
        assert counts[-1].models == len(list(folder.glob("encoder*.pt")))
        return counts, read_lines(folder / "metrics.jsonl")

    return both


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=orchestra", "wire_dtype=int8"],  # a server side, and differences
        pytest.param(["method=byol", "strategy=fedu", "wire_dtype=fp16"], marks=pytest.mark.heavy),  # parts, a state
        ["strategy=l_dawa", "strategy.warmup_rounds=1", "rounds=3"],  # the metrics of replies change
        pytest.param(["schedule=layer_wise", "method=byol"], marks=pytest.mark.heavy),  # phases
        pytest.param(["schedule=layer_wise", "strategy=scaffold"], marks=pytest.mark.heavy),  # arrays of the strategy
        ["schedule=progressive", "calibration=auxiliary", "calibration.epochs=0"],  # all stages, in every round
        ["strategy.weighting=examples", "dataset.limit=300", "rounds=11", "checkpoint_every=3"],  # longer numbers
        BUFFERED,
        pytest.param([*BUFFERED, *LOSSES, "method=byol"], marks=pytest.mark.heavy),
        EXTRA,
        [*EXTRA, *VIRTUAL],
        pytest.param([*EXTRA, *ADAPTER, "num_clients=9"], marks=pytest.mark.heavy),  # a lost client receives the base
        pytest.param([*EXTRA, "strategy=local_only", "rounds=2"], marks=pytest.mark.heavy),
        pytest.param([*LOSSES, "rounds=8", "method=byol"], marks=pytest.mark.heavy),
        pytest.param([*LOSSES, "aggregation.min_updates=2"], marks=pytest.mark.heavy),
        [*ADAPTER, "tuning.ranks=[1,4,2]", "tuning.aggregation=svd", "rounds=2"],
        pytest.param([*ADAPTER, "tuning.ranks=[1,4,2]", "tuning.aggregation=stack"], marks=pytest.mark.heavy),
    ],
    ids=",".join,
)
def test_steps_and_bytes_are_those_of_the_run(planned, overrides):
    counts, lines = planned(*overrides)
    assert [(one.clients, one.bytes_down, one.bytes_up) for one in counts] == [
        (line["clients"], line["bytes_down"], line["bytes_up"]) for line in lines
    ]


def test_the_steps_of_clients_by_hand(tmp_path):
    """Clients of 20 images: ceil(20 / 8) = 3 batches, 2 epochs, 3 clients in each of 4 rounds."""
    components = build([*QUICK, "partition=iid", "batch_size=8", "local_epochs=2"], tmp_path)
    assert [counts.steps for counts in count_rounds(components, UPDATE)] == 4 * [3 * 3 * 2]


def test_clients_with_too_few_images_are_not_counted(tmp_path):
    """SimSiam needs three images, and one of three clients has two."""
    file = tmp_path / "partition.csv"
    file.write_text("client\n" + "0\n" * 2 + "1\n" * 40 + "2\n" * 58)
    overrides = ["num_clients=3", "partition=file", f"partition.file={file}", "method=simsiam"]
    components = build([*QUICK, *overrides, "batch_size=20"], tmp_path / "run")
    rounds = count_rounds(components, UPDATE)
    assert [(counts.clients, counts.steps) for counts in rounds] == 4 * [(2, 2 + 3)]


def test_bytes_of_parts_are_those_of_whole_models(planned, tmp_path):
    """Intervals are adjusted after round 2. The plan then has no weights by which they are known."""
    counts, lines = planned("strategy=euc", "rounds=6")
    planned_bytes = [one.bytes_down + one.bytes_up for one in counts]
    sent = [line["bytes_down"] + line["bytes_up"] for line in lines]
    assert planned_bytes[:2] == sent[:2]
    assert sum(planned_bytes) > sum(sent)
    components = build([*QUICK, "strategy=euc"], tmp_path)
    assert count_notes(components) == [
        "bytes are those of whole models: strategy=euc sends fewer layers, selected by weights"
    ]
    assert not count_notes(build([*QUICK, "strategy=euc", "strategy.interval=1"], tmp_path))
    (note,) = count_notes(build([*QUICK, "client_state.max_bytes=1000"], tmp_path))
    assert note == "bytes are those of clients with all states: client_state.max_bytes deletes some"
    (note,) = count_notes(build([*QUICK, "dataset.mean=federated"], tmp_path))
    assert note == "bytes are without the numbers of dataset.mean=federated, which are sent with each plan"


def test_a_run_that_would_end_is_refused(tmp_path):
    """All replies are lost; or client 3 of 5 is the only one that is ever online, and a round needs two."""
    lost = build([*QUICK, *LOSSES, "availability.dropout=1", "aggregation.max_retries=1"], tmp_path)
    message = "round 1 would end the run: 0 of 3 clients reply in virtual time and aggregation.min_updates=1 are needed"
    with pytest.raises(InputError, match=re.escape(message)):
        count_rounds(lost, UPDATE)
    (file := tmp_path / "online.csv").write_text("client,start,end\n3,0,1e9\n")
    offline = ["availability=trace", f"availability.file={file}", "aggregation.min_updates=2"]
    with pytest.raises(InputError, match="2 of 5 clients are never online together"):
        count_rounds(build([*QUICK, *VIRTUAL, *offline], tmp_path), UPDATE)
